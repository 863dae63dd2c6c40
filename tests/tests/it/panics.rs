//! Panics in drops and in task descriptors: the shard survives.
//! A panic costs its own object and the calls of that object.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use rpcrdma::service::{Application, ShardTask};
use rpcrdma_tests::prelude::*;
use rustix::fd::BorrowedFd;

/// A procedure whose calls a task or a future holds.
const TAKEN: u32 = 700;
/// Actions of the holder.
const PANIC: u8 = 0;
const END: u8 = 1;
const WAIT: u8 = 2;

/// Panics when dropped, and counts its drops.
struct Bomb(Arc<AtomicUsize>);

impl Drop for Bomb {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("as the test wants, at the end");
    }
}

fn start(client: &mut LocalClient, what: u8, token: u64) {
    client.begin(TAKEN, &[what], token);
    client.flush();
}

/// Result of the next call that ends.
fn end(client: &mut LocalClient) -> Result<(), CallError> {
    client.end().1.map(drop)
}

const SYSTEM_ERR: Result<(), CallError> = Err(CallError::Refused(Refusal::SystemError));

/// Holds calls, and panics at the chosen points.
struct Task {
    calls: Rc<Cell<Vec<DeferredCall>>>,
    in_poll: bool,
    in_descriptor: bool,
    _bomb: Option<Bomb>,
}

impl ShardTask for Task {
    fn poll(&mut self) -> bool {
        let calls = self.calls.take();
        let panics = self.in_poll && !calls.is_empty();
        self.calls.set(calls);
        assert!(!panics, "as the test wants");
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let calls = self.calls.take();
        let panics = self.in_descriptor && !calls.is_empty();
        self.calls.set(calls);
        assert!(!panics, "as the test wants");
        None
    }
}

/// A server whose task panics at the chosen points, and the number of dropped bombs.
fn with_task(world: &World, in_poll: bool, in_descriptor: bool, bomb: bool) -> (Address, Server, Arc<AtomicUsize>) {
    let (address, bombs) = (world.address(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&bombs);
    let config = small().with(|c| c.poll.idle = IdlePolicy::Event).of_server();
    let server = Server::start_with(
        &address,
        move |_| {
            let calls = Rc::<Cell<Vec<DeferredCall>>>::default();
            // Only the task owns the calls.
            let weak = Rc::downgrade(&calls);
            let take = move |call| {
                let Some(calls) = weak.upgrade() else { return };
                let mut held = calls.take();
                held.push(call);
                calls.set(held);
            };
            let mut services = standard_services().to_local();
            services.add(PROGRAM, VERSION, TAKEN, Procedure::deferred(take));
            let task = Task { calls, in_poll, in_descriptor, _bomb: bomb.then(|| Bomb(Arc::clone(&count))) };
            Ok(Application { services, task: Some(Box::new(task)) })
        },
        &config,
    );
    (address, server.expect("a server"), bombs)
}

#[test]
fn a_task_that_panics_wherever_it_can_is_gone_with_its_calls_and_the_shard_goes_on() {
    for (in_poll, in_descriptor, bomb) in [(true, false, true), (false, true, false), (false, true, true)] {
        let world = World::new("task-bomb");
        let (address, server, bombs) = with_task(&world, in_poll, in_descriptor, bomb);
        let mut client = world.client(&address, small());
        start(&mut client, WAIT, 0);
        assert_eq!(end(&mut client), SYSTEM_ERR, "its call is dropped with it");
        assert_eq!(bombs.load(Ordering::SeqCst), usize::from(bomb));
        for _ in 0..3 {
            echo(&mut client, b"goes on").expect("an echo");
            // The task no longer exists.
            start(&mut client, WAIT, 0);
            assert_eq!(end(&mut client), SYSTEM_ERR);
        }
        assert_eq!(server.stats()[0].calls_dropped, 4);
    }
}

/// A future of a call, whose argument selects the action. Its drop panics.
struct Panicking {
    call: Option<DeferredCall>,
    polled: Arc<AtomicUsize>,
    _bomb: Bomb,
}

impl Future for Panicking {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        self.polled.fetch_add(1, Ordering::SeqCst);
        let Some(call) = &self.call else { return Poll::Pending };
        match call.args()[0] {
            PANIC => panic!("as the test wants"),
            END => {
                self.call.take().expect("it is there").answer(Ok(()));
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }
}

#[test]
fn futures_that_panic_where_they_are_dropped_cost_nobody_else() {
    let (bombs, polled) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (count, polls) = (Arc::clone(&bombs), Arc::clone(&polled));
    let begin = move |call| Panicking { call: Some(call), polled: Arc::clone(&polls), _bomb: Bomb(Arc::clone(&count)) };
    let services = standard_and([(TAKEN, Procedure::asynchronous(begin))]);
    let (mut world, address) = World::serving("future-bomb", small_server(), services);
    let mut client = world.client(&address, small());
    let mut other = world.client(&address, small());
    // One future panics, and one completes.
    start(&mut client, PANIC, 0);
    assert_eq!(end(&mut client), SYSTEM_ERR);
    start(&mut client, END, 0);
    assert_eq!(end(&mut client), Ok(()));
    echo(&mut client, b"goes on").expect("an echo");
    assert_eq!(bombs.load(Ordering::SeqCst), 2);
    // Three futures end with their connection. Those of another connection last until the shard ends.
    for token in 0..3 {
        start(&mut client, WAIT, token);
    }
    (0..2).for_each(|token| start(&mut other, WAIT, token));
    assert!(settles(|| polled.load(Ordering::SeqCst) == 7));
    drop(client);
    assert!(settles(|| bombs.load(Ordering::SeqCst) == 5));
    for _ in 0..3 {
        echo(&mut other, b"goes on").expect("an echo");
    }
    // The shard drops the last futures one by one, as two panics at once would abort the process.
    drop(world.take_server());
    assert_eq!(bombs.load(Ordering::SeqCst), 7);
}
