//! Calls as futures: how does a program await calls?
//!
//! A program awaits them in any runtime, and a procedure of a server awaits calls to other servers before it answers.
//!
//! `cargo run --release --bin async_client`
//!
//! A gateway reads each block from two replicas. The program reads several blocks concurrently through the gateway.

use std::cell::RefCell;
use std::error::Error;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::Thread;

use rpcrdma::client::{Client, ClientCall, ClientConfig, Endpoint};
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{Application, DeferredCall, LocalProcedure, LocalServices, ShardSetup};
use rpcrdma::{Address, CallError, Procedure, Refusal, Server, Services};

/// Program numbers from 0x20000000 to 0x3fffffff are free for anyone to use (RFC 5531 §13).
const PROGRAM: u32 = 0x2000_0001;
/// Argument: number of a block. Result: the block.
const READ: u32 = 1;
/// Number of blocks that the program reads.
const BLOCKS: u8 = 16;

type Failure = Box<dyn Error + Send + Sync>;

/// Starts a server whose block `n` is the byte `n`, four times.
fn replica(name: &str) -> Result<(Address, Server), Failure> {
    let address: Address = format!("soft:async-{name}-{}", std::process::id()).parse()?;
    let read = Procedure::new(|call| {
        let [number] = call.args() else { return Err(Refusal::GarbageArguments) };
        let block = [*number; 4];
        call.reply_writer().put(&block).map_err(Refusal::from)
    });
    let mut services = Services::new();
    services.add(PROGRAM, 1, READ, read);
    let server = Server::start(&address, services, &ServerConfig::default())?;
    Ok((address, server))
}

/// The two clients by which one shard of the gateway calls the replicas.
struct Replicas([RefCell<Client>; 2]);

impl Replicas {
    /// Reads a block, if both replicas agree on it.
    async fn read(&self, number: Vec<u8>) -> Result<Vec<u8>, CallError> {
        // Both calls start before the first `await`. No borrow of a client lasts across an `await`.
        let call = || ClientCall::new(READ).args(number.clone());
        let first = self.0[0].borrow_mut().start(call())?;
        let second = self.0[1].borrow_mut().start(call())?;
        let (first, second) = (first.await?, second.await?);
        match first.results() == second.results() {
            true => Ok(first.results().to_vec()),
            false => Err(CallError::Refused(Refusal::SystemError)),
        }
    }

    async fn serve(self: Rc<Self>, mut call: DeferredCall) {
        let outcome = match self.read(call.args().to_vec()).await {
            Ok(block) => call.reply_writer().put(&block).map_err(Refusal::from),
            Err(CallError::Refused(refusal)) => Err(refusal),
            Err(_) => Err(Refusal::SystemError),
        };
        call.answer(outcome);
    }
}

/// Starts the gateway, whose shard polls the future of each call without a runtime and without blocking.
fn gateway(address: &Address, replicas: [Address; 2]) -> Result<Server, Failure> {
    let make = move |_: &ShardSetup<'_>| {
        let connect = |address| Client::connect(address, ClientConfig::new(PROGRAM, 1)).map(RefCell::new);
        let replicas = Rc::new(Replicas([connect(&replicas[0])?, connect(&replicas[1])?]));
        let mut services = LocalServices::new();
        services.add(PROGRAM, 1, READ, LocalProcedure::asynchronous(move |call| Rc::clone(&replicas).serve(call)));
        Ok(Application { services, task: None })
    };
    Ok(Server::start_with(address, make, &ServerConfig::default())?)
}

/// Reads all blocks concurrently, with one thread for all connections.
async fn program(address: Address) -> Result<(), Failure> {
    let endpoint = Endpoint::start_async(&address, ClientConfig::new(PROGRAM, 1)).await?;
    let mut client = endpoint.connect_async(&address).await?;
    let calls: Result<Vec<_>, _> =
        (0..BLOCKS).map(|number| client.start(ClientCall::new(READ).args([number]))).collect();
    for (number, reply) in (0..BLOCKS).zip(futures_util::future::join_all(calls?).await) {
        assert_eq!(reply?.results(), [number; 4]);
    }
    // The gateway refuses a call that the replicas refuse.
    let refused = client.start(ClientCall::new(READ))?.await;
    assert!(matches!(refused.map_err(CallError::from), Err(CallError::Refused(Refusal::GarbageArguments))));
    println!("{BLOCKS} blocks read concurrently");
    Ok(())
}

/// Runs one future, instead of a runtime such as tokio.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}

fn main() -> Result<(), Failure> {
    // Shared memory. The first argument may name another transport: `iwarp:127.0.0.1:20049`.
    let address = std::env::args().nth(1).unwrap_or_else(|| format!("soft:async-{}", std::process::id()));
    let address: Address = address.parse()?;
    let (one, _one) = replica("one")?;
    let (two, _two) = replica("two")?;
    let _gateway = gateway(&address, [one, two])?;
    block_on(program(address))
}
