//! The end of a shard while the kernel still uses the memory of its io_uring.
#![deny(unsafe_code)]

#[path = "../src/protocol.rs"]
mod protocol;
#[expect(dead_code, reason = "this test uses only the ring")]
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
use rpcrdma::typed::{CallOptions, Deferred};
use rpcrdma::{Address, CallError, FailedCall, LocalClient, Server};
use rustix::io::ioctl_fionbio;

use protocol::ReadArgs;
use protocol::blockstore_v1::{self, PROGRAM, VERSION};
use sys::{Call, Job, Ring};

const LEN: usize = 4096;

/// Task with a shard's ring.
///
/// The channel reports the number of outstanding jobs after each submission. It is disconnected when the ring ends.
struct RingTask {
    ring: Rc<RefCell<Ring>>,
    submitted: mpsc::Sender<usize>,
}

impl ShardTask for RingTask {
    fn poll(&mut self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let is_busy = ring.submit().expect("io_uring_enter");
        if is_busy && ring.outstanding() > 0 {
            self.submitted.send(ring.outstanding()).expect("the test listens");
        }
        while let Some((job, moved)) = ring.take_completed() {
            drop((job, moved));
        }
        is_busy
    }
}

/// Queues each READ in the ring.
struct RingServer(Weak<RefCell<Ring>>);

impl blockstore_v1::Server for RingServer {
    fn read(&self, call: Deferred<blockstore_v1::Read>) {
        let ring = self.0.upgrade().expect("the shard's task owns the ring");
        assert!(ring.borrow_mut().start(Job::new(Call::Read(call), 0, LEN), 0).is_ok(), "there is room");
    }
}

#[test]
fn a_ring_lives_until_the_kernel_no_longer_uses_its_memory() {
    for registered in [true, false] {
        check_end_with_outstanding_read(registered);
    }
}

/// Ends a server while one of its calls reads from an empty pipe.
fn check_end_with_outstanding_read(registered: bool) {
    let (file, mut writer) = std::io::pipe().expect("a pipe");
    let (submitted, submissions) = mpsc::channel();
    let (mut reader, file) = (file.try_clone().expect("a descriptor"), Arc::new(file));
    let address: Address =
        format!("soft:blockstore-ring-{}-{registered}", std::process::id()).parse().expect("an address");
    let pipe = Arc::clone(&file);
    let make = move |setup: &rpcrdma::service::ShardSetup<'_>| {
        let mut ring = Ring::new(4, &[pipe.as_fd()])?;
        if registered {
            ring.register(setup.arena)?;
        }
        let ring = Rc::new(RefCell::new(ring));
        let mut services = LocalServices::new();
        blockstore_v1::add_local(&mut services, &Rc::new(RingServer(Rc::downgrade(&ring))));
        Ok(Application { services, task: Some(Box::new(RingTask { ring, submitted: submitted.clone() })) })
    };
    let server = match Server::start_with(&address, make, &ServerConfig::default()) {
        Ok(server) => server,
        Err(error) => return println!("not run: {error}"),
    };
    let (end, ended) = mpsc::channel();
    let client = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, VERSION)).expect("it connects");
        let first = client.first();
        let room = client.alloc(first, LEN).expect("memory");
        let options = CallOptions::<blockstore_v1::Read>::new().write_chunk_into(room);
        let args = ReadArgs { offset: 0, count: LEN as u32 };
        let call = options.into_call(&mut (&mut client, first), &args).expect("a buffer");
        end.send(client.call(call).map(drop)).expect("the test listens");
    });
    assert_eq!(submissions.recv(), Ok(1), "the read is submitted");

    let undrained = server.drain(Duration::from_millis(100)).expect_err("a call that does not end").to_string();
    // The shard stays as long as the kernel may write to its memory.
    assert!(undrained.contains("handlers running on 1 shard"), "{undrained}");
    assert!(
        matches!(ended.recv(), Ok(Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }))),
        "the call fails immediately"
    );
    client.join().expect("no panic");
    assert_eq!(submissions.try_recv(), Err(mpsc::TryRecvError::Empty), "the ring still exists");

    writer.write_all(&[7; LEN]).expect("the pipe has room");
    assert_eq!(submissions.recv(), Err(mpsc::RecvError), "the ring ends after the read");
    // The pipe is empty, because the kernel has read its bytes into the memory of the call.
    ioctl_fionbio(&reader, true).expect("a descriptor");
    assert_eq!(reader.read(&mut [0]).map_err(|error| error.kind()), Err(std::io::ErrorKind::WouldBlock));
}
