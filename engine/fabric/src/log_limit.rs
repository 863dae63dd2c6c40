//! Rate limit of log lines that peers can cause.

#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::fmt::{Arguments, Display};
use std::io;
use std::time::Instant;

use log::Level;

use crate::error::failed;

/// Maximum lines of one kind that are written in one interval.
pub const LINES: u32 = 8;
/// Nanoseconds of an interval: 10 seconds.
pub const INTERVAL: u64 = 10_000_000_000;
/// Maximum subjects with their own limits at a time. Further subjects share the limit of their cause.
pub const MAX_SUBJECTS: usize = 64;

/// A rate-limited log for lines that peers can cause.
///
/// The first [`LINES`] of each kind in an [`INTERVAL`] are written. The others are counted, and one line reports the
/// count after the interval. A kind is a cause and an optional subject. The cause is a text of the program, such as
/// `"connect requests refused"`, so there are few causes. Each subject, such as a procedure, has its own limit, so
/// that a subject with many lines does not hide another. Peers should not be able to choose subjects; if they are,
/// [`MAX_SUBJECTS`] bounds them.
///
/// Time is an argument, in nanoseconds of one monotonic clock. Nothing here is shared or locked.
#[derive(Debug)]
pub struct LogLimit<S: Subject = Infallible> {
    target: &'static str,
    kinds: Vec<LogKind<S>>,
    /// Counted lines not yet reported.
    suppressed: u64,
}

/// A subject of log lines.
pub trait Subject: Copy + Eq + Display {}

impl<S: Copy + Eq + Display> Subject for S {}

/// The count of one kind of lines.
#[derive(Debug)]
struct LogKind<S> {
    level: Level,
    cause: &'static str,
    subject: Option<S>,
    /// Start of the interval.
    since: u64,
    written: u32,
    suppressed: u64,
}

impl<S: Subject> LogLimit<S> {
    /// Creates a limit for lines with this target, such as `module_path!()`.
    pub fn new(target: &'static str) -> Self {
        Self { target, kinds: Vec::new(), suppressed: 0 }
    }

    /// Writes or counts a line. `cause` is its kind, in words that fit behind "17 more: ".
    #[cold]
    pub fn log(&mut self, now: u64, level: Level, cause: &'static str, line: Arguments<'_>) {
        self.log_subject(now, level, (cause, None), line);
    }

    /// Writes or counts a line of a kind that has a subject.
    #[cold]
    #[inline(never)]
    pub fn log_subject(
        &mut self,
        now: u64,
        level: Level,
        (cause, subject): (&'static str, Option<S>),
        line: Arguments<'_>,
    ) {
        let at = self.index(now, level, cause, subject);
        let kind = &mut self.kinds[at];
        if now.saturating_sub(kind.since) >= INTERVAL {
            self.suppressed -= kind.report_suppressed(self.target);
            (kind.since, kind.written) = (now, 0);
        }
        if kind.written < LINES {
            kind.written += 1;
            log::log!(target: self.target, level, "{line}");
        } else {
            kind.suppressed += 1;
            self.suppressed += 1;
        }
    }

    /// Index of a kind, which is created if missing.
    fn index(&mut self, now: u64, level: Level, cause: &'static str, subject: Option<S>) -> usize {
        if let Some(at) = self.kinds.iter().position(|kind| kind.cause == cause && kind.subject == subject) {
            return at;
        }
        if subject.is_some() && self.subjects() >= MAX_SUBJECTS {
            self.report_suppressed(now);
            self.kinds.retain(|kind| kind.subject.is_none() || now.saturating_sub(kind.since) < INTERVAL);
            if self.subjects() >= MAX_SUBJECTS {
                return self.index(now, level, cause, None);
            }
        }
        self.kinds.push(LogKind { level, cause, subject, since: now, written: 0, suppressed: 0 });
        self.kinds.len() - 1
    }

    fn subjects(&self) -> usize {
        self.kinds.iter().filter(|kind| kind.subject.is_some()).count()
    }

    /// Writes or counts a warning; see [`log`](Self::log).
    #[cold]
    pub fn warn(&mut self, now: u64, cause: &'static str, line: Arguments<'_>) {
        self.log(now, Level::Warn, cause, line);
    }

    /// Writes or counts an error; see [`log`](Self::log).
    #[cold]
    pub fn error(&mut self, now: u64, cause: &'static str, line: Arguments<'_>) {
        self.log(now, Level::Error, cause, line);
    }

    /// Whether counted lines wait for [`report_suppressed`](Self::report_suppressed).
    #[inline]
    pub fn has_suppressed(&self) -> bool {
        self.suppressed != 0
    }

    /// Reports counted lines of kinds whose interval has ended. Call it at intervals.
    #[cold]
    pub fn report_suppressed(&mut self, now: u64) {
        for kind in &mut self.kinds {
            if now.saturating_sub(kind.since) >= INTERVAL {
                self.suppressed -= kind.report_suppressed(self.target);
            }
        }
    }
}

/// A [`LogLimit`] with its own clock. The clock is read only for written or counted lines.
#[derive(Debug)]
pub struct ClockedLog {
    limit: LogLimit,
    created: Instant,
}

impl Default for ClockedLog {
    fn default() -> Self {
        Self::new("rpcrdma_fabric")
    }
}

impl ClockedLog {
    /// Creates a limit for lines with this target, such as `module_path!()`.
    pub fn new(target: &'static str) -> Self {
        Self { limit: LogLimit::new(target), created: Instant::now() }
    }

    /// Writes or counts a warning; see [`LogLimit::log`].
    #[cold]
    pub fn warn(&mut self, cause: &'static str, line: Arguments<'_>) {
        self.limit.warn(self.now(), cause, line);
    }

    /// Writes or counts a line about a listener that pauses because accept has failed. The line names the limit that
    /// the process has reached, which usually is that of open files.
    #[cold]
    #[inline(never)]
    pub fn accept_failed(&mut self, listener: &str, error: impl Into<io::Error>) {
        let error = failed("accept", error);
        let line = format_args!("{listener}: {error}: no new connections until it succeeds");
        self.warn("failures of accept", line);
    }

    /// Reports counted lines of kinds whose interval has ended; see [`LogLimit::report_suppressed`].
    #[inline]
    pub fn report_suppressed(&mut self) {
        if self.limit.has_suppressed() {
            self.limit.report_suppressed(self.now());
        }
    }

    fn now(&self) -> u64 {
        self.created.elapsed().as_nanos() as u64
    }
}

impl<S: Subject> Drop for LogLimit<S> {
    fn drop(&mut self) {
        for kind in &mut self.kinds {
            kind.report_suppressed(self.target);
        }
    }
}

impl<S: Subject> LogKind<S> {
    /// Reports all counted lines in one line, and returns their number.
    fn report_suppressed(&mut self, target: &str) -> u64 {
        let suppressed = std::mem::take(&mut self.suppressed);
        if suppressed != 0 {
            match self.subject {
                Some(subject) => log::log!(target: target, self.level, "{suppressed} more: {}: {subject}", self.cause),
                None => log::log!(target: target, self.level, "{suppressed} more: {}", self.cause),
            }
        }
        suppressed
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static LOGGED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// Keeps the lines of each thread at `Warn` and above.
    struct LineCollector;

    impl log::Log for LineCollector {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= Level::Warn
        }

        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                let line = format!("{} {}", record.level(), record.args());
                LOGGED.with_borrow_mut(|lines| lines.push(line));
            }
        }

        fn flush(&self) {}
    }

    /// Lines written by this thread since the last call.
    pub(crate) fn logged() -> Vec<String> {
        // Another test may have set the same logger already.
        let _ = log::set_logger(&LineCollector);
        log::set_max_level(log::LevelFilter::Warn);
        LOGGED.take()
    }

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn many_lines_are_limited_and_counted() {
        logged();
        let mut limit = LogLimit::<u32>::new(module_path!());
        for n in 0..1000 {
            limit.warn(5 * SECOND + n, "storms", format_args!("storm {n}"));
        }
        let lines = logged();
        assert_eq!(lines.len(), LINES as usize, "{lines:?}");
        assert_eq!((lines[0].as_str(), lines[7].as_str()), ("WARN storm 0", "WARN storm 7"));
        assert!(limit.has_suppressed());
        limit.report_suppressed(15 * SECOND - 1);
        assert_eq!(logged(), [""; 0], "the interval is not over");
        limit.report_suppressed(15 * SECOND);
        assert_eq!(logged(), ["WARN 992 more: storms"]);
        assert!(!limit.has_suppressed());
        limit.report_suppressed(30 * SECOND);
        drop(limit);
        assert_eq!(logged(), [""; 0], "the count is reported once");
    }

    #[test]
    fn each_kind_of_line_has_its_own_limit() {
        logged();
        let mut limit = LogLimit::<u32>::new(module_path!());
        for n in 0..100 {
            limit.warn(n, "storms", format_args!("storm {n}"));
        }
        limit.error(100, "fires", format_args!("a fire"));
        let lines = logged();
        assert_eq!(lines.len(), LINES as usize + 1);
        assert_eq!(lines[LINES as usize], "ERROR a fire");
    }

    #[test]
    fn a_subject_with_many_lines_does_not_hide_another() {
        logged();
        let mut limit = LogLimit::new(module_path!());
        for n in 0..100 {
            limit.log_subject(n, Level::Warn, ("storms", Some(1)), format_args!("storm {n}"));
        }
        limit.log_subject(100, Level::Warn, ("storms", Some(2)), format_args!("another"));
        let lines = logged();
        assert_eq!((lines.len(), lines[LINES as usize].as_str()), (LINES as usize + 1, "WARN another"));
        limit.report_suppressed(INTERVAL);
        assert_eq!(logged(), ["WARN 92 more: storms: 1"]);
    }

    #[test]
    fn subjects_are_bounded_and_the_rest_share_a_limit() {
        logged();
        let mut limit = LogLimit::new(module_path!());
        for subject in 0..10_000 {
            limit.log_subject(subject, Level::Warn, ("storms", Some(subject)), format_args!("a storm"));
        }
        assert_eq!(limit.kinds.len(), MAX_SUBJECTS + 1);
        assert_eq!(logged().len(), MAX_SUBJECTS + LINES as usize);
        limit.log_subject(3 * INTERVAL, Level::Warn, ("storms", Some(77_777)), format_args!("a late storm"));
        assert_eq!(limit.subjects(), 1, "old subjects were dropped");
        let more = 10_000 - MAX_SUBJECTS - LINES as usize;
        assert_eq!(logged(), [format!("WARN {more} more: storms"), "WARN a late storm".into()]);
    }

    #[test]
    fn the_next_interval_begins_with_the_count_of_the_last() {
        logged();
        let mut limit = LogLimit::<u32>::new(module_path!());
        for n in 0..20 {
            limit.warn(n, "storms", format_args!("storm {n}"));
        }
        logged();
        for n in 0..20 {
            limit.warn(INTERVAL + n, "storms", format_args!("storm {n}"));
        }
        let lines = logged();
        assert_eq!(lines.len(), 1 + LINES as usize);
        assert_eq!((lines[0].as_str(), lines[1].as_str()), ("WARN 12 more: storms", "WARN storm 0"));
        drop(limit);
        assert_eq!(logged(), ["WARN 12 more: storms"], "counted lines are reported at the end");
    }
}
