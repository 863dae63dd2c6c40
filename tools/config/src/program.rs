//! Common parts of all programs: start, version, output and exit.

use std::error::Error;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::Context;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Server};
use rpcrdma_mempool::{exceeded_limit, thread_limits};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use signal_hook::consts::SIGXFSZ;

/// First word on standard output once clients can connect.
pub const READY: &str = "listening";
/// Time limit of a drain.
const DRAIN: Duration = Duration::from_secs(10);

/// Text of `--version`, without the program's name: version, commit, features, fabrics, protocols.
pub static VERSION: LazyLock<String> = LazyLock::new(|| {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("RPCRDMA_COMMIT"));
    let (features, verbs) = if "verbs:host".parse::<Address>().is_ok() { ("verbs", ", verbs") } else { ("none", "") };
    format!(
        "{version}\ncommit: {commit}\nfeatures: {features}\nfabrics: soft, iwarp{verbs}\nprotocols: RPC-over-RDMA 1, 2"
    )
});

/// Prepares the process. Each program calls this function first.
///
/// Afterwards, a write beyond RLIMIT_FSIZE (`ulimit -f`) fails with EFBIG. By default, SIGXFSZ would end the process
/// without a message. Child processes do not inherit this handling.
pub fn start() {
    // Unlike an ignored signal, a handler is reset by exec. Registering a handler for this signal cannot fail.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Returns the text of an error with its sources, and the process limit that a system call has reached.
pub fn describe(error: &(dyn Error + 'static)) -> String {
    let chain = || std::iter::successors(Some(error), |&error| error.source());
    let text = chain().map(ToString::to_string).collect::<Vec<_>>().join(": ");
    let limit = chain().find_map(|error| {
        let errno = error.downcast_ref::<Errno>().map(|&errno| io::Error::from(errno));
        exceeded_limit(errno.as_ref().or_else(|| error.downcast_ref())?)
    });
    match limit {
        // Errors of the library already name the limit.
        Some(limit) if !text.contains("RLIMIT_") => format!("{text} ({limit})"),
        _ => text,
    }
}

/// Starts a thread.
///
/// # Errors
/// The system refuses the thread. The error names the limits on threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map(drop).map_err(|error| no_thread(name, &error))
}

/// Returns the error for a thread that could not be started, with the limits on threads.
pub fn no_thread(name: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot start thread `{name}`: {error} ({})", thread_limits()))
}

/// Prints a line on standard output. Ignores errors, such as a reader that has exited.
pub fn say(line: &str) {
    let mut out = io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// File for a result. A new file is removed on drop, unless the result was written.
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    file: File,
    /// Whether drop removes the file.
    is_to_remove: bool,
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        let identity = |file: Metadata| (file.dev(), file.ino());
        // The path may be a link, and another program may have replaced the file, which then stays.
        if self.is_to_remove
            && let Ok(path) = self.path.canonicalize()
            && path.metadata().ok().map(identity) == self.file.metadata().ok().map(identity)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// Opens a file for a result before the run, so that a wrong path fails immediately.
///
/// The file keeps its content until [`write_result`].
///
/// # Errors
/// Those of the system call.
pub fn open_result(path: &Path) -> io::Result<ResultFile> {
    let is_to_remove = !path.exists();
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    Ok(ResultFile { path: path.to_owned(), file, is_to_remove })
}

/// Replaces the content of a file from [`open_result`], or writes to a pipe or device.
///
/// If the disk is full, an old file keeps its content and a new file is removed.
///
/// # Errors
/// Those of the system calls.
pub fn write_result(result: &mut ResultFile, text: &[u8]) -> io::Result<()> {
    replace(&mut result.file, text)?;
    result.is_to_remove = false;
    Ok(())
}

fn replace(file: &mut File, text: &[u8]) -> io::Result<()> {
    let len = text.len() as u64;
    if !file.metadata()?.is_file() {
        return file.write_all(text);
    }
    match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, len.max(1)) {
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error.into()),
    }
    file.write_all(text)?;
    file.set_len(len)
}

/// Prints a line on standard error and ignores errors.
///
/// `eprintln!` would panic if the write fails, such as to a log on a full disk.
#[macro_export]
macro_rules! print_error {
    ($($text:tt)*) => { $crate::program::print_error(format_args!($($text)*)) };
}

#[doc(hidden)]
pub fn print_error(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Returns the exit code of a program. Prints an error on standard error, after `prefix`.
pub fn exit(prefix: &str, outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error!("{prefix}: {}", describe(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Returns a server's first address and its configuration, with one shard per core.
///
/// Without `cores` there is one shard per address.
///
/// # Errors
/// There is no address, or there are fewer cores than addresses.
pub fn shards<'a>(listen: &'a [Address], cores: &[usize]) -> anyhow::Result<(&'a Address, ServerConfig)> {
    let (first, others) = listen.split_first().context("--listen: no address")?;
    let (count, addresses) = (cores.len(), listen.len());
    let too_few = format!("--cores: {count} cores for the {addresses} addresses of --listen");
    anyhow::ensure!(count == 0 || count >= addresses, too_few);
    let shards = if count == 0 { addresses } else { count };
    let (cores, more_addresses) = ((count > 0).then(|| cores.to_vec()), others.to_vec());
    Ok((first, ServerConfig { shards, cores, more_addresses, ..ServerConfig::default() }))
}

/// Drains a server for at most 10 seconds. Returns a line with the numbers of its calls.
pub fn drain(server: Server) -> String {
    let before = server.stats();
    let (drained, stats) = match server.drain(DRAIN) {
        Ok(stats) => ("drained".to_owned(), stats),
        Err(error) => (error.to_string(), before),
    };
    let sum = |name| stats.iter().filter_map(|shard| shard.get(name)).sum::<u64>();
    let (calls, failed, shed) = (sum("calls"), sum("calls_failed"), sum("calls_shed"));
    format!("{drained}; {calls} calls served, {failed} refused, {shed} dropped, which clients retransmit")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn errors_name_an_exceeded_limit_once() {
        let text_of = |error: anyhow::Error| describe(error.as_ref());
        let text = text_of(anyhow::Error::from(Errno::MFILE).context("open"));
        assert!(text.starts_with("open: ") && text.contains("(RLIMIT_NOFILE is "), "{text}");
        let error: io::Result<()> = Err(Errno::MFILE.into());
        let text = text_of(error.context("dup; RLIMIT_NOFILE is 7").unwrap_err());
        assert_eq!(text.matches("RLIMIT_NOFILE").count(), 1, "{text}");
        assert_eq!(text_of(Errno::NOENT.into()), Errno::NOENT.to_string());
        let text = no_thread("worker", &Errno::AGAIN.into()).to_string();
        assert!(text.contains("thread `worker`") && text.contains("RLIMIT_NPROC is "), "{text}");
    }

    #[test]
    fn writes_beyond_the_file_size_limit_are_errors() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        start();
        let hard = getrlimit(Resource::Fsize).maximum;
        let file = tempfile::tempfile().expect("a file");
        // The limit applies to the whole process, whose other tests write no large file.
        setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 30), maximum: hard }).expect("below the hard limit");
        let error = file.set_len((1 << 30) + 1).expect_err("beyond the limit");
        let text = describe(&error);
        assert!(text.contains("RLIMIT_FSIZE is 1073741824 bytes"), "{text}");
        setrlimit(Resource::Fsize, Rlimit { current: hard, maximum: hard }).expect("the hard limit");
    }

    #[test]
    fn a_result_replaces_the_old_one_unless_the_disk_is_full() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
        use std::os::unix::fs::FileExt;
        let content = |file: &File| {
            let mut content = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut content, 0).unwrap();
            content
        };
        let file = || File::from(memfd_create("text", MemfdFlags::ALLOW_SEALING).unwrap());
        let (old, long) = (vec![b'o'; 5000], vec![b'n'; 10_000]);
        for new in [&long[..100], &long] {
            let mut file = file();
            file.write_all_at(&old, 0).unwrap();
            replace(&mut file, new).unwrap();
            assert!(content(&file) == new);
        }
        // A sealed file cannot grow, like a file on a full disk.
        let mut file = file();
        file.write_all_at(&old, 0).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        replace(&mut file, &long).unwrap_err();
        assert!(content(&file) == old);
    }

    #[test]
    fn a_new_file_without_a_result_is_removed_and_an_old_one_stays() {
        let directory = tempfile::tempdir().unwrap();
        let [new, link, old] = ["new", "link", "old"].map(|name| directory.path().join(name));
        std::os::unix::fs::symlink(&new, &link).unwrap();
        fs::write(&old, "").unwrap();
        for path in [&new, &link, &old] {
            drop(open_result(path).unwrap());
            assert_eq!((new.exists(), link.is_symlink(), old.exists()), (false, true, true), "{}", path.display());
        }
        write_result(&mut open_result(&link).unwrap(), b"text").unwrap();
        drop(open_result(&new).unwrap());
        assert_eq!(fs::read(&new).unwrap(), b"text");
    }
}
