//! Handlers as futures, polled on the shard and woken by any thread.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::stream::{FuturesUnordered, StreamExt};

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
}

/// Future of a call of a connection.
struct Serving {
    task: Option<Task>,
    origin: Arc<Origin>,
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
    /// Text of a panic.
    type Output = Option<Box<str>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(task) = &mut self.task else { return Poll::Ready(None) };
        // A panic ends the future, and its call is dropped.
        let panic = match caught(|| task.as_mut().poll(context)) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(())) => None,
            Err(panic) => Some(panic),
        };
        let dropped = self.end();
        Poll::Ready(panic.or(dropped.err()))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // At the shard's end the panic has been printed.
        let _ = self.end();
    }
}

impl Futures {
    /// `signal` wakes the shard.
    pub(super) fn new(signal: Signal) -> Self {
        let bell = Arc::new(Bell::new(signal));
        let waker = Arc::clone(&bell).into();
        Self { all: FuturesUnordered::new(), bell, waker, begun: false, abandoned: false }
    }

    /// Adds a future, polled in this turn or the next.
    pub(super) fn begin(&mut self, task: Task, origin: &Arc<Origin>) {
        self.all.push(Serving { task: Some(task), origin: Arc::clone(origin) });
        self.begun = true;
    }

    /// Marks the futures of closed connections for a drop.
    pub(super) fn abandon(&mut self) {
        self.abandoned |= !self.all.is_empty();
    }

    /// Polls woken futures; returns the number that ended. `panicked` gets the texts of panics.
    pub(super) fn poll(&mut self, mut panicked: impl FnMut(&str)) -> usize {
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
                serving.end().err().as_deref().into_iter().for_each(&mut panicked);
                None
            };
            self.all = all.into_iter().filter_map(goes_on).collect();
        }
        let mut context = Context::from_waker(&self.waker);
        while let Poll::Ready(Some(panic)) = self.all.poll_next_unpin(&mut context) {
            panic.as_deref().into_iter().for_each(&mut panicked);
        }
        before - self.all.len()
    }
}
