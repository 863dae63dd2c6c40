//! The runs in a file, from which an interrupted tuning resumes.
//!
//! Lines of JSON: a head, then one per run. The search is the same for the same seed and outcomes, so it needs no state
//! of its own. It runs again, and gets outcomes from the file until that ends.

use std::collections::VecDeque;
use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::TuneError;
use super::search::{Machine, Measured};
use super::settings::Settings;

const FOREIGN: &str = "this is no state file of rpcrdma tune, or its first line is lost; tune with another file";
/// Longest state file, in bytes. A run takes a few hundred.
const LONGEST: u64 = 64 << 20;

/// One run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Run {
    settings: String,
    /// Or the failure.
    outcome: Result<Measured, String>,
}

/// An open state file, locked by this process.
#[derive(Debug)]
pub(super) struct State {
    path: PathBuf,
    file: File,
    recorded: VecDeque<Run>,
    runs: usize,
}

impl State {
    /// Opens or creates it; `head` must be equal for its runs to count. Drops an incomplete last line, which was being
    /// written when its tuning ended. Also drops failures at the end. They may be the reason for that end, and are
    /// tried again.
    ///
    /// # Errors
    /// Another head or other contents; used by another process; a link or no regular file; or the file cannot be
    /// written.
    pub(super) fn open(path: &Path, head: &Map<String, Value>) -> Result<Self, TuneError> {
        let wrong = |reason: String| wrong(path, reason);
        let failed = |error: std::io::Error| wrong(error.to_string());
        // Neither follows a link nor waits for a FIFO.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
        let mut file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::LOOP) => wrong("it is a symbolic link; name the file itself".to_owned()),
            // A socket.
            Some(Errno::NXIO) => wrong(FOREIGN.to_owned()),
            _ => failed(error),
        })?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(wrong(FOREIGN.to_owned()));
        }
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(wrong("another rpcrdma tune is using it".to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Ok(()) => {}
        }
        if file.metadata().map_err(failed)?.len() > LONGEST {
            return Err(wrong(FOREIGN.to_owned()));
        }
        let mut bytes = Vec::new();
        (&mut file).take(LONGEST).read_to_end(&mut bytes).map_err(failed)?;
        // An incomplete last line may end within a character.
        let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(bytes.len(), |at| at + 1);
        let text = str::from_utf8(&bytes[..end]).map_err(|error| {
            let line = bytes[..error.valid_up_to()].split(|&byte| byte == b'\n').count();
            wrong(if line == 1 {
                FOREIGN.to_owned()
            } else {
                format!("line {line}: not UTF-8; tune with another file")
            })
        })?;
        let (recorded, length) = recorded(text, head).map_err(wrong)?;
        file.set_len(length as u64).map_err(failed)?;
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        let runs = recorded.len();
        let mut state = Self { path: path.to_owned(), file, recorded, runs };
        if length == 0 {
            state.append(&Value::Object(head.clone()))?;
        }
        Ok(state)
    }

    fn append(&mut self, line: &Value) -> Result<(), TuneError> {
        let text = format!("{line}\n");
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| wrong(&self.path, error))
    }
}

fn wrong(path: &Path, reason: impl fmt::Display) -> TuneError {
    TuneError::Failed(format!("--state {}: {reason}", path.display()))
}

/// The runs in a state file, and the length of them and the head, in bytes.
fn recorded(text: &str, head: &Map<String, Value>) -> Result<(VecDeque<Run>, usize), String> {
    let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let Some(first) = lines.next() else {
        // An empty file is new. The owner of an incomplete head is unknown.
        return if text.is_empty() { Ok((VecDeque::new(), 0)) } else { Err(FOREIGN.to_owned()) };
    };
    let theirs: Map<String, Value> = serde_json::from_str(first).map_err(|_| FOREIGN.to_owned())?;
    if head.keys().all(|key| !theirs.contains_key(key)) {
        return Err(FOREIGN.to_owned());
    }
    if let Some(key) = head.keys().chain(theirs.keys()).find(|key| head.get(*key) != theirs.get(*key)) {
        let text = |of: &Map<String, Value>| of.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string);
        return Err(format!(
            "it is of another tuning: {key} was {}, and is {} now; tune with the same options, or with another file",
            text(&theirs),
            text(head)
        ));
    }
    let (mut runs, mut length, mut end) = (VecDeque::new(), first.len(), first.len());
    let mut kept = 0;
    for (at, line) in lines.enumerate() {
        let run: Run =
            serde_json::from_str(line).map_err(|error| format!("line {}: {error}; tune with another file", at + 2))?;
        end += line.len();
        if run.outcome.is_ok() {
            (kept, length) = (at + 1, end);
        }
        runs.push_back(run);
    }
    runs.truncate(kept);
    Ok((runs, length))
}

/// A machine whose runs are kept, and not repeated.
pub(super) struct Recorded<M> {
    state: Option<State>,
    inner: M,
}

impl<M: Machine> Recorded<M> {
    /// With a state file, or without.
    pub(super) fn new(state: Option<State>, inner: M) -> Self {
        Self { state, inner }
    }

    /// Runs in the file; `None` without one.
    pub(super) fn runs(&self) -> Option<usize> {
        self.state.as_ref().map(|state| state.runs)
    }
}

impl<M: Machine> Machine for Recorded<M> {
    fn run(&mut self, settings: &Settings) -> Result<Result<Measured, String>, TuneError> {
        let Some(state) = &mut self.state else { return self.inner.run(settings) };
        if let Some(run) = state.recorded.pop_front() {
            if run.settings != settings.to_string() {
                let reason =
                    format!("it has a run of {} where one of {settings} is due; tune with another file", run.settings);
                return Err(wrong(&state.path, reason));
            }
            return Ok(run.outcome);
        }
        let run = Run { settings: settings.to_string(), outcome: self.inner.run(settings)? };
        let line = serde_json::to_value(run).map_err(|error| wrong(&state.path, error))?;
        state.append(&line)?;
        state.runs += 1;
        // As it will be read: digits that the text lacks must not matter.
        let read: Run = serde_json::from_str(&line.to_string()).map_err(|error| wrong(&state.path, error))?;
        Ok(read.outcome)
    }

    fn begin(&mut self, what: &str, runs_left: usize) {
        self.inner.begin(what, runs_left);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::tune::aim::Aim;
    use crate::tune::search::{Plan, search};
    use crate::tune::space::Space;

    /// Interrupted after some runs.
    struct Mortal {
        life: usize,
        runs: usize,
    }

    impl Machine for Mortal {
        fn run(&mut self, settings: &Settings) -> Result<Result<Measured, String>, TuneError> {
            if self.runs == self.life {
                return Err(TuneError::Interrupted);
            }
            self.runs += 1;
            if settings.to_string() == "workers=1" {
                return Ok(Err("it\nbroke".to_owned()));
            }
            // More digits than the text can hold.
            let figure = (1.0 / 3.0 + settings.number(crate::tune::knob::Knob::Credits) as f64).sqrt();
            Ok(Ok(Measured { figure, credits: Some(64), optimized: true }))
        }
    }

    fn head(aim: &str) -> Map<String, Value> {
        json!({"tune": 1, "aim": aim}).as_object().cloned().unwrap()
    }

    fn tune(path: &Path, life: usize) -> (Result<String, TuneError>, usize) {
        let declared = ["credits=16,64", "workers=1"].map(str::to_owned);
        let space = Space::new(Aim::Calls, &[], &declared, None, false).unwrap();
        let plan = Plan { repeats: 2, pairs: 6, combine: 2, sweeps: 1, seed: 1 };
        let state = State::open(path, &head("calls")).unwrap();
        let mut machine = Recorded::new(Some(state), Mortal { life, runs: 0 });
        let found = search(&space, Aim::Calls, plan, &mut machine);
        (found.map(|found| format!("{found:?}")), machine.inner.runs)
    }

    #[test]
    fn a_tuning_goes_on_where_it_was_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (whole, all) = tune(&folder.path().join("whole"), usize::MAX);
        let whole = whole.unwrap();
        let path = folder.path().join("state");
        let (mut lives, mut runs) = (0, 0);
        let result = loop {
            lives += 1;
            let (result, made) = tune(&path, 7);
            runs += made;
            // A line cut off by the end of its process.
            let mut text = fs::read_to_string(&path).unwrap();
            text.push_str("{\"settings\":\"cred");
            fs::write(&path, text).unwrap();
            match result {
                Err(TuneError::Interrupted) => {}
                result => break result.unwrap(),
            }
        };
        assert_eq!(result, whole);
        // Failures at the end of a life are tried again.
        assert!(
            lives >= all.div_ceil(7) && (all..all + lives).contains(&runs),
            "{runs} runs in {lives} lives, not {all}"
        );
        let (result, runs) = tune(&path, 0);
        assert_eq!((result.unwrap(), runs), (whole, 0));
    }

    #[test]
    fn another_tuning_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        drop(State::open(&path, &head("calls")).unwrap());
        let error = State::open(&path, &head("bytes")).unwrap_err().to_string();
        assert!(error.contains("aim was \"calls\", and is \"bytes\" now"), "{error}");
        let held = State::open(&path, &head("calls")).unwrap();
        assert!(State::open(&path, &head("calls")).unwrap_err().to_string().contains("another rpcrdma tune"));
        drop(held);
        let refused = |path: &Path| State::open(path, &head("calls")).unwrap_err().to_string();
        for other in ["no JSON\n", "no JSON, and no line", "{", "x"] {
            fs::write(&path, other).unwrap();
            assert!(refused(&path).contains(FOREIGN), "{other}");
            assert_eq!(fs::read_to_string(&path).unwrap(), other);
        }
        let (sparse, pipe) = (folder.path().join("sparse"), folder.path().join("pipe"));
        File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        assert!([sparse, pipe].iter().all(|path| refused(path).contains(FOREIGN)));
        let (link, nowhere) = (folder.path().join("link"), folder.path().join("nowhere"));
        std::os::unix::fs::symlink(&nowhere, &link).unwrap();
        assert!(refused(&link).contains("symbolic link") && !nowhere.exists());
        fs::write(&path, format!("{}\n{{}}\n", Value::Object(head("calls")))).unwrap();
        assert!(State::open(&path, &head("calls")).unwrap_err().to_string().contains("line 2"));
        assert!(State::open(folder.path(), &head("calls")).unwrap_err().to_string().starts_with("--state "));
        let first = Value::Object(head("calls")).to_string();
        fs::write(&path, [first.as_bytes(), b"\n{\xff}\n{}\n"].concat()).unwrap();
        assert!(refused(&path).ends_with(": line 2: not UTF-8; tune with another file"), "{}", refused(&path));
        fs::write(&path, [b"\xff", first.as_bytes(), b"\n"].concat()).unwrap();
        assert!(refused(&path).ends_with(FOREIGN));
        // A last line that was cut within a character is dropped.
        fs::write(&path, [first.as_bytes(), b"\n{\"settings\":\"\xc3"].concat()).unwrap();
        drop(State::open(&path, &head("calls")).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{first}\n"));
        let run =
            "{\"settings\":\"shards=7\",\"outcome\":{\"Ok\":{\"figure\":1.0,\"credits\":null,\"optimized\":true}}}";
        fs::write(&path, format!("{}\n{run}\n", Value::Object(head("calls")))).unwrap();
        assert!(tune(&path, 9).0.unwrap_err().to_string().contains("has a run of shards=7 where one of"));
    }
}
