//! `nfs3d` in its own process, and a small NFS client.

use std::io::{BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::fabric::testing::loopback_address;
use rpcrdma::typed::{CallOptions, Signature};
use rpcrdma::xdr::{self, Bulk, Decode, Encode};
use rpcrdma::{CallError, Config, CreditMode, LocalClient, Reply};
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::*;
use rpcrdma_nfs3d::nfs3::*;
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// Time limit of a call, which only bounds a hang.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A command that runs a program under a limit of the shell, such as `ulimit -n 512`.
pub(crate) fn limited(limit: &str, program: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", &format!(r#"{limit} && exec "$@""#), "bash", program]);
    command
}

/// A server, and the directory that it exports.
pub(crate) struct Nfsd {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The line that the server printed when it was ready.
    pub(crate) ready: String,
    log: Option<ChildStderr>,
    pub(crate) address: String,
    pub(crate) mount_port: u16,
    options: Vec<String>,
    launcher: Launcher,
    directory: Arc<TempDir>,
}

/// A program and its arguments, which precede the command line of the server.
type Launcher = Vec<String>;

impl Nfsd {
    /// Starts a server of a new directory. As root, it acts as the users of the calls.
    pub(crate) fn start(options: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        std::fs::create_dir(directory.path().join("export")).expect("a directory");
        Self::start_in(directory, options)
    }

    /// Starts a server of the directory `export` in `directory`, where it also creates the key.
    pub(crate) fn start_in(directory: TempDir, options: &[&str]) -> Self {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Self::spawn(Arc::new(directory), Launcher::new(), options)
    }

    /// Starts a server under a limit of the shell, such as `ulimit -n 512`, and captures its log.
    pub(crate) fn start_limited(limit: &str, options: &[&str]) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a temporary directory"));
        std::fs::create_dir(directory.path().join("export")).expect("a directory");
        let launcher = ["bash", "-c", &format!(r#"{limit} && exec "$@""#), "bash"].map(str::to_owned).to_vec();
        Self::spawn(directory, launcher, options.iter().map(|&option| option.to_owned()).collect())
    }

    /// Starts a server over TCP in its own mount namespace, which needs root. A shell runs the script first, with the
    /// path of the new directory as `$EXPORT`. The script's last command ends in `"$@"`, which is the server.
    pub(crate) fn start_after(script: &str, options: &[&str]) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a temporary directory"));
        let export = directory.path().join("export");
        std::fs::create_dir(&export).expect("a directory");
        let script = format!("EXPORT={}; set -e; {script}", export.display());
        let launcher = ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
        let address = format!("iwarp:{}", loopback_address().0);
        let options = ["--listen", &address].iter().chain(options).map(|&option| option.to_owned()).collect();
        Self::spawn(directory, launcher, options)
    }

    /// A path as the server sees it in its mount namespace.
    pub(crate) fn server_path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.child.id(), self.path().join(path).display()))
    }

    /// Starts a server of a new directory over TCP.
    pub(crate) fn start_on_tcp(options: &[&str]) -> Self {
        Self::start(&[&["--listen", &format!("iwarp:{}", loopback_address().0)], options].concat())
    }

    /// Standard error of a server that does not start because of its options.
    pub(crate) fn start_error(options: &[&str]) -> String {
        Self::start_error_limited("true", options)
    }

    /// Standard error of a server that does not start, under a limit of the shell.
    pub(crate) fn start_error_limited(limit: &str, options: &[&str]) -> String {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let export = directory.path().join("export");
        std::fs::create_dir(&export).expect("a directory");
        let output = limited(limit, env!("CARGO_BIN_EXE_nfs3d"))
            .arg(&export)
            .args(["--mount-port", "0", "--key"])
            .arg(directory.path().join("key"))
            .args(options)
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("text")
    }

    fn spawn(directory: Arc<TempDir>, launcher: Launcher, options: Vec<String>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let listen = options.iter().position(|option| option == "--listen");
        let address = match listen {
            Some(at) => options[at + 1].clone(),
            None => format!("soft:nfs3d-test-{}-{number}", std::process::id()),
        };
        let mut words = launcher.iter().map(String::as_str).chain([env!("CARGO_BIN_EXE_nfs3d")]);
        let mut program = Command::new(words.next().expect("a program"));
        program.args(words);
        if !launcher.is_empty() {
            program.stderr(Stdio::piped());
        }
        // A second `--listen` would add an address.
        if listen.is_none() {
            program.args(["--listen", &address]);
        }
        if !options.iter().any(|option| option == "--clients") {
            program.args(["--clients", "1"]);
        }
        let mut child = program
            .arg(directory.path().join("export"))
            .args(["--progress-timeout", "20", "--min-rate", "8192"])
            .args(["--mount-port", "0", "--squash", "none", "--key"])
            .arg(directory.path().join("key"))
            .args(&options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("text");
        let port = line.split("TCP port ").nth(1).and_then(|rest| rest.split(';').next());
        let mount_port = port
            .and_then(|port| port.parse().ok())
            .unwrap_or_else(|| panic!("not the line of a ready server: {line:?}"));
        let log = child.stderr.take();
        Self { child, stdout, ready: line, log, address, mount_port, options, launcher, directory }
    }

    /// The exported directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("export").canonicalize().expect("it is there")
    }

    /// Kills the server, and starts another one of the same directory.
    pub(crate) fn restart(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
        *self = Self::spawn(Arc::clone(&self.directory), self.launcher.clone(), self.options.clone());
    }

    /// Stops the server by SIGTERM. Returns the rest of its standard output.
    pub(crate) fn stop(mut self) -> String {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it runs");
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("text");
        assert!(self.child.wait().expect("it ends").success());
        rest
    }

    /// Stops a server whose log was captured. Returns the log.
    pub(crate) fn stop_with_log(mut self) -> String {
        let mut log = self.log.take().expect("kept");
        self.stop();
        let mut text = String::new();
        log.read_to_string(&mut text).expect("text");
        text
    }

    /// Connects a client as root, in version 2.
    pub(crate) fn client(&self) -> Nfs {
        self.client_as(0, CreditMode::V2Windowed)
    }

    /// Connects a client as a user.
    pub(crate) fn client_as(&self, uid: u32, credit_mode: CreditMode) -> Nfs {
        let mut shard = Config::default();
        shard.wire.credit_mode = credit_mode;
        self.client_with(uid, shard)
    }

    /// Connects a client as a user, with a configuration of the client's shard.
    pub(crate) fn client_with(&self, uid: u32, shard: Config) -> Nfs {
        self.connect(Credential::sys("tests", uid, uid, &[]).expect("a credential"), shard)
    }

    /// Connects a client as a user with supplementary groups.
    pub(crate) fn client_in(&self, uid: u32, groups: &[u32]) -> Nfs {
        self.connect(Credential::sys("tests", uid, uid, groups).expect("a credential"), Config::default())
    }

    fn connect(&self, credential: Credential, shard: Config) -> Nfs {
        let mut config = ClientConfig::new(PROGRAM, VERSION);
        // The host may be busy with other tests.
        config.connect.timeout = Duration::from_secs(60);
        config.credential = credential;
        config.bindings = Some(Arc::new(bindings()));
        let buffers = vec![(256 << 10, 4), (1 << 20, 2)];
        config.shard = shard;
        config.shard.memory.bulk_buffers = buffers;
        let client = LocalClient::connect(&self.address.parse().expect("an address"), config).expect("connected");
        let handle = crate::mount::mount(self.mount_port, &self.path()).expect("mounted");
        Nfs { client, root: Fh { data: handle.leak() } }
    }
}

impl Drop for Nfsd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// True if servers of this user can act as other users.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// True if servers of this user can act as other users. Otherwise, prints that the test does not run.
pub(crate) fn can_switch_users() -> bool {
    if !is_root() {
        println!("not run: only root can act as other users");
    }
    is_root()
}

/// A handle. Its bytes are leaked, so that they live as long as the test.
pub(crate) type Fh = NfsFh3<'static>;

/// A connection, and the handle of the exported directory.
pub(crate) struct Nfs {
    pub(crate) client: LocalClient,
    pub(crate) root: Fh,
}

/// Decodes results, which must have no further bytes.
pub(crate) fn decode<T: Decode<'static>>(results: &[u8]) -> T {
    xdr::decode(results.to_vec().leak()).expect("results that can be decoded")
}

/// Encodes the arguments of a call.
pub(crate) fn encode(arguments: &impl Encode) -> Vec<u8> {
    xdr::encode(arguments).expect("within its bounds")
}

/// A name in a directory.
pub(crate) fn at<'a>(dir: &Fh, name: &'a str) -> Diropargs3<'a> {
    Diropargs3 { dir: *dir, name: Filename3(name.as_bytes()) }
}

/// Attributes that set a mode.
pub(crate) fn with_mode(mode: u32) -> Sattr3 {
    Sattr3 { mode: Some(mode), ..UNCHANGED }
}

/// Attributes that set a size.
pub(crate) fn with_size(size: u64) -> Sattr3 {
    Sattr3 { size: Some(size), ..UNCHANGED }
}

/// Status of a failed call.
#[track_caller]
pub(crate) fn status<T: std::fmt::Debug>(result: Result<T, Nfsstat3>) -> Nfsstat3 {
    result.expect_err("the call succeeded")
}

/// Results of a procedure: those of success, or the status of a failure.
pub(crate) trait Results: Decode<'static> {
    type Ok: std::fmt::Debug;
    fn split(self) -> Result<Self::Ok, Nfsstat3>;
}

macro_rules! results {
    ($($results:ty: $ok:ty,)*) => {
        $(impl Results for $results {
            type Ok = $ok;
            fn split(self) -> Result<$ok, Nfsstat3> {
                self.into_result()
            }
        })*
    };
}
results! {
    Getattr3Res: Getattr3Resok,
    Setattr3Res: Setattr3Resok,
    Lookup3Res<'static>: Lookup3Resok<'static>,
    Access3Res: Access3Resok,
    Readlink3Res<'static>: Readlink3Resok<'static>,
    Read3Res<'static>: Read3Resok<'static>,
    Write3Res: Write3Resok,
    Create3Res<'static>: Create3Resok<'static>,
    Remove3Res: Remove3Resok,
    Rename3Res: Rename3Resok,
    Link3Res: Link3Resok,
    Readdir3Res<'static>: Readdir3Resok<'static>,
    Readdirplus3Res<'static>: Readdirplus3Resok<'static>,
    Fsstat3Res: Fsstat3Resok,
    Fsinfo3Res: Fsinfo3Resok,
    Pathconf3Res: Pathconf3Resok,
    Commit3Res: Commit3Resok,
}

/// Outcome of a procedure.
pub(crate) type Outcome<P> = Result<<<P as Signature>::Results<'static> as Results>::Ok, Nfsstat3>;

impl Nfs {
    /// Calls with encoded arguments. The results have at most `longest` bytes.
    pub(crate) fn try_bytes(&mut self, procedure: u32, arguments: &[u8], longest: usize) -> Result<Reply, CallError> {
        let mut call = self.client.prepare(procedure, arguments.len()).expect("memory");
        call.args_mut().copy_from_slice(arguments);
        call = call.expect_reply(longest);
        call = call.timeout(CALL_TIMEOUT);
        self.client.call(call).map_err(CallError::from)
    }

    fn send<P: Signature>(&mut self, options: CallOptions<P>, args: &P::Args<'_>) -> Reply {
        let first = self.client.first();
        let call = options.timeout(CALL_TIMEOUT).into_call(&mut (&mut self.client, first), args).expect("memory");
        self.client.call(call).expect("a reply")
    }

    /// Calls, and decodes the results.
    #[track_caller]
    pub(crate) fn call<P>(&mut self, args: &P::Args<'_>) -> Outcome<P>
    where
        P: Signature,
        P::Results<'static>: Results,
    {
        decode::<P::Results<'static>>(self.send::<P>(CallOptions::new(), args).results()).split()
    }

    pub(crate) fn lookup(&mut self, dir: &Fh, name: &str) -> Outcome<Lookup> {
        self.call::<Lookup>(&Lookup3Args { what: at(dir, name) })
    }

    /// The handle of an existing name.
    #[track_caller]
    pub(crate) fn find(&mut self, dir: &Fh, name: &str) -> Fh {
        self.lookup(dir, name).unwrap().object
    }

    pub(crate) fn getattr(&mut self, object: &Fh) -> Result<Fattr3, Nfsstat3> {
        self.call::<Getattr>(&Getattr3Args { object: *object }).map(|results| results.obj_attributes)
    }

    pub(crate) fn setattr(&mut self, object: &Fh, new_attributes: Sattr3, guard: Sattrguard3) -> Outcome<Setattr> {
        self.call::<Setattr>(&Setattr3Args { object: *object, new_attributes, guard })
    }

    pub(crate) fn create(&mut self, dir: &Fh, name: &str, how: Createhow3) -> Outcome<Create> {
        self.call::<Create>(&Create3Args { r#where: at(dir, name), how })
    }

    /// Creates a file, and returns its handle.
    #[track_caller]
    pub(crate) fn make(&mut self, dir: &Fh, name: &str) -> Fh {
        self.create(dir, name, Createhow3::Guarded(with_mode(0o644))).unwrap().obj.unwrap()
    }

    /// Creates a directory, and returns its handle.
    #[track_caller]
    pub(crate) fn make_dir(&mut self, dir: &Fh, name: &str) -> Fh {
        let args = Mkdir3Args { r#where: at(dir, name), attributes: with_mode(0o755) };
        self.call::<Mkdir>(&args).unwrap().obj.unwrap()
    }

    pub(crate) fn remove(&mut self, dir: &Fh, name: &str) -> Outcome<Remove> {
        self.call::<Remove>(&Remove3Args { object: at(dir, name) })
    }

    pub(crate) fn rmdir(&mut self, dir: &Fh, name: &str) -> Outcome<Rmdir> {
        self.call::<Rmdir>(&Rmdir3Args { object: at(dir, name) })
    }

    pub(crate) fn rename(&mut self, from: Diropargs3<'_>, to: Diropargs3<'_>) -> Outcome<Rename> {
        self.call::<Rename>(&Rename3Args { from, to })
    }

    /// Reads into a Write chunk. Returns the attributes, whether the end was reached, and the data.
    pub(crate) fn read(&mut self, file: &Fh, offset: u64, count: u32) -> Result<(Fattr3, bool, Vec<u8>), Nfsstat3> {
        let room = self.client.alloc(self.client.first(), (count as usize).max(1)).expect("memory");
        let args = Read3Args { file: *file, offset, count };
        let reply = self.send(CallOptions::<Read>::new().write_chunk_into(room), &args);
        // The results are decoded field by field, because the data is not in the message.
        let mut results = xdr::Decoder::new(reply.results());
        let status = Nfsstat3::decode(&mut results).expect("a status");
        if status != Nfsstat3::Ok {
            let _: Read3Resfail = decode(results.rest());
            return Err(status);
        }
        let (attributes, count, eof, length): (PostOpAttr, u32, bool, u32) = decode(results.rest());
        let data = reply.chunk(0).expect("the chunk").to_vec();
        assert_eq!((count, length as usize), (length, data.len()));
        assert_eq!(reply.results().len(), 104, "clients expect this length in front of the data");
        Ok((attributes.unwrap(), eof, data))
    }

    /// Reads without a chunk.
    pub(crate) fn read_inline(&mut self, file: &Fh, offset: u64, count: u32) -> (bool, Vec<u8>) {
        self.read_expecting(file, offset, count, 4000)
    }

    /// Reads without a Write chunk, and without a Reply chunk if `results` bytes of results need none.
    pub(crate) fn read_expecting(&mut self, file: &Fh, offset: u64, count: u32, results: usize) -> (bool, Vec<u8>) {
        let args = encode(&Read3Args { file: *file, offset, count });
        let reply = self.try_bytes(Read::NUMBER, &args, results).expect("a reply");
        let results = decode::<Read3Res<'_>>(reply.results()).split().unwrap();
        assert!(results.file_attributes.is_some());
        assert_eq!(results.count as usize, results.data.len());
        (results.eof, results.data.bytes().to_vec())
    }

    /// Writes from a Read chunk.
    pub(crate) fn write(&mut self, file: &Fh, offset: u64, data: &[u8], stable: StableHow) -> Outcome<Write> {
        let mut buf = self.client.alloc(self.client.first(), data.len()).expect("memory");
        buf.set_window(0, data.len());
        buf.copy_from_slice(data);
        let (count, data) = (data.len() as u32, Bulk::placed(data.len()));
        let args = Write3Args { file: *file, offset, count, stable, data };
        decode::<Write3Res>(self.send(CallOptions::<Write>::new().lend(buf), &args).results()).split()
    }

    /// Writes without a chunk.
    pub(crate) fn write_inline(&mut self, file: &Fh, offset: u64, data: &[u8]) -> Outcome<Write> {
        let (count, stable) = (data.len() as u32, StableHow::FileSync);
        self.call::<Write>(&Write3Args { file: *file, offset, count, stable, data: data.into() })
    }

    pub(crate) fn commit(&mut self, file: &Fh) -> Outcome<Commit> {
        self.call::<Commit>(&Commit3Args { file: *file, offset: 0, count: 0 })
    }

    /// One part of a directory.
    pub(crate) fn readdir(
        &mut self,
        dir: &Fh,
        cookie: u64,
        count: u32,
    ) -> Result<(Vec<Entry3<'static>>, bool), Nfsstat3> {
        let args = Readdir3Args { dir: *dir, cookie, cookieverf: [0; 8], count };
        let results = self.call::<Readdir>(&args)?;
        assert!(results.dir_attributes.is_some());
        Ok((results.reply.entries.iter().collect(), results.reply.eof))
    }

    /// One part of a directory, with attributes and handles.
    pub(crate) fn readdirplus(
        &mut self,
        dir: &Fh,
        cookie: u64,
        dircount: u32,
        maxcount: u32,
    ) -> Result<(Vec<Entryplus3<'static>>, bool), Nfsstat3> {
        let args = Readdirplus3Args { dir: *dir, cookie, cookieverf: [0; 8], dircount, maxcount };
        let results = self.call::<Readdirplus>(&args)?;
        assert!(results.dir_attributes.is_some());
        Ok((results.reply.entries.iter().collect(), results.reply.eof))
    }
}

/// Data whose bytes depend on their position.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_be_bytes()).take(len).collect()
}

/// Writes a file of the server or of the client, without NFS.
pub(crate) fn put(path: &Path, data: &[u8]) {
    std::fs::write(path, data).expect("written");
}
