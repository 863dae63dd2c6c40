//! Calls whose answers a test delays: deferred calls, and handlers that wait at a gate.

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
    /// A procedure that adds its calls to this queue.
    pub fn procedure(&self) -> Procedure {
        let held = self.clone();
        Procedure::deferred(move |call| held.lock().push_back(call))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<DeferredCall>> {
        self.0.lock().expect("no holder panics")
    }

    /// Number of held calls.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether no call is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the oldest call, or waits for one.
    #[track_caller]
    pub fn next_call(&self) -> DeferredCall {
        eventually(|| self.lock().pop_front())
    }

    /// Takes the latest call.
    pub fn last(&self) -> DeferredCall {
        self.lock().pop_back().expect("a held call")
    }

    /// Answers all calls, with empty results.
    pub fn answer_all(&self) {
        std::mem::take(&mut *self.lock()).into_iter().for_each(|call| call.answer(Ok(())));
    }

    /// Drops all calls.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *self.lock()));
    }
}

/// Answers a call with these results.
pub fn answer(mut call: DeferredCall, results: &[u8]) {
    call.reply_writer().put(results).expect("room");
    call.answer(Ok(()));
}

/// Where the calls of a procedure are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerMode {
    /// On the shard.
    Shard,
    /// On a worker.
    Workers,
    /// On the shard, as a deferred call.
    Deferred,
    /// On a thread of its own, as a deferred call.
    Thread,
    /// In a future, which waits once before the handler and once before the answer.
    Future,
}

impl AnswerMode {
    /// A procedure that is answered in this mode. If its handler panics, the call is dropped.
    pub fn procedure<H>(self, handler: H) -> Procedure
    where
        H: Fn(&mut ServerCall) -> Result<(), Refusal> + Clone + Send + Sync + 'static,
    {
        let call_handler = handler.clone();
        let run = move |mut call: DeferredCall| {
            let outcome = handler(&mut call);
            call.answer(outcome);
        };
        match self {
            Self::Shard => Procedure::new(call_handler),
            Self::Workers => Procedure::new(call_handler).on_workers(),
            Self::Deferred => Procedure::deferred(run),
            Self::Thread => Procedure::deferred(move |call| {
                let run = run.clone();
                drop(std::thread::spawn(move || run(call)));
            }),
            Self::Future => Procedure::asynchronous(move |mut call| {
                let handler = call_handler.clone();
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
    let mut has_thread = false;
    let woken = Arc::new(AtomicBool::new(false));
    poll_fn(|context| {
        if !std::mem::replace(&mut has_thread, true) {
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

/// Blocks handlers until it is opened. The state is whether it is open, and the number of arrivals.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl Gate {
    /// Releases all handlers that wait, and lets later ones pass.
    pub fn open(&self) {
        self.0.0.lock().expect("no holder panics").0 = true;
        self.0.1.notify_all();
    }

    /// Returns a guard whose drop opens the gate.
    ///
    /// Without it, a test that fails would wait for its handlers.
    pub fn open_on_drop(&self) -> impl Drop + use<> {
        struct OpenGuard(Gate);
        impl Drop for OpenGuard {
            fn drop(&mut self) {
                self.0.open();
            }
        }
        OpenGuard(self.clone())
    }

    /// Waits until the gate is open.
    pub fn wait(&self) {
        let mut state = self.0.0.lock().expect("no holder panics");
        state.1 += 1;
        drop(self.0.1.wait_while(state, |state| !state.0).expect("no holder panics"));
    }

    /// Number of handlers that have arrived at the gate.
    pub fn arrivals(&self) -> usize {
        self.0.0.lock().expect("no holder panics").1
    }

    /// A procedure that waits at the gate and returns no results.
    pub fn procedure(&self) -> Procedure {
        let gate = self.clone();
        Procedure::new(move |_: &mut ServerCall| {
            gate.wait();
            Ok(())
        })
    }

    /// The standard services and [`GATED`], which runs on a worker or on the shard.
    ///
    /// [`GATED`] fills the first Write chunk of its call, if any.
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
