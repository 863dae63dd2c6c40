//! Runners of procedures: immediate, on workers, or deferred.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rpcrdma::service::{DeferredCall, Local, LocalProcedure, ShardTask, Sharing, Threads};
use rpcrdma::{Procedure, Refusal, ServerCall};

/// Makes procedures from handlers.
pub(crate) trait ProcedureRunner {
    /// Threads that share the procedures.
    type Sharing: Sharing;

    fn procedure(
        &self,
        handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Procedure<Self::Sharing>;
}

/// Runs handlers on the shard as soon as it receives the call, or on workers.
pub(crate) struct RunImmediately {
    pub(crate) on_workers: bool,
}

impl ProcedureRunner for RunImmediately {
    type Sharing = Threads;

    fn procedure(&self, handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static) -> Procedure {
        let procedure = Procedure::new(handler);
        if self.on_workers { procedure.on_workers() } else { procedure }
    }
}

type Handler = dyn Fn(&mut ServerCall) -> Result<(), Refusal>;

/// A deferred call with its handler.
struct WaitingCall {
    due: Option<Instant>,
    call: DeferredCall,
    handler: Rc<Handler>,
}

/// Runs handlers in the shard's task after a delay.
///
/// Calls wait in a queue, as on a server that waits for its disk.
#[derive(Clone, Default)]
pub(crate) struct RunDeferred {
    /// Delay of the replies; with zero, the task's next poll answers.
    delay: Duration,
    waiting: Rc<RefCell<VecDeque<WaitingCall>>>,
}

impl RunDeferred {
    pub(crate) fn with_delay(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }
}

impl ProcedureRunner for RunDeferred {
    type Sharing = Local;

    fn procedure(
        &self,
        handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> LocalProcedure {
        let (handler, runner): (Rc<Handler>, _) = (Rc::new(handler), self.clone());
        Procedure::deferred(move |call| {
            // A zero delay needs no clock reading.
            let due = (!runner.delay.is_zero()).then(|| Instant::now() + runner.delay);
            runner.waiting.borrow_mut().push_back(WaitingCall { due, call, handler: Rc::clone(&handler) });
        })
    }
}

impl ShardTask for RunDeferred {
    fn poll(&mut self) -> bool {
        // All calls have the same delay, so they are due in order.
        let mut waiting = self.waiting.borrow_mut();
        let now = waiting.front().and_then(|first| first.due).map(|_| Instant::now());
        let is_due = |waiting: &WaitingCall| waiting.due.is_none_or(|due| now.is_some_and(|now| due <= now));
        let any = !waiting.is_empty();
        while waiting.front().is_some_and(is_due)
            && let Some(WaitingCall { mut call, handler, .. }) = waiting.pop_front()
        {
            let outcome = handler(&mut call);
            call.answer(outcome);
        }
        // A shard with waiting calls does not sleep.
        any
    }
}
