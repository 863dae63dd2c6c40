//! A progress bar on standard error, if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::TuneError;
use super::search::{Machine, Measured};
use super::settings::Settings;

/// Time between two steps of the spinner.
const TICK: Duration = Duration::from_millis(200);
const TEMPLATE: &str = "{spinner} {pos}/{len} runs, at most {eta} left  {prefix}  {wide_msg}";

/// A machine with a progress bar.
pub(super) struct Shown<M> {
    pub(super) inner: M,
    bar: ProgressBar,
}

impl<M: Machine> Shown<M> {
    /// Starts before the first run.
    pub(super) fn new(inner: M) -> Self {
        // Hides itself if standard error is no terminal.
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        Self { inner, bar }
    }
}

impl<M: Machine> Machine for Shown<M> {
    fn run(&mut self, settings: &Settings) -> Result<Result<Measured, String>, TuneError> {
        self.bar.set_message(settings.to_string());
        let outcome = self.inner.run(settings);
        self.bar.inc(1);
        outcome
    }

    fn begin(&mut self, what: &str, runs_left: usize) {
        self.bar.enable_steady_tick(TICK);
        self.bar.set_length(self.bar.position() + runs_left as u64);
        self.bar.set_prefix(what.to_owned());
        self.inner.begin(what, runs_left);
    }
}

impl<M> Drop for Shown<M> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_one_that_can_be_drawn() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
