//! Helpers that make the calls of a client, each in one step.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use rpcrdma::client::{CallId, Client, ClientCall, CompletedCall, Connection, LocalClient, Pending};
use rpcrdma::fabric::Fabric;
use rpcrdma::{Address, Buf, CallError, CallResult};

use crate::data::pattern;
use crate::leaks::{eventually, wait_until};
use crate::services::ECHO;

/// Results of a call, or its error.
pub type Outcome = Result<Vec<u8>, CallError>;

/// Results of a call that has ended, or its error.
pub fn outcome_of(result: CallResult) -> Outcome {
    result.map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// Calls on the first connection of a client that the test polls. Arguments and chunks lie in the client's memory.
pub trait Calls {
    /// Prepares a call with these arguments.
    fn prepare_call(&mut self, procedure: u32, args: &[u8]) -> ClientCall;

    /// Allocates memory for a chunk, with the pattern of a seed.
    fn pattern_buf(&mut self, seed: u32, len: usize) -> Buf;

    /// Prepares a call with these arguments and chunks.
    ///
    /// Adds a Read chunk for each length in `sent`, filled with the pattern of its index, at the position after the
    /// arguments and earlier chunks; and a Write chunk for each length in `room`.
    fn prepare_chunked_call(&mut self, procedure: u32, args: &[u8], sent: &[usize], room: &[usize]) -> ClientCall;

    /// Starts a call.
    fn launch(&mut self, call: ClientCall, token: u64) -> Option<CallId>;

    /// Starts a call for each token.
    fn launch_each(
        &mut self,
        tokens: impl IntoIterator<Item = u64>,
        mut call: impl FnMut(&mut Self, u64) -> ClientCall,
    ) {
        for token in tokens {
            let call = call(self, token);
            self.launch(call, token);
        }
    }

    /// Starts a call with these arguments.
    fn begin(&mut self, procedure: u32, args: &[u8], token: u64) -> Option<CallId> {
        let call = self.prepare_call(procedure, args);
        self.launch(call, token)
    }

    /// Starts a call, and sends it immediately unless it lacks a credit.
    fn send_call(&mut self, token: u64, call: impl FnOnce(&mut Self) -> ClientCall) -> Option<CallId>;

    /// Starts a call with these arguments, and sends it immediately unless it lacks a credit.
    fn send(&mut self, procedure: u32, args: &[u8], token: u64) -> Option<CallId> {
        self.send_call(token, |client| client.prepare_call(procedure, args))
    }

    /// Makes a prepared call, and waits for its end.
    fn outcome(&mut self, call: ClientCall) -> Outcome;

    /// Makes the call that `call` prepares, and waits for its end.
    fn run_call(&mut self, call: impl FnOnce(&mut Self) -> ClientCall) -> Outcome {
        let call = call(self);
        self.outcome(call)
    }

    /// Makes a call with these arguments, and waits for its end.
    fn run(&mut self, procedure: u32, args: &[u8]) -> Outcome {
        let call = self.prepare_call(procedure, args);
        self.outcome(call)
    }

    /// Polls until `count` calls have ended, and checks each.
    fn for_each_completion(&mut self, count: usize, check: impl FnMut(CompletedCall));

    /// Polls until `count` calls have ended. Returns their tokens and outcomes in the order of completion.
    fn completions(&mut self, count: usize) -> Vec<(u64, Outcome)>;

    /// Polls until `count` calls have ended. Returns their tokens and outcomes, sorted by token.
    fn sorted_completions(&mut self, count: usize) -> Vec<(u64, Outcome)> {
        let mut ends = self.completions(count);
        ends.sort_by_key(|(token, _)| *token);
        ends
    }

    /// Keeps up to `depth` calls outstanding until `count` have ended, and checks each.
    ///
    /// `call` prepares the call of a token, or returns `None` if there is no buffer.
    fn keep_busy(
        &mut self,
        depth: u64,
        count: u64,
        call: impl FnMut(&mut Self, u64) -> Option<ClientCall>,
        check: impl FnMut(CompletedCall),
    );

    /// Polls until a condition holds, and drops calls that end before. Panics after the time limit.
    fn poll_until(&mut self, condition: impl FnMut(&mut Self) -> bool);

    /// Polls until a condition holds. Panics if a call ends before, or after the time limit.
    fn poll_quietly_until(&mut self, condition: impl FnMut(&mut Self) -> bool);

    /// Polls until the call with this token has ended, and drops calls that end before.
    fn end_of(&mut self, token: u64) -> Outcome;

    /// Polls until a call has ended.
    fn end(&mut self) -> (u64, Outcome) {
        self.completions(1).remove(0)
    }
}

impl<F: Fabric> Calls for LocalClient<F> {
    fn prepare_call(&mut self, procedure: u32, args: &[u8]) -> ClientCall {
        let mut call = self.prepare(procedure, args.len()).expect("a buffer");
        call.args_mut().copy_from_slice(args);
        call
    }

    fn pattern_buf(&mut self, seed: u32, len: usize) -> Buf {
        let mut data = self.alloc(self.first(), len).expect("a buffer");
        pattern(seed, &mut data);
        data
    }

    fn prepare_chunked_call(&mut self, procedure: u32, args: &[u8], sent: &[usize], room: &[usize]) -> ClientCall {
        let mut call = self.prepare_call(procedure, args);
        let mut position = args.len();
        for (n, &len) in sent.iter().enumerate() {
            call = call.read_chunk(position, self.pattern_buf(n as u32, len));
            position += len.next_multiple_of(4);
        }
        for &len in room {
            call = call.write_chunk_into(self.alloc(self.first(), len).expect("a buffer"));
        }
        call
    }

    fn launch(&mut self, call: ClientCall, token: u64) -> Option<CallId> {
        self.start(self.first(), call, token)
    }

    fn send_call(&mut self, token: u64, call: impl FnOnce(&mut Self) -> ClientCall) -> Option<CallId> {
        let call = call(self);
        let id = self.launch(call, token);
        self.flush();
        id
    }

    fn outcome(&mut self, call: ClientCall) -> Outcome {
        outcome_of(self.call(call))
    }

    #[track_caller]
    fn keep_busy(
        &mut self,
        depth: u64,
        count: u64,
        mut call: impl FnMut(&mut Self, u64) -> Option<ClientCall>,
        mut check: impl FnMut(CompletedCall),
    ) {
        let (mut started, mut ended) = (0, 0);
        // The time limit applies to each wait for a completion, not to their sum.
        while ended < count {
            let ended_before = ended;
            let progressed = wait_until(|| {
                for _ in 0..1000 {
                    while started < count
                        && started - ended < depth
                        && let Some(call) = call(self, started)
                    {
                        self.launch(call, started);
                        started += 1;
                    }
                    let busy = self.poll(|done| {
                        check(done);
                        ended += 1;
                    });
                    if ended == count {
                        break;
                    }
                    if !busy {
                        // The server may share this core.
                        std::thread::yield_now();
                    }
                }
                ended > ended_before
            });
            assert!(progressed, "after the time limit, {ended} of {count} calls have ended");
        }
    }

    #[track_caller]
    fn poll_until(&mut self, mut condition: impl FnMut(&mut Self) -> bool) {
        assert!(wait_until(|| {
            self.poll(drop);
            condition(self)
        }));
    }

    #[track_caller]
    fn poll_quietly_until(&mut self, mut condition: impl FnMut(&mut Self) -> bool) {
        assert!(wait_until(|| {
            self.poll(|done| panic!("no call may end: {done:?}"));
            condition(self)
        }));
    }

    #[track_caller]
    fn for_each_completion(&mut self, count: usize, mut check: impl FnMut(CompletedCall)) {
        let mut ended = 0;
        let all_ended = wait_until(|| {
            self.poll(|done| {
                check(done);
                ended += 1;
            });
            ended >= count
        });
        assert!(all_ended, "after the time limit, {ended} of {count} calls have ended");
    }

    #[track_caller]
    fn end_of(&mut self, token: u64) -> Outcome {
        eventually(|| {
            let mut end = None;
            self.poll(|done| {
                if done.token == token {
                    end = Some(outcome_of(done.result));
                }
            });
            end
        })
    }

    #[track_caller]
    fn completions(&mut self, count: usize) -> Vec<(u64, Outcome)> {
        let mut ends = Vec::new();
        self.for_each_completion(count, |done| {
            ends.push((done.token, outcome_of(done.result)));
        });
        ends
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, which sleeps while the future is pending.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Calls of a client whose shard has a thread of its own.
pub trait ThreadCalls {
    /// Starts a call with these arguments.
    fn begin(&mut self, procedure: u32, args: &[u8]) -> Pending;

    /// Makes a call with these arguments, and waits for its end.
    fn run(&mut self, procedure: u32, args: &[u8]) -> Outcome;

    /// Allocates memory for a chunk, with the pattern of a seed.
    fn pattern_buf(&mut self, seed: u32, len: usize) -> Buf;
}

impl ThreadCalls for Client {
    #[track_caller]
    fn begin(&mut self, procedure: u32, args: &[u8]) -> Pending {
        self.start(ClientCall::new(procedure).args(args)).expect("a slot")
    }

    fn run(&mut self, procedure: u32, args: &[u8]) -> Outcome {
        outcome_of(self.call(ClientCall::new(procedure).args(args)))
    }

    fn pattern_buf(&mut self, seed: u32, len: usize) -> Buf {
        let mut data = self.alloc(len).expect("a buffer");
        pattern(seed, &mut data);
        data
    }
}

/// Connects a client to a server that `turn` polls on the same thread.
#[track_caller]
pub fn connect_polling<F: Fabric>(
    client: &mut LocalClient<F>,
    address: &Address,
    mut turn: impl FnMut(),
) -> Connection {
    let connection = client.begin_connect(address).expect("a connect request");
    client.poll_quietly_until(|client| {
        turn();
        client.is_established(connection)
    });
    connection
}

/// Makes a short inline call.
pub fn inline_call<F: Fabric>(client: &mut LocalClient<F>) -> Outcome {
    client.run(ECHO, &[0; 4])
}

/// Checks that the next calls are answered by [`RawPeer::answer_all_calls`](crate::RawPeer::answer_all_calls).
#[track_caller]
pub fn assert_answered<F: Fabric>(client: &mut LocalClient<F>, calls: usize) {
    for n in 0..calls {
        assert_eq!(inline_call(client), Ok(b"fine".to_vec()), "call {n}");
    }
}
