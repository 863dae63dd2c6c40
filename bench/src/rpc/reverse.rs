//! Reverse direction: the server calls and measures its client.
//!
//! A thread of the server beside its shard makes the calls, as an application would.
#![forbid(unsafe_code)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rpcrdma::client::{Client, ClientCall, ClientConfig, Pending};
use rpcrdma::cross_thread::idle::{Idle, IdleStep};
use rpcrdma::mempool::Buf;
use rpcrdma::service::Caller;
use rpcrdma::typed::{ReplySender, ReplySent};
use rpcrdma::{CallResult, Refusal, Server};
use rpcrdma_config::program;
use serde::{Deserialize, Serialize};

use super::payload::{Payload, Shape};
use super::protocol::rpcperf_v5;
use super::protocol::{OUTCOME_PAGE, OutcomePage};
use super::service;
use super::target::{call_failure, mismatch};
use crate::cli;
use crate::clock::Clock;
use crate::failure::Failure;
use crate::figures::{Figures, Test};
use crate::pin;
use crate::progress::Progress;
use crate::stop;
use crate::target::{Length, Target};

/// A requested measurement of calls to a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReverseRun {
    /// Payload and its form.
    pub(crate) shape: Shape,
    /// Outstanding calls.
    pub(crate) outstanding: usize,
    pub(crate) test: Test,
    pub(crate) length: Length,
    /// Core of the calling thread.
    pub(crate) core: usize,
    /// The thread shares its core.
    pub(crate) yields: bool,
    /// Idle policy of the thread.
    pub(crate) idle: cli::Idle,
}

/// Outcome of a run, sent to the client.
pub(crate) type Outcome = Result<Figures, String>;

enum ReverseState {
    /// No run was requested yet.
    Idle,
    /// A run with calls to this client is in progress.
    Running(Caller),
    /// [`Outcome`] of the last run, as JSON.
    Done(Vec<u8>),
}

/// Handle with which procedures request runs from the reverse thread and read their outcomes.
#[derive(Clone)]
pub(crate) struct ReverseControl {
    state: Arc<Mutex<ReverseState>>,
    runs: Sender<(Caller, ReverseRun)>,
    max_outstanding: usize,
}

/// The thread that makes the requested runs.
pub(crate) struct ReverseWorker {
    state: Arc<Mutex<ReverseState>>,
    runs: Receiver<(Caller, ReverseRun)>,
}

impl ReverseControl {
    /// Creates the thread's state and its handle. A run has at most `max_outstanding` outstanding calls.
    pub(crate) fn new(max_outstanding: usize) -> (Self, ReverseWorker) {
        let (send, runs) = channel();
        let state = Arc::new(Mutex::new(ReverseState::Idle));
        (Self { state: Arc::clone(&state), runs: send, max_outstanding }, ReverseWorker { state, runs })
    }

    /// Requests a run. Returns the number of its outstanding calls; 0 while another run is in progress.
    pub(crate) fn start(&self, caller: Caller, run: &[u8]) -> Result<u32, Refusal> {
        let run: ReverseRun = serde_json::from_slice(run).map_err(|_| Refusal::GarbageArguments)?;
        let run = ReverseRun { outstanding: run.outstanding.clamp(1, self.max_outstanding), ..run };
        let outstanding = run.outstanding as u32;
        let mut state = lock_state(&self.state);
        if matches!(*state, ReverseState::Running(_)) {
            return Ok(0);
        }
        stop::set_requested(false);
        self.runs.send((caller, run)).map_err(|_| Refusal::SystemError)?;
        *state = ReverseState::Running(caller);
        Ok(outstanding)
    }

    /// Ends the run towards this client early, if there is one.
    pub(crate) fn stop(&self, caller: Caller) {
        let state = lock_state(&self.state);
        // The state stays locked, so that the request cannot stop a later run.
        if matches!(*state, ReverseState::Running(current) if current == caller) {
            stop::set_requested(true);
        }
    }

    /// Sends a page of the last outcome.
    pub(crate) fn send_outcome(
        &self,
        at: usize,
        answer: ReplySender<'_, rpcperf_v5::Outcome>,
    ) -> Result<ReplySent, Refusal> {
        let state = lock_state(&self.state);
        let ReverseState::Done(outcome) = &*state else { return answer.send(&OutcomePage::default()) };
        let rest = outcome.get(at..).unwrap_or_default();
        let text = &rest[..rest.len().min(OUTCOME_PAGE as usize)];
        answer.send(&OutcomePage { len: outcome.len() as u32, text })
    }
}

impl ReverseWorker {
    /// Makes the requested runs on a thread until the process exits.
    pub(crate) fn spawn(self, server: Arc<Server>) -> Result<(), Failure> {
        let work = move || {
            let clock = Clock::new();
            for (caller, run) in &self.runs {
                let outcome: Outcome = measure(&server, caller, &run, &clock).map_err(|failure| failure.to_string());
                *lock_state(&self.state) = ReverseState::Done(serde_json::to_vec(&outcome).unwrap_or_default());
            }
        };
        program::spawn("reverse", work).map_err(|e| Failure::run("calls of the server", e))
    }
}

fn lock_state(state: &Mutex<ReverseState>) -> MutexGuard<'_, ReverseState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn measure(server: &Server, caller: Caller, run: &ReverseRun, clock: &Clock) -> Result<Figures, Failure> {
    pin::pin(run.core)?;
    let config = ClientConfig::new(rpcperf_v5::PROGRAM, rpcperf_v5::VERSION);
    let client = server.call_back(caller, config);
    let client = client.ok_or_else(|| Failure::Run("the client has no connection to this server".to_owned()))?;
    let mut target = ReverseTarget::new(client, run)?;
    run.test.run(&mut target, clock, run.length, &mut Progress::silent())
}

/// Calls to a client as a [`Target`].
struct ReverseTarget {
    client: Client,
    shape: Shape,
    slots: Vec<Payload>,
    outstanding: Vec<(u32, Pending)>,
    stamp: u32,
    idle: Idle,
}

impl ReverseTarget {
    fn new(mut client: Client, run: &ReverseRun) -> Result<Self, Failure> {
        let shape = run.shape;
        let mut slots = Vec::with_capacity(run.outstanding);
        for _ in 0..run.outstanding {
            let sent = shape.sends_chunk().then(|| client.alloc(shape.size)).transpose();
            let mut sent: Option<Buf> = sent.map_err(|error| {
                Failure::Run(format!("cannot allocate a payload of {} bytes on the server: {error}", shape.size))
            })?;
            if let Some(buf) = &mut sent {
                service::fill(buf);
            }
            slots.push(Payload { chunk: sent, expected: 0 });
        }
        let idle = Idle::new(run.idle.policy()).yield_every(u32::from(run.yields));
        Ok(Self { client, shape, slots, outstanding: Vec::with_capacity(run.outstanding), stamp: 0, idle })
    }

    fn complete_call(&mut self, token: u32, result: CallResult, done: &mut Vec<u32>) -> Result<(), Failure> {
        let mut reply = result.map_err(|end| call_failure(&end.error))?;
        let slot = &mut self.slots[token as usize];
        if !self.shape.check_reply(slot, &mut reply) {
            return Err(mismatch(self.shape.op, reply.results()));
        }
        if !self.shape.sends_chunk()
            && let Some(mut received) = slot.chunk.take()
        {
            // The buffer returns to the shard. Its old bytes must not pass for data of its next call.
            service::stamp(&mut received, 0);
        }
        done.push(token);
        Ok(())
    }
}

impl Target for ReverseTarget {
    fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    fn peer(&self) -> &'static str {
        "the client"
    }

    fn start(&mut self, token: u32) -> Result<(), Failure> {
        let shape = self.shape;
        let slot = &mut self.slots[token as usize];
        self.stamp = self.stamp.wrapping_add(1);
        let mut args = vec![0; shape.args_len()];
        slot.expected = shape.write_args(&mut args, self.stamp);
        let mut call = ClientCall::new(shape.procedure()).args(args).expect_reply(shape.results_len());
        if shape.receives_chunk() {
            call = call.write_chunk(shape.size as u32);
        }
        if let Some(mut sent) = slot.chunk.take() {
            slot.expected = service::stamp(&mut sent, self.stamp);
            call = call.read_chunk(4, sent);
        }
        let pending = self.client.start(call).map_err(|refused| call_failure(&refused.error))?;
        self.outstanding.push((token, pending));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
        let before = done.len();
        let mut at = 0;
        while let Some((token, pending)) = self.outstanding.get_mut(at) {
            match pending.try_take() {
                Some(result) => {
                    let token = *token;
                    self.outstanding.remove(at);
                    self.complete_call(token, result, done)?;
                }
                None => at += 1,
            }
        }
        if done.len() > before {
            self.idle.reset();
            return Ok(());
        }
        match self.idle.after_empty_poll() {
            IdleStep::Spin => {}
            IdleStep::Yield => thread::yield_now(),
            // The oldest call usually completes first.
            IdleStep::Sleep if !self.outstanding.is_empty() => {
                let (token, mut pending) = self.outstanding.remove(0);
                let result = pending.join();
                self.complete_call(token, result, done)?;
            }
            IdleStep::Sleep => thread::yield_now(),
        }
        Ok(())
    }
}
