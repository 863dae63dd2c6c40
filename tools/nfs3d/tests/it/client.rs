//! `nfs3d` in a process of its own, and a small NFS client.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nfs3_types::nfs3::*;
use nfs3_types::xdr_codec::{List, Opaque, Pack, Unpack};
use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::fabric::testing::loopback_address;
use rpcrdma::proto::binding::nfs3::{PROGRAM, Sizes, VERSION, bindings};
use rpcrdma::{CallError, Config, CreditMode, LocalClient, Reply};
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// Bounds hangs, measures nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server, and the directory that it exports.
pub(crate) struct Nfsd {
    child: Child,
    says: BufReader<ChildStdout>,
    pub(crate) address: String,
    pub(crate) mount_port: u16,
    options: Vec<String>,
    directory: Arc<TempDir>,
}

impl Nfsd {
    /// Serves a new directory, whose users are those of the calls if this is root.
    pub(crate) fn start(options: &[&str]) -> Self {
        let directory = Arc::new(tempfile::tempdir().expect("a temporary directory"));
        std::fs::create_dir(directory.path().join("export")).expect("a directory");
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Self::spawn(directory, options)
    }

    /// The same over TCP.
    pub(crate) fn start_on_tcp(options: &[&str]) -> Self {
        Self::start(&[&["--listen", &format!("iwarp:{}", loopback_address().0)], options].concat())
    }

    /// What a server says that ends at once, for what it has been told.
    pub(crate) fn refused(options: &[&str]) -> String {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let export = directory.path().join("export");
        std::fs::create_dir(&export).expect("a directory");
        let output = Command::new(env!("CARGO_BIN_EXE_nfs3d"))
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

    fn spawn(directory: Arc<TempDir>, options: Vec<String>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let elsewhere = options.iter().position(|option| option == "--listen");
        let address = match elsewhere {
            Some(at) => options[at + 1].clone(),
            None => format!("soft:nfs3d-test-{}-{number}", std::process::id()),
        };
        let mut program = Command::new(env!("CARGO_BIN_EXE_nfs3d"));
        // Two of them would be two addresses.
        if elsewhere.is_none() {
            program.args(["--listen", &address]);
        }
        let mut child = program
            .arg(directory.path().join("export"))
            .args(["--progress-timeout", "20", "--min-rate", "8192"])
            .args(["--mount-port", "0", "--clients", "1", "--squash", "none", "--key"])
            .arg(directory.path().join("key"))
            .args(&options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut says = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        says.read_line(&mut line).expect("text");
        let port = line.split("TCP port ").nth(1).and_then(|rest| rest.split(';').next());
        let mount_port = port.and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("it said {line:?}"));
        Self { child, says, address, mount_port, options, directory }
    }

    /// The exported directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("export").canonicalize().expect("it is there")
    }

    /// Ends the server, suddenly, and starts another one on the same directory.
    pub(crate) fn restart(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
        *self = Self::spawn(Arc::clone(&self.directory), self.options.clone());
    }

    /// Ends the server as its user does; returns what it said.
    pub(crate) fn stop(mut self) -> String {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it runs");
        let mut rest = String::new();
        self.says.read_to_string(&mut rest).expect("text");
        assert!(self.child.wait().expect("it ends").success());
        rest
    }

    /// A client as root, in version 2.
    pub(crate) fn client(&self) -> Nfs {
        self.client_as(0, CreditMode::V2Windowed)
    }

    /// A client as a user.
    pub(crate) fn client_as(&self, uid: u32, scheme: CreditMode) -> Nfs {
        let mut shard = Config::default();
        shard.wire.credit_mode = scheme;
        self.client_with(uid, shard)
    }

    /// A client as a user, with some configuration of its shard.
    pub(crate) fn client_with(&self, uid: u32, shard: Config) -> Nfs {
        let mut config = ClientConfig::new(PROGRAM, VERSION);
        config.credential = Credential::sys("tests", uid, uid, &[]).expect("a credential");
        config.bindings = Some(Arc::new(bindings(&Sizes::default())));
        let buffers = vec![(256 << 10, 4), (1 << 20, 2)];
        config.shard = shard;
        config.shard.memory.bulk_buffers = buffers;
        let client = LocalClient::connect(&self.address.parse().expect("an address"), config).expect("connected");
        let handle = crate::mount::mount(self.mount_port, &self.path()).expect("mounted");
        Nfs { client, root: nfs_fh3 { data: Opaque::owned(handle) } }
    }
}

impl Drop for Nfsd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether servers of this user can act for others.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A connection, and the root of what it is to.
pub(crate) struct Nfs {
    pub(crate) client: LocalClient,
    pub(crate) root: nfs_fh3,
}

/// Decodes results, all of them.
pub(crate) fn decode<T: Unpack>(mut results: &[u8]) -> T {
    let (value, _) = T::unpack(&mut results).expect("results that can be decoded");
    assert_eq!(results.len(), 0, "bytes behind the results");
    value
}

/// The arguments of a call, encoded.
pub(crate) fn encode(arguments: &impl Pack) -> Vec<u8> {
    let mut bytes = Vec::new();
    arguments.pack(&mut bytes).expect("memory");
    bytes
}

/// A name in a directory.
pub(crate) fn at<'a>(dir: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: filename3::from(name.as_bytes()) }
}

/// Attributes to set: a mode.
pub(crate) fn with_mode(mode: u32) -> sattr3 {
    sattr3 { mode: Nfs3Option::Some(mode), ..sattr3::default() }
}

/// The status of what failed.
#[track_caller]
pub(crate) fn status<T: std::fmt::Debug, E>(result: Nfs3Result<T, E>) -> nfsstat3 {
    match result {
        Nfs3Result::Ok(value) => panic!("it succeeded: {value:?}"),
        Nfs3Result::Err((status, _)) => status,
    }
}

impl Nfs {
    /// Calls with encoded arguments; the results may come to so many bytes.
    pub(crate) fn try_bytes(
        &mut self,
        procedure: NFS_PROGRAM,
        arguments: &[u8],
        longest: usize,
    ) -> Result<Reply, CallError> {
        let mut call = self.client.prepare(procedure as u32, arguments.len()).expect("memory");
        call.args_mut().copy_from_slice(arguments);
        call = call.expect_reply(longest);
        call = call.timeout(PATIENCE);
        self.client.call(call).map_err(CallError::from)
    }

    /// Calls, and decodes the results.
    #[track_caller]
    pub(crate) fn call<T: Unpack>(&mut self, procedure: NFS_PROGRAM, arguments: &impl Pack) -> T {
        let longest = match procedure {
            NFS_PROGRAM::NFSPROC3_READDIR | NFS_PROGRAM::NFSPROC3_READDIRPLUS => 70 << 10,
            NFS_PROGRAM::NFSPROC3_READLINK => 5000,
            _ => 1000,
        };
        let reply = self.try_bytes(procedure, &encode(arguments), longest).expect("a reply");
        decode(reply.results())
    }

    pub(crate) fn lookup(&mut self, dir: &nfs_fh3, name: &str) -> LOOKUP3res {
        self.call(NFS_PROGRAM::NFSPROC3_LOOKUP, &LOOKUP3args { what: at(dir, name) })
    }

    /// The handle of a name that is there.
    #[track_caller]
    pub(crate) fn find(&mut self, dir: &nfs_fh3, name: &str) -> nfs_fh3 {
        self.lookup(dir, name).unwrap().object
    }

    pub(crate) fn getattr(&mut self, object: &nfs_fh3) -> Result<fattr3, nfsstat3> {
        let args = GETATTR3args { object: object.clone() };
        match self.call::<GETATTR3res>(NFS_PROGRAM::NFSPROC3_GETATTR, &args) {
            Nfs3Result::Ok(results) => Ok(results.obj_attributes),
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }

    pub(crate) fn setattr(&mut self, object: &nfs_fh3, new: sattr3, guard: sattrguard3) -> SETATTR3res {
        let args = SETATTR3args { object: object.clone(), new_attributes: new, guard };
        self.call(NFS_PROGRAM::NFSPROC3_SETATTR, &args)
    }

    pub(crate) fn create(&mut self, dir: &nfs_fh3, name: &str, how: createhow3) -> CREATE3res {
        self.call(NFS_PROGRAM::NFSPROC3_CREATE, &CREATE3args { where_: at(dir, name), how })
    }

    /// Makes a file; its handle.
    #[track_caller]
    pub(crate) fn make(&mut self, dir: &nfs_fh3, name: &str) -> nfs_fh3 {
        self.create(dir, name, createhow3::GUARDED(with_mode(0o644))).unwrap().obj.unwrap()
    }

    /// Makes a directory; its handle.
    #[track_caller]
    pub(crate) fn make_dir(&mut self, dir: &nfs_fh3, name: &str) -> nfs_fh3 {
        let args = MKDIR3args { where_: at(dir, name), attributes: with_mode(0o755) };
        self.call::<MKDIR3res>(NFS_PROGRAM::NFSPROC3_MKDIR, &args).unwrap().obj.unwrap()
    }

    pub(crate) fn remove(&mut self, dir: &nfs_fh3, name: &str) -> REMOVE3res {
        self.call(NFS_PROGRAM::NFSPROC3_REMOVE, &REMOVE3args { object: at(dir, name) })
    }

    pub(crate) fn rmdir(&mut self, dir: &nfs_fh3, name: &str) -> RMDIR3res {
        self.call(NFS_PROGRAM::NFSPROC3_RMDIR, &RMDIR3args { object: at(dir, name) })
    }

    pub(crate) fn rename(&mut self, from: diropargs3<'_>, to: diropargs3<'_>) -> RENAME3res {
        self.call(NFS_PROGRAM::NFSPROC3_RENAME, &RENAME3args { from, to })
    }

    /// Reads into a Write chunk: attributes, whether that was the end, and the data.
    pub(crate) fn read(
        &mut self,
        file: &nfs_fh3,
        offset: u64,
        count: u32,
    ) -> Result<(fattr3, bool, Vec<u8>), nfsstat3> {
        let args = encode(&READ3args { file: file.clone(), offset, count });
        let room = self.client.alloc(self.client.first(), (count as usize).max(1)).expect("memory");
        let mut call = self.client.prepare(NFS_PROGRAM::NFSPROC3_READ as u32, args.len()).expect("memory");
        call.args_mut().copy_from_slice(&args);
        call = call.write_chunk_into(room);
        call = call.timeout(PATIENCE);
        let reply = self.client.call(call).expect("a reply");
        let mut results = reply.results();
        let (status, _) = nfsstat3::unpack(&mut results).expect("a status");
        if status != nfsstat3::NFS3_OK {
            let _: READ3resfail = decode(results);
            return Err(status);
        }
        let (attributes, _) = post_op_attr::unpack(&mut results).expect("attributes");
        let ((count, _), (eof, _)) =
            (u32::unpack(&mut results).expect("count"), bool::unpack(&mut results).expect("eof"));
        let length: u32 = decode(results);
        let data = reply.chunk(0).expect("the chunk").to_vec();
        assert_eq!((count, length as usize), (length, data.len()));
        assert_eq!(reply.results().len(), 104, "what clients expect in front of the data");
        Ok((attributes.unwrap(), eof, data))
    }

    /// Reads without a chunk.
    pub(crate) fn read_inline(&mut self, file: &nfs_fh3, offset: u64, count: u32) -> (bool, Vec<u8>) {
        self.read_expecting(file, offset, count, 4000)
    }

    /// Reads without a Write chunk, and without a Reply chunk if results of so many bytes need none.
    pub(crate) fn read_expecting(
        &mut self,
        file: &nfs_fh3,
        offset: u64,
        count: u32,
        results: usize,
    ) -> (bool, Vec<u8>) {
        let args = encode(&READ3args { file: file.clone(), offset, count });
        let reply = self.try_bytes(NFS_PROGRAM::NFSPROC3_READ, &args, results).expect("a reply");
        let results = decode::<READ3res<'_>>(reply.results()).unwrap();
        assert!(results.file_attributes.is_some());
        assert_eq!(results.count as usize, results.data.len());
        (results.eof, results.data.into_owned())
    }

    /// Writes from a Read chunk.
    pub(crate) fn write(&mut self, file: &nfs_fh3, offset: u64, data: &[u8], stable: stable_how) -> WRITE3res {
        let mut args = encode(file);
        args.extend(encode(&offset));
        args.extend(encode(&(data.len() as u32)));
        args.extend(encode(&stable));
        args.extend(encode(&(data.len() as u32)));
        let mut buf = self.client.alloc(self.client.first(), data.len()).expect("memory");
        buf.set_window(0, data.len());
        buf.copy_from_slice(data);
        let mut call = self.client.prepare(NFS_PROGRAM::NFSPROC3_WRITE as u32, args.len()).expect("memory");
        call.args_mut().copy_from_slice(&args);
        call = call.read_chunk(args.len(), buf);
        call = call.timeout(PATIENCE);
        decode(self.client.call(call).expect("a reply").results())
    }

    /// Writes without a chunk.
    pub(crate) fn write_inline(&mut self, file: &nfs_fh3, offset: u64, data: &[u8]) -> WRITE3res {
        let (count, stable) = (data.len() as u32, stable_how::FILE_SYNC);
        let args = WRITE3args { file: file.clone(), offset, count, stable, data: Opaque::borrowed(data) };
        self.call(NFS_PROGRAM::NFSPROC3_WRITE, &args)
    }

    pub(crate) fn commit(&mut self, file: &nfs_fh3) -> COMMIT3res {
        let args = COMMIT3args { file: file.clone(), offset: 0, count: 0 };
        self.call(NFS_PROGRAM::NFSPROC3_COMMIT, &args)
    }

    /// One part of a directory.
    pub(crate) fn readdir(
        &mut self,
        dir: &nfs_fh3,
        cookie: u64,
        count: u32,
    ) -> Result<(Vec<entry3<'static>>, bool), nfsstat3> {
        let args = READDIR3args { dir: dir.clone(), cookie, cookieverf: cookieverf3::default(), count };
        match self.call::<READDIR3res<'_>>(NFS_PROGRAM::NFSPROC3_READDIR, &args) {
            Nfs3Result::Ok(results) => {
                assert!(results.dir_attributes.is_some());
                let List(entries) = results.reply.entries;
                Ok((entries, results.reply.eof))
            }
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }

    /// One part of a directory, with attributes and handles.
    pub(crate) fn readdirplus(
        &mut self,
        dir: &nfs_fh3,
        cookie: u64,
        dircount: u32,
        maxcount: u32,
    ) -> Result<(Vec<entryplus3<'static>>, bool), nfsstat3> {
        let cookieverf = cookieverf3::default();
        let args = READDIRPLUS3args { dir: dir.clone(), cookie, cookieverf, dircount, maxcount };
        match self.call::<READDIRPLUS3res<'_>>(NFS_PROGRAM::NFSPROC3_READDIRPLUS, &args) {
            Nfs3Result::Ok(results) => {
                assert!(results.dir_attributes.is_some());
                let List(entries) = results.reply.entries;
                Ok((entries, results.reply.eof))
            }
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }
}

/// Data that tells where it is from.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_be_bytes()).take(len).collect()
}

/// A file made at the server.
pub(crate) fn put(path: &Path, data: &[u8]) {
    std::fs::write(path, data).expect("written");
}
