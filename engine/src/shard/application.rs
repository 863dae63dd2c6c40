//! The application's task: polled by the shard, and dropped when it panics.

use rustix::fd::BorrowedFd;

use super::Shard;
use crate::cross_thread::panics::caught;
use crate::fabric::Fabric;
use crate::service::ShardTask;

/// A task, until it panics.
#[derive(Default)]
pub(super) struct OwnTask(Option<Box<dyn ShardTask>>);

impl OwnTask {
    pub(super) fn new(task: Option<Box<dyn ShardTask>>) -> Self {
        Self(task)
    }

    /// Whether there is one.
    #[inline]
    pub(super) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Its descriptor. On a panic, pass the text to [`Shard::lose_task`].
    pub(super) fn descriptor(&self) -> Result<Option<BorrowedFd<'_>>, Box<str>> {
        self.0.as_ref().map_or(Ok(None), |task| caught(|| task.descriptor()))
    }

    /// Drops it, which runs the application's code.
    ///
    /// # Errors
    /// Text of its panic.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.0.take().map_or(Ok(()), |task| caught(|| drop(task)))
    }
}

impl Drop for OwnTask {
    fn drop(&mut self) {
        // The shard ends anyway: the panic has been printed.
        let _ = self.end();
    }
}

impl<F: Fabric> Shard<F> {
    /// Whether there is one.
    #[inline]
    pub(super) fn has_task(&self) -> bool {
        self.task.is_some()
    }

    pub(super) fn turn_task(&mut self) -> bool {
        let Some(task) = &mut self.task.0 else { return false };
        caught(|| task.poll()).unwrap_or_else(|panic| {
            self.lose_task(&panic);
            true
        })
    }

    /// Drops the task after a panic with this text.
    #[cold]
    pub(super) fn lose_task(&mut self, panic: &str) {
        let again = match self.task.end() {
            Ok(()) => String::new(),
            Err(panic) => format!("; and once more when it was dropped: {panic}"),
        };
        let line = format_args!("task of a shard panicked, and was dropped: {panic}{again}");
        self.cx.error("tasks that panicked", line);
    }
}
