//! Runs a program to its end, its time limit, or a signal.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use rustix::thread::{CpuSet, sched_setaffinity};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::TuneError;

/// Most bytes kept of a program's output.
const LONGEST: u64 = 4 << 20;
/// Time limit for output after the program has ended.
const REST: Duration = Duration::from_secs(1);

/// Events of a running program; the number is the run's.
enum Event {
    Out(u64, Vec<u8>),
    Err(u64, Vec<u8>),
    Ended(u64),
    Signal,
}

/// Runs programs, one after another, each in a process group that is killed at its end. Once this exists, signals that
/// would end this process end the program instead, and are an error.
pub(super) struct Runs {
    events: Receiver<Event>,
    say: Sender<Event>,
    signals: Handle,
    run: u64,
}

/// Outcome of a program.
pub(super) struct Ended {
    /// `None`: it was killed at its time limit.
    pub(super) status: Option<ExitStatus>,
    pub(super) out: Vec<u8>,
    pub(super) err: Vec<u8>,
}

impl Runs {
    /// # Errors
    /// Signals cannot be caught.
    pub(super) fn new() -> Result<Self, TuneError> {
        let failed = |error: std::io::Error| TuneError::Failed(format!("catching signals: {error}"));
        let (say, events) = channel();
        let mut caught = Signals::new([SIGHUP, SIGINT, SIGTERM]).map_err(failed)?;
        let (signals, tell) = (caught.handle(), say.clone());
        let watch = move || caught.forever().all(|_| tell.send(Event::Signal).is_ok());
        thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed)?;
        Ok(Self { events, say, signals, run: 0 })
    }

    /// Runs a program on these cores, or on those of this process, for `limit` at most.
    ///
    /// # Errors
    /// It cannot be started, or a signal arrived.
    pub(super) fn run(
        &mut self,
        command: &mut Command,
        cores: Option<&[usize]>,
        limit: Duration,
    ) -> Result<Ended, TuneError> {
        let program = command.get_program().display().to_string();
        let failed = |error: std::io::Error| TuneError::Failed(format!("{program}: {error}"));
        self.run += 1;
        let run = self.run;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut group = Group(start(command, cores).map_err(failed)?);
        let (out, err, pid) = (group.0.stdout.take(), group.0.stderr.take(), Pid::from_child(&group.0));
        self.beside(move || Event::Out(run, all_of(out)))?;
        self.beside(move || Event::Err(run, all_of(err)))?;
        self.beside(move || {
            // Does not reap the process: until then no other process gets its ID, and killing it is safe.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            Event::Ended(run)
        })?;
        let mut deadline = Instant::now() + limit;
        let (mut out, mut err, mut status) = (None, None, None);
        while status.is_none() || out.is_none() || err.is_none() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal) => return Err(TuneError::Interrupted),
                Ok(Event::Out(of, bytes)) if of == run => out = Some(bytes),
                Ok(Event::Err(of, bytes)) if of == run => err = Some(bytes),
                Ok(Event::Ended(of)) if of == run => {
                    // Its remaining processes end with it.
                    status = Some(group.end().map_err(failed)?);
                    deadline = Instant::now() + REST;
                }
                // From an earlier run, whose output was held open.
                Ok(Event::Out(..) | Event::Err(..) | Event::Ended(_)) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(Ended { status, out: out.unwrap_or_default(), err: err.unwrap_or_default() })
    }

    /// Sends an event from a thread of its own.
    fn beside(&self, event: impl FnOnce() -> Event + Send + 'static) -> Result<(), TuneError> {
        let say = self.say.clone();
        let tell = move || {
            // Fails only if the receiver is gone.
            let _ = say.send(event());
        };
        let thread = thread::Builder::new().spawn(tell);
        thread.map(drop).map_err(|error| TuneError::Failed(format!("a thread: {error}")))
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// A program and its descendants, which are killed and reaped on drop.
struct Group(Child);

impl Group {
    fn end(&mut self) -> std::io::Result<ExitStatus> {
        // Fails only if all its processes are gone.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        self.0.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // After a wait the ID may belong to another process.
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            let _ = self.end();
        }
    }
}

/// Starts a program whose threads and children all use these cores.
fn start(command: &mut Command, cores: Option<&[usize]>) -> std::io::Result<Child> {
    let Some(cores) = cores else { return command.spawn() };
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    // A child inherits the cores of the thread that starts it.
    let start = || {
        sched_setaffinity(None, &set)?;
        command.spawn()
    };
    let started = thread::scope(|scope| scope.spawn(start).join());
    started.unwrap_or_else(|_| Err(std::io::Error::other("the thread that starts it has panicked")))
}

fn all_of(stream: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Unreadable output counts as empty; its user reports that.
    let _ = stream.map(|stream| stream.take(LONGEST).read_to_end(&mut bytes));
    bytes
}
