//! The application's own task: turned with the shard, which goes on without it when it panics.

use rustix::fd::BorrowedFd;

use super::Shard;
use crate::fabric::Fabric;
use crate::handoff::panics::caught;
use crate::service::ShardTask;

/// A task, until it panics: then there is none.
#[derive(Default)]
pub(super) struct OwnTask(Option<Box<dyn ShardTask>>);

impl OwnTask {
    pub(super) fn new(task: Option<Box<dyn ShardTask>>) -> Self {
        Self(task)
    }

    /// What it wants to be woken by. Call [`Shard::lose_task`] with what it says if it panics.
    pub(super) fn descriptor(&self) -> Result<Option<BorrowedFd<'_>>, Box<str>> {
        self.0.as_ref().map_or(Ok(None), |task| caught(|| task.descriptor()))
    }

    /// Drops it. Its end is the application's code, too.
    ///
    /// # Errors
    /// What it had to say, if it panicked.
    fn end(&mut self) -> Result<(), Box<str>> {
        self.0.take().map_or(Ok(()), |task| caught(|| drop(task)))
    }
}

impl Drop for OwnTask {
    fn drop(&mut self) {
        // The shard ends, in order: what a panic says has been printed.
        let _ = self.end();
    }
}

impl<F: Fabric> Shard<F> {
    /// The application has one.
    #[inline]
    pub(super) fn has_task(&self) -> bool {
        self.task.0.is_some()
    }

    /// The application's own turn.
    pub(super) fn turn_task(&mut self) -> bool {
        let Some(task) = &mut self.task.0 else { return false };
        caught(|| task.poll()).unwrap_or_else(|panic| {
            self.lose_task(&panic);
            true
        })
    }

    /// It has panicked, and said this.
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
