//! Makes NFS calls under callgrind, by which `tests/instructions/run` counts the instructions of each side.
//!
//! As in `bench/examples/instructions.rs`, both sides run on one thread, and each turn advances a simulated clock. The
//! server is that of `nfs3d --workers 0`, and the client uses nfs3d's generated types. Instructions of the kernel are
//! not counted.
//!
//! Usage: `nfs_instructions CALLS getattr|lookup|read|write|readdirplus DIRECTORY`. The directory must be empty.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rpcrdma::client::{ClientConfig, Credential, LocalClient};
use rpcrdma::config::{DebugConfig, MemoryConfig, PollConfig};
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::shard::{Shard, SimulatedTime};
use rpcrdma::typed::{CallOptions, Response, Signature};
use rpcrdma::xdr::{self, Bulk};
use rpcrdma::{Address, Config, IdlePolicy};
use rpcrdma_nfs3d::mount3::mount_v3;
use rpcrdma_nfs3d::mount3::{Dirpath, Mountres3};
use rpcrdma_nfs3d::nfs3::nfs_v3::{Getattr, Lookup, PROGRAM, Read, Readdirplus, VERSION, Write, bindings};
use rpcrdma_nfs3d::nfs3::*;
use rpcrdma_nfs3d::{Export, HandleSource, Key, Options, Policy, Squash, mount, nfs};
use rpcrdma_rpcbind::stream::StreamClient;

type Failure = Box<dyn Error>;
type Client = LocalClient<SoftwareFabric>;

/// Bytes of READ and WRITE.
const BLOCK: usize = 4096;
/// Number of entries of READDIRPLUS, including `.` and `..`.
const ENTRIES: usize = 100;
/// Time limit of MOUNT.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Simulated time of a turn of both sides.
const TURN: Duration = Duration::from_micros(1);

/// Runs one turn of the server, for which callgrind counts this function.
#[inline(never)]
fn server_side(server: &mut Shard<SoftwareFabric>) {
    server.poll_once();
}

/// Starts a call. `buffers` adds its chunks. callgrind counts this function for the client.
#[inline(never)]
fn client_side_start<P: Signature>(
    client: &mut Client,
    buffers: fn(&mut Client) -> CallOptions<P>,
    args: &P::Args<'_>,
) -> Result<(), Failure> {
    let (connection, request) = (client.first(), buffers(client));
    let call = request.into_call(&mut (&mut *client, connection), args)?;
    client.start(connection, call, 0);
    client.flush();
    Ok(())
}

/// Runs one turn of the client. Returns true if the call ended. `check` must accept its results.
#[inline(never)]
fn client_side_poll<P: Signature>(client: &mut Client, check: &mut dyn FnMut(&P::Results<'_>) -> bool) -> bool {
    let mut ended = false;
    client.poll(|done| {
        let response = Response::<P>::from_reply(done.result.unwrap_or_else(|error| panic!("{}: {error}", P::NAME)));
        let results = response.results().unwrap_or_else(|error| panic!("{}: {error}", P::NAME));
        assert!(check(&results), "{}: unexpected results", P::NAME);
        ended = true;
    });
    ended
}

/// A client and a server, connected.
struct Peers {
    client: Client,
    server: Shard<SoftwareFabric>,
    time: SimulatedTime,
}

impl Peers {
    fn connect(export: &Arc<Export>) -> Result<Self, Failure> {
        let address: Address = format!("soft:nfs-instructions-{}", std::process::id()).parse()?;
        let memory = MemoryConfig {
            bulk_buffers: vec![(2 * BLOCK, 16), (nfs::TRANSFER as usize, 2)],
            long_buffers: vec![(nfs::DIRECTORY as usize + 4096, 4)],
            ..MemoryConfig::default()
        };
        let poll = PollConfig { idle: IdlePolicy::Poll, ..PollConfig::default() };
        let debug = DebugConfig { sample_latency: 0, ..DebugConfig::default() };
        let shard = Config { memory, poll, debug, ..Config::default() };
        let time = SimulatedTime::new();

        let listener = SoftwareFabric::bind(address.fabric_address())?;
        let fabric = SoftwareFabric::new(shard.software())?;
        let mut server = Shard::open(fabric, shard.clone(), Some(Arc::new(nfs::services(export, None))))?;
        server.simulate(&time);
        server.listen(&listener)?;

        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let config = ClientConfig {
            credential: Credential::sys("instructions", uid.as_raw(), gid.as_raw(), &[])?,
            bindings: Some(Arc::new(bindings())),
            shard,
            ..ClientConfig::new(PROGRAM, VERSION)
        };
        let mut client = LocalClient::open(SoftwareFabric::new(config.shard.software())?, config)?;
        client.simulate(&time);
        let connection = client.begin_connect(&address)?;
        while !client.is_established(connection) {
            server.poll_control();
            server_side(&mut server);
            client.shard_mut().poll_control();
            client.poll(|_| ());
            std::thread::sleep(Duration::from_millis(1));
            time.advance(TURN);
            if let Some(reason) = client.close_reason(connection) {
                return Err(reason.clone().into());
            }
        }
        Ok(Self { client, server, time })
    }

    /// Makes calls, one at a time.
    fn make_calls<P: Signature>(
        &mut self,
        calls: u32,
        buffers: fn(&mut Client) -> CallOptions<P>,
        args: &P::Args<'_>,
        check: &mut dyn FnMut(&P::Results<'_>) -> bool,
    ) -> Result<(), Failure> {
        for _ in 0..calls {
            client_side_start(&mut self.client, buffers, args)?;
            loop {
                self.time.advance(TURN);
                server_side(&mut self.server);
                if client_side_poll::<P>(&mut self.client, check) {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Gets the handle of the export's root by MOUNT.
fn mount_root(export: &Arc<Export>) -> Result<Vec<u8>, Failure> {
    let port = mount::serve(export, 0)?;
    let mut client = StreamClient::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), TIME_LIMIT)?;
    let path = xdr::encode(&Dirpath(export.path.as_os_str().as_bytes()))?;
    let results = client.call(mount_v3::PROGRAM, mount_v3::VERSION, mount_v3::Mnt::NUMBER, &path)?;
    match xdr::decode(&results)? {
        Mountres3::Ok(results) => Ok(results.fhandle.0.to_vec()),
        Mountres3::Default(status) => Err(format!("MOUNT: {status:?}").into()),
    }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [calls, operation, directory] = arguments.as_slice() else {
        return Err("usage: nfs_instructions CALLS getattr|lookup|read|write|readdirplus DIRECTORY".into());
    };
    let (calls, directory) = (calls.parse()?, Path::new(directory));
    std::fs::write(directory.join("file-00"), [7; BLOCK])?;
    for n in 1..ENTRIES - 2 {
        std::fs::write(directory.join(format!("file-{n:02}")), [])?;
    }
    let options = Options {
        read_only: false,
        sync: true,
        policy: Policy::new(Squash::None),
        handles: HandleSource::Names, // handles of the kernel need root
        key: Key::default(),
        max_open_files: 1024,
    };
    let export = Arc::new(Export::open(directory, options)?);
    let root = mount_root(&export)?;
    let mut peers = Peers::connect(&export)?;
    let dir = NfsFh3 { data: &root };
    let by_name = Lookup3Args { what: Diropargs3 { dir, name: Filename3(b"file-00") } };
    let mut found = Vec::new();
    peers.make_calls::<Lookup>(1, |_| CallOptions::new(), &by_name, &mut |results| match results {
        Lookup3Res::Ok(ok) => {
            found.extend(ok.object.data);
            true
        }
        Lookup3Res::Default(..) => false,
    })?;
    let file = NfsFh3 { data: &found };

    match operation.as_str() {
        "getattr" => peers.make_calls::<Getattr>(
            calls,
            |_| CallOptions::new(),
            &Getattr3Args { object: file },
            &mut |results| matches!(results, Getattr3Res::Ok(ok) if ok.obj_attributes.size == BLOCK as u64),
        ),
        "lookup" => peers.make_calls::<Lookup>(
            calls,
            |_| CallOptions::new(),
            &by_name,
            &mut |results| matches!(results, Lookup3Res::Ok(ok) if ok.obj_attributes.is_some()),
        ),
        "read" => peers.make_calls::<Read>(
            calls,
            |_| CallOptions::new().write_chunk(BLOCK as u32),
            &Read3Args { file, offset: 0, count: BLOCK as u32 },
            &mut |results| matches!(results, Read3Res::Ok(ok) if ok.data.len() == BLOCK),
        ),
        "write" => {
            let (count, data) = (BLOCK as u32, Bulk::placed(BLOCK));
            peers.make_calls::<Write>(
                calls,
                |client| {
                    let mut data = client.alloc(client.first(), BLOCK).expect("memory");
                    data.set_window(0, BLOCK);
                    CallOptions::new().lend(data)
                },
                &Write3Args { file, offset: 0, count, stable: StableHow::Unstable, data },
                &mut |results| matches!(results, Write3Res::Ok(ok) if ok.count == BLOCK as u32),
            )
        }
        "readdirplus" => {
            let (dircount, maxcount) = (nfs::DIRECTORY, nfs::DIRECTORY);
            peers.make_calls::<Readdirplus>(
                calls,
                |_| CallOptions::new(),
                &Readdirplus3Args { dir, cookie: 0, cookieverf: Cookieverf3::default(), dircount, maxcount },
                &mut |results| {
                    // All entries have handles, except the parent of the root.
                    matches!(results, Readdirplus3Res::Ok(ok) if ok.reply.eof
                        && ok.reply.entries.into_iter().filter(|e| e.name_handle.is_some()).count() == ENTRIES - 1)
                },
            )
        }
        other => Err(format!("unknown operation `{other}`").into()),
    }
}
