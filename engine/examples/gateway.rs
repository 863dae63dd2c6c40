//! A server whose answers come from other servers: its procedure is a future with two awaits, that the shard polls. It
//! asks a directory where an object is, then the store that has it, and blocks nobody meanwhile.
//!
//! `cargo run --release --example gateway`

use std::cell::RefCell;
use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;

use rpcrdma::client::{Client, ClientCall, ClientConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{Application, DeferredCall};
use rpcrdma::{Address, CallError, LocalClient, Procedure, Refusal, Server, ServerCall, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are everybody's own (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
const VERSION: u32 = 1;
/// Of the directory: in which row of the store an object is, by its name.
const LOOKUP: u32 = 1;
/// Of the store: what a row holds.
const READ: u32 = 2;
/// Of the gateway: what an object holds, by its name.
const GET: u32 = 3;

const NAMES: [&str; 3] = ["apple", "pear", "plum"];
const ROWS: [&str; 3] = ["red", "green", "blue"];

type Failure = Box<dyn Error + Send + Sync>;

fn answer(call: &mut ServerCall, results: &[u8]) -> Result<(), Refusal> {
    call.reply_writer().put(results).or(Err(Refusal::SystemError))
}

fn lookup(call: &mut ServerCall) -> Result<(), Refusal> {
    let row = NAMES.iter().position(|name| name.as_bytes() == call.args()).ok_or(Refusal::GarbageArguments)?;
    answer(call, &(row as u32).to_be_bytes())
}

fn read(call: &mut ServerCall) -> Result<(), Refusal> {
    let row = call.args().try_into().map(u32::from_be_bytes).or(Err(Refusal::GarbageArguments))?;
    let row = ROWS.get(row as usize).ok_or(Refusal::GarbageArguments)?;
    answer(call, row.as_bytes())
}

/// A server with one procedure.
fn serve(
    name: &str,
    procedure: u32,
    handler: fn(&mut ServerCall) -> Result<(), Refusal>,
) -> Result<(Address, Server), Failure> {
    let address: Address = format!("soft:gateway-{name}-{}", std::process::id()).parse()?;
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, procedure, Procedure::new(handler));
    let server = Server::start(&address, services, &ServerConfig::default())?;
    Ok((address, server))
}

/// The servers behind the gateway, as one of its shards uses them.
struct Behind {
    directory: RefCell<Client>,
    store: RefCell<Client>,
}

impl Behind {
    fn connect(directory: &Address, store: &Address) -> Result<Self, Failure> {
        let connect = |address| Client::connect(address, ClientConfig::new(PROGRAM, VERSION)).map(RefCell::new);
        Ok(Self { directory: connect(directory)?, store: connect(store)? })
    }

    /// What an object holds.
    async fn get(&self, name: Vec<u8>) -> Result<Vec<u8>, CallError> {
        // A call is started, then awaited: nothing is borrowed while others go on.
        let asked = self.directory.borrow_mut().start(ClientCall::new(LOOKUP).args(name))?;
        let row = asked.await?.results().to_vec();
        let asked = self.store.borrow_mut().start(ClientCall::new(READ).args(row))?;
        Ok(asked.await?.results().to_vec())
    }

    async fn serve(self: Rc<Self>, mut call: DeferredCall) {
        let outcome = match self.get(call.args().to_vec()).await {
            Ok(object) => answer(&mut call, &object),
            // What the servers behind refuse, the gateway does.
            Err(CallError::Refused(refusal)) => Err(refusal),
            Err(_) => Err(Refusal::SystemError),
        };
        call.answer(outcome);
    }
}

fn main() -> Result<(), Failure> {
    let (directory, _directory) = serve("directory", LOOKUP, lookup)?;
    let (store, _store) = serve("store", READ, read)?;
    let address: Address = format!("soft:gateway-{}", std::process::id()).parse()?;
    let behind = Arc::new((directory, store));
    let _gateway = Server::start_with(&address, &ServerConfig::default(), move |_| {
        let behind = Rc::new(Behind::connect(&behind.0, &behind.1)?);
        let mut services = Services::default();
        let get = Procedure::local_asynchronous(move |call| Rc::clone(&behind).serve(call));
        services.add(PROGRAM, VERSION, GET, get);
        Ok(Application { services, task: None })
    })?;
    let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, VERSION))?;
    for name in NAMES.into_iter().chain(["grape"]) {
        let mut call = client.prepare(GET, name.len())?;
        call.args_mut().copy_from_slice(name.as_bytes());
        match client.call(call) {
            Ok(reply) => println!("{name}: {}", String::from_utf8_lossy(reply.results())),
            Err(error) => println!("{name}: {error}"),
        }
    }
    Ok(())
}
