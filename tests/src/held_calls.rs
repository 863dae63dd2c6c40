//! Calls that a test holds back: deferred calls, and handlers that wait at a gate.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Poll;

use rpcrdma::service::DeferredCall;
use rpcrdma::{Procedure, Refusal, ServerCall, Services};

use crate::data::put_pattern;
use crate::leaks::eventually;
use crate::services::standard_and;

/// Number of a procedure whose calls the test [holds](HeldCalls).
pub const HELD: u32 = 400;
/// Number of a procedure that waits at a [gate](Gate).
pub const GATED: u32 = 410;

/// Deferred calls, which the test answers or drops.
#[derive(Clone, Default)]
pub struct HeldCalls(Arc<Mutex<VecDeque<DeferredCall>>>);

impl HeldCalls {
    /// A procedure that leaves its calls here.
    pub fn procedure(&self) -> Procedure {
        let held = self.clone();
        Procedure::deferred(move |call| held.calls().push_back(call))
    }

    fn calls(&self) -> MutexGuard<'_, VecDeque<DeferredCall>> {
        self.0.lock().expect("nobody panics with it")
    }

    /// Number of held calls.
    pub fn len(&self) -> usize {
        self.calls().len()
    }

    /// True if no call is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits for a call, and takes the first one.
    #[track_caller]
    pub fn next_call(&self) -> DeferredCall {
        eventually(|| self.calls().pop_front())
    }

    /// Takes the latest call.
    pub fn last(&self) -> DeferredCall {
        self.calls().pop_back().expect("a held call")
    }

    /// Answers all calls, with no results.
    pub fn answer_all(&self) {
        std::mem::take(&mut *self.calls()).into_iter().for_each(|call| call.answer(Ok(())));
    }

    /// Drops all calls.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *self.calls()));
    }
}

/// Answers a call with these results.
pub fn answer(mut call: DeferredCall, results: &[u8]) {
    call.reply_writer().put(results).expect("room");
    call.answer(Ok(()));
}

/// Who answers the calls of a procedure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerMode {
    /// On the shard.
    Shard,
    /// On a worker.
    Workers,
    /// On the shard, with the deferred call.
    Deferred,
    /// By a thread, with the deferred call.
    Thread,
    /// In a future, between two awaits.
    Future,
}

impl AnswerMode {
    /// A procedure that is answered in this mode. If its handler panics, the call is dropped.
    pub fn procedure<H>(self, handler: H) -> Procedure
    where
        H: Fn(&mut ServerCall) -> Result<(), Refusal> + Clone + Send + Sync + 'static,
    {
        let plain = handler.clone();
        let run = move |mut call: DeferredCall| {
            let outcome = handler(&mut call);
            call.answer(outcome);
        };
        match self {
            Self::Shard => Procedure::new(plain),
            Self::Workers => Procedure::new(plain).on_workers(),
            Self::Deferred => Procedure::deferred(run),
            Self::Thread => Procedure::deferred(move |call| {
                let run = run.clone();
                drop(std::thread::spawn(move || run(call)));
            }),
            Self::Future => Procedure::asynchronous(move |mut call| {
                let handler = plain.clone();
                async move {
                    wake_by_thread().await;
                    let outcome = handler(&mut call);
                    wake_by_thread().await;
                    call.answer(outcome);
                }
            }),
        }
    }
}

/// Returns after one wake-up by another thread.
pub async fn wake_by_thread() {
    let mut asked = false;
    let woken = Arc::new(AtomicBool::new(false));
    poll_fn(|context| {
        if !std::mem::replace(&mut asked, true) {
            let (waker, woken) = (context.waker().clone(), Arc::clone(&woken));
            std::thread::spawn(move || {
                woken.store(true, Ordering::Release);
                waker.wake();
            });
        }
        if woken.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Holds handlers until it is opened.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl Gate {
    /// Releases all handlers, also later ones.
    pub fn open(&self) {
        self.0.0.lock().expect("nobody panics with it").0 = true;
        self.0.1.notify_all();
    }

    /// Opens the gate when dropped, so that a failed test does not wait for its handlers.
    pub fn open_on_drop(&self) -> impl Drop + use<> {
        struct Opens(Gate);
        impl Drop for Opens {
            fn drop(&mut self) {
                self.0.open();
            }
        }
        Opens(self.clone())
    }

    /// Waits until the gate is open.
    pub fn wait(&self) {
        let mut state = self.0.0.lock().expect("nobody panics with it");
        state.1 += 1;
        drop(self.0.1.wait_while(state, |state| !state.0).expect("nobody panics with it"));
    }

    /// Number of handlers that have arrived at the gate.
    pub fn arrivals(&self) -> usize {
        self.0.0.lock().expect("nobody panics with it").1
    }

    /// A procedure that waits at the gate and has no results.
    pub fn procedure(&self) -> Procedure {
        let gate = self.clone();
        Procedure::new(move |_: &mut ServerCall| {
            gate.wait();
            Ok(())
        })
    }

    /// The standard services, and [`GATED`], on a worker or on the shard. It fills a Write chunk if the call has one.
    pub fn services(&self, workers: bool) -> Services {
        let gate = self.clone();
        let handler = move |call: &mut ServerCall| {
            gate.wait();
            if let Ok(writer) = call.result_writer(0) {
                let room = writer.room();
                put_pattern(writer, 20, room)?;
            }
            Ok(())
        };
        let gated = Procedure::new(handler).write_chunks(1, 1 << 20);
        standard_and([(GATED, if workers { gated.on_workers() } else { gated })])
    }
}
