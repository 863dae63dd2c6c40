//! Handlers as futures, polled on the shard and woken by any thread.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::ran::Ran;
use crate::handoff::bell::Bell;
use crate::handoff::panics::caught;
use crate::handoff::parker::Signal;
use crate::service::{Origin, Task};

pub(super) struct Futures {
    all: FuturesUnordered<Serving>,
    /// Wakes the shard to poll one of them.
    bell: Arc<Bell>,
    waker: Waker,
    /// Whether some have started.
    begun: bool,
    /// Whether some may be of closed connections.
    abandoned: bool,
    ran: Rc<Ran>,
}

/// Future of a call of a connection.
struct Serving {
    task: Option<Task>,
    origin: Arc<Origin>,
    /// Index of the procedure's entry in the services.
    entry: usize,
    /// Procedures whose futures were polled, by bits; see [`Ran`].
    ran: Rc<Ran>,
}

/// A future that has panicked: its connection, the entry of its procedure, and the text.
pub(super) struct Panicked {
    pub(super) origin: Arc<Origin>,
    pub(super) entry: usize,
    pub(super) text: Box<str>,
}

impl Serving {
    /// Drops the future, which runs the handler's code.
    ///
    /// # Errors
    /// Text of its panic.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.task.take().map_or(Ok(()), |task| caught(|| drop(task)))
    }
}

impl Future for Serving {
    type Output = Option<Panicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.ran.add(self.entry);
        let Some(task) = &mut self.task else { return Poll::Ready(None) };
        // A panic ends the future, and its call is dropped.
        let panic = match caught(|| task.as_mut().poll(context)) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(())) => None,
            Err(panic) => Some(panic),
        };
        let dropped = self.end();
        let panicked = |text| Panicked { origin: Arc::clone(&self.origin), entry: self.entry, text };
        Poll::Ready(panic.or(dropped.err()).map(panicked))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // At the shard's end the panic has been printed.
        let _ = self.end();
    }
}

impl Futures {
    /// `signal` wakes the shard. `ran` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, ran: Rc<Ran>) -> Self {
        let bell = Arc::new(Bell::new(signal));
        let waker = Arc::clone(&bell).into();
        Self { all: FuturesUnordered::new(), bell, waker, begun: false, abandoned: false, ran }
    }

    /// Adds a future, polled in this turn or the next.
    pub(super) fn begin(&mut self, task: Task, origin: &Arc<Origin>, entry: usize) {
        self.all.push(Serving { task: Some(task), origin: Arc::clone(origin), entry, ran: Rc::clone(&self.ran) });
        self.begun = true;
    }

    /// Marks the futures of closed connections for a drop.
    pub(super) fn abandon(&mut self) {
        self.abandoned |= !self.all.is_empty();
    }

    /// Polls woken futures; returns the number that ended. `panicked` gets those that panicked.
    pub(super) fn poll(&mut self, mut panicked: impl FnMut(Panicked)) -> usize {
        if self.all.is_empty() {
            return 0;
        }
        // Read all of these: each is reported once.
        let begun = std::mem::take(&mut self.begun);
        let abandoned = std::mem::take(&mut self.abandoned);
        if !(self.bell.take() | begun | abandoned) {
            return 0;
        }
        let before = self.all.len();
        if abandoned {
            let all = std::mem::take(&mut self.all);
            let goes_on = |mut serving: Serving| {
                if !serving.origin.is_over() {
                    return Some(serving);
                }
                if let Err(text) = serving.end() {
                    panicked(Panicked { origin: Arc::clone(&serving.origin), entry: serving.entry, text });
                }
                None
            };
            self.all = all.into_iter().filter_map(goes_on).collect();
        }
        let mut context = Context::from_waker(&self.waker);
        while let Poll::Ready(Some(panic)) = self.all.poll_next_unpin(&mut context) {
            panic.into_iter().for_each(&mut panicked);
        }
        before - self.all.len()
    }
}
