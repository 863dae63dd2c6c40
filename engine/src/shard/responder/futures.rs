//! Handlers as futures, polled on the shard and woken by any thread.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::procedures::RecentProcedures;
use crate::cross_thread::bell::Bell;
use crate::cross_thread::panics::caught;
use crate::cross_thread::parker::Signal;
use crate::service::{Origin, Task};

pub(super) struct Futures {
    all: FuturesUnordered<HandlerFuture>,
    /// Wakes the shard to poll one of them.
    bell: Arc<Bell>,
    waker: Waker,
    /// Whether some have started.
    started: bool,
    /// Whether some may be of closed connections.
    abandoned: bool,
    recent: Rc<RecentProcedures>,
}

/// Future of a call of a connection.
struct HandlerFuture {
    task: Option<Task>,
    origin: Arc<Origin>,
    /// Index of the procedure's entry in the services.
    entry: usize,
    /// Procedures whose futures were polled, by bits; see [`RecentProcedures`].
    recent: Rc<RecentProcedures>,
}

/// A future that has panicked: its connection, the entry of its procedure, and the text.
pub(super) struct Panicked {
    pub(super) origin: Arc<Origin>,
    pub(super) entry: usize,
    pub(super) text: Box<str>,
}

impl HandlerFuture {
    /// Drops the future, which runs the handler's code.
    ///
    /// # Errors
    /// Text of its panic.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.task.take().map_or(Ok(()), |task| caught(|| drop(task)))
    }
}

impl Future for HandlerFuture {
    type Output = Option<Panicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.recent.add(self.entry);
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

impl Drop for HandlerFuture {
    fn drop(&mut self) {
        // At the shard's end the panic has been printed.
        let _ = self.end();
    }
}

impl Futures {
    /// `signal` wakes the shard. `recent` gets the procedures whose futures are polled.
    pub(super) fn new(signal: Signal, recent: Rc<RecentProcedures>) -> Self {
        let bell = Arc::new(Bell::new(signal));
        let waker = Arc::clone(&bell).into();
        Self { all: FuturesUnordered::new(), bell, waker, started: false, abandoned: false, recent }
    }

    /// Adds a future, polled in this turn or the next.
    pub(super) fn start(&mut self, task: Task, origin: &Arc<Origin>, entry: usize) {
        self.all.push(HandlerFuture {
            task: Some(task),
            origin: Arc::clone(origin),
            entry,
            recent: Rc::clone(&self.recent),
        });
        self.started = true;
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
        let started = std::mem::take(&mut self.started);
        let abandoned = std::mem::take(&mut self.abandoned);
        if !(self.bell.take() | started | abandoned) {
            return 0;
        }
        let before = self.all.len();
        if abandoned {
            let all = std::mem::take(&mut self.all);
            let if_open = |mut future: HandlerFuture| {
                if !future.origin.is_over() {
                    return Some(future);
                }
                if let Err(text) = future.end() {
                    panicked(Panicked { origin: Arc::clone(&future.origin), entry: future.entry, text });
                }
                None
            };
            self.all = all.into_iter().filter_map(if_open).collect();
        }
        let mut context = Context::from_waker(&self.waker);
        while let Poll::Ready(Some(panic)) = self.all.poll_next_unpin(&mut context) {
            panic.into_iter().for_each(&mut panicked);
        }
        before - self.all.len()
    }
}
