//! The io_uring of a shard that ends before the kernel has finished its work.
#![deny(unsafe_code)]

#[path = "../src/protocol.rs"]
mod protocol;
#[expect(dead_code, reason = "what is tested here is the ring")]
#[path = "../src/sys.rs"]
mod sys;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::rc::{Rc, Weak};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rpcrdma::client::ClientConfig;
use rpcrdma::server::ServerConfig;
use rpcrdma::service::{Application, LocalServices, ShardTask};
use rpcrdma::typed::{Deferred, Request};
use rpcrdma::{Address, CallError, FailedCall, LocalClient, Server};
use rustix::io::ioctl_fionbio;

use protocol::ReadArgs;
use protocol::blockstore_v1::{self, PROGRAM, VERSION};
use sys::{Call, Job, Ring};

const LEN: usize = 4096;

/// A shard's ring; whoever listens hears of each job that the kernel has been given, and, as the channel ends, of the
/// ring's own end.
struct Turn {
    ring: Rc<RefCell<Ring>>,
    given: mpsc::Sender<usize>,
}

impl ShardTask for Turn {
    fn poll(&mut self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let any = ring.submit().expect("io_uring_enter");
        if any && ring.under_way() > 0 {
            self.given.send(ring.under_way()).expect("the test listens");
        }
        while let Some((job, moved)) = ring.take_completed() {
            drop((job, moved));
        }
        any
    }
}

/// Queues each READ in the ring.
struct OnRing(Weak<RefCell<Ring>>);

impl blockstore_v1::Server for OnRing {
    fn read(&self, call: Deferred<blockstore_v1::Read>) {
        let ring = self.0.upgrade().expect("the shard's task has it");
        assert!(ring.borrow_mut().start(Job::new(Call::Read(call), 0, LEN), 0).is_ok(), "there is room");
    }
}

#[test]
fn a_ring_outlives_its_shard_until_the_kernel_is_done_with_its_memory() {
    for registered in [true, false] {
        outlive(registered);
    }
}

/// A call reads from a pipe that nobody writes to, and the server is told to end.
fn outlive(registered: bool) {
    let (file, mut writer) = std::io::pipe().expect("a pipe");
    let (given, taken) = mpsc::channel();
    let (mut left, file) = (file.try_clone().expect("a descriptor"), Arc::new(file));
    let address: Address =
        format!("soft:blockstore-ring-{}-{registered}", std::process::id()).parse().expect("an address");
    let own = Arc::clone(&file);
    let make = move |setup: &rpcrdma::service::ShardSetup<'_>| {
        let mut ring = Ring::new(4, &[own.as_fd()])?;
        if registered {
            ring.register(setup.arena)?;
        }
        let ring = Rc::new(RefCell::new(ring));
        let mut services = LocalServices::new();
        blockstore_v1::add_local(&mut services, &Rc::new(OnRing(Rc::downgrade(&ring))));
        Ok(Application { services, task: Some(Box::new(Turn { ring, given: given.clone() })) })
    };
    let server = match Server::start_with(&address, make, &ServerConfig::default()) {
        Ok(server) => server,
        Err(error) => return println!("not run: {error}"),
    };
    let (over, ended) = mpsc::channel();
    let client = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, VERSION)).expect("it connects");
        let first = client.first();
        let room = client.alloc(first, LEN).expect("memory");
        let request = Request::<blockstore_v1::Read>::new().room_in(room);
        let args = ReadArgs { offset: 0, count: LEN as u32 };
        let call = request.into_call(&mut (&mut client, first), &args).expect("a buffer");
        over.send(client.call(call).map(drop)).expect("the test listens");
    });
    assert_eq!(taken.recv(), Ok(1), "the kernel has the read");

    let undrained =
        server.drain(Duration::from_millis(100)).expect_err("there is a call that does not end").to_string();
    // Its shard is there for as long as the kernel may write to its memory.
    assert!(undrained.contains("handlers running on 1 shard"), "{undrained}");
    assert!(
        matches!(ended.recv(), Ok(Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }))),
        "the caller is told at once"
    );
    client.join().expect("no panic");
    assert_eq!(taken.try_recv(), Err(mpsc::TryRecvError::Empty), "the ring is there");

    writer.write_all(&[7; LEN]).expect("the pipe has room");
    assert_eq!(taken.recv(), Err(mpsc::RecvError), "then it ends");
    // What was written went to the memory of the call that it was read for.
    ioctl_fionbio(&left, true).expect("a descriptor");
    assert_eq!(left.read(&mut [0]).map_err(|error| error.kind()), Err(std::io::ErrorKind::WouldBlock));
}
