//! Where and when the procedures run.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rpcrdma::service::{DeferredCall, Local, LocalProcedure, ShardTask, Sharing, Threads};
use rpcrdma::{Procedure, Refusal, ServerCall};

/// Makes procedures of what runs for their calls.
pub(crate) trait Place {
    /// Who shares them.
    type Sharing: Sharing;

    /// A procedure that runs here.
    fn procedure(
        &self,
        handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Procedure<Self::Sharing>;
}

/// In the call's own turn, or on workers.
pub(crate) struct AtOnce {
    pub(crate) on_workers: bool,
}

impl Place for AtOnce {
    type Sharing = Threads;

    fn procedure(&self, handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static) -> Procedure {
        let procedure = Procedure::new(handler);
        if self.on_workers { procedure.on_workers() } else { procedure }
    }
}

type Handler = dyn Fn(&mut ServerCall) -> Result<(), Refusal>;

/// A call that waits for its time, and what runs for it then.
struct Waiting {
    due: Option<Instant>,
    call: DeferredCall,
    handler: Rc<Handler>,
}

/// By the shard's task, so much later: calls are taken, wait, run and are answered there, as those of a server
/// that waits for its disk.
#[derive(Clone, Default)]
pub(crate) struct Deferred {
    /// Zero: the next time that the task is turned.
    delay: Duration,
    waiting: Rc<RefCell<VecDeque<Waiting>>>,
}

impl Deferred {
    pub(crate) fn by(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }
}

impl Place for Deferred {
    type Sharing = Local;

    fn procedure(
        &self,
        handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> LocalProcedure {
        let (handler, own): (Rc<Handler>, _) = (Rc::new(handler), self.clone());
        Procedure::deferred(move |call| {
            // The clock is read where it matters.
            let due = (!own.delay.is_zero()).then(|| Instant::now() + own.delay);
            own.waiting.borrow_mut().push_back(Waiting { due, call, handler: Rc::clone(&handler) });
        })
    }
}

impl ShardTask for Deferred {
    fn poll(&mut self) -> bool {
        // All wait equally long: they are due in their order.
        let mut waiting = self.waiting.borrow_mut();
        let now = waiting.front().and_then(|first| first.due).map(|_| Instant::now());
        let is_due = |waiting: &Waiting| waiting.due.is_none_or(|due| now.is_some_and(|now| due <= now));
        let any = !waiting.is_empty();
        while waiting.front().is_some_and(is_due)
            && let Some(Waiting { mut call, handler, .. }) = waiting.pop_front()
        {
            let outcome = handler(&mut call);
            call.answer(outcome);
        }
        // A shard with calls that wait for their time does not sleep.
        any
    }
}
