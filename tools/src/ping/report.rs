//! Results of `rpcrdma ping`, as text and JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use hdrhistogram::Histogram;
use rpcrdma::client::ConnectionTerms;
use rpcrdma::stats::ShardStats;
use rpcrdma::wire::rpc::ProgramNumber;
use rpcrdma::{Address, CallError, LocalClient};
use serde_json::{Map, Value, json};

use super::Args;

/// Longest recorded round trip, in nanoseconds.
const MAX_TIME: u64 = 60_000_000_000;
/// The printed percentiles.
const PERCENTILES: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9)];

type Answer = Result<Duration, CallError>;

/// Results so far.
pub(super) struct Report<'a> {
    args: &'a Args,
    /// The server's address.
    address: &'a Address,
    /// Terms of the connection when it was last open.
    terms: Option<ConnectionTerms>,
    credits: Option<u32>,
    /// Credits before the first call.
    credits_at_start: Option<u32>,
    /// Whether the server used the offered Reply chunk.
    chunk: Result<Option<bool>, CallError>,
    pub(super) calls: u64,
    /// Number of failed calls by error.
    errors: BTreeMap<String, u64>,
    /// Round trips in nanoseconds.
    times: Histogram<u64>,
    pub(super) stats: Option<ShardStats>,
}

impl<'a> Report<'a> {
    pub(super) fn new(args: &'a Args, address: &'a Address) -> Self {
        let times = Histogram::new_with_bounds(1, MAX_TIME, 3).expect("valid constant bounds");
        let errors = BTreeMap::new();
        Self {
            args,
            address,
            terms: None,
            credits: None,
            credits_at_start: None,
            chunk: Ok(None),
            calls: 0,
            errors,
            times,
            stats: None,
        }
    }

    /// Records the terms of the connection, if it is open.
    pub(super) fn record_terms(&mut self, client: &LocalClient) {
        let first = client.first();
        self.terms = client.terms(first).or(self.terms);
        self.credits = client.credits(first).or(self.credits);
        self.credits_at_start = self.credits_at_start.or(self.credits);
    }

    /// Records the result of the call that offers a Reply chunk.
    pub(super) fn record_chunk(&mut self, used: Result<bool, CallError>) {
        self.chunk = used.map(Some);
    }

    /// Records a call.
    pub(super) fn record_call(&mut self, answer: &Answer) {
        self.calls += 1;
        match answer {
            Ok(time) => self.times.saturating_record(time.as_nanos() as u64),
            Err(error) => *self.errors.entry(error.to_string()).or_default() += 1,
        }
    }

    pub(super) fn has_all_answers(&self) -> bool {
        self.errors.is_empty() && self.chunk.is_ok() && self.calls > 0
    }

    /// Returns the first line.
    pub(super) fn head(&self) -> String {
        let Args { program, program_version: version, .. } = self.args;
        let address = self.address;
        let mut head = format!("PING {address} program {} version {version}: ", ProgramNumber(*program));
        match (self.terms, self.credits) {
            (Some(terms), Some(credits)) => {
                let (v, send, receive) =
                    (terms.version(), terms.send_inline_threshold(), terms.receive_inline_threshold());
                let _ = write!(head, "RPC-over-RDMA version {v}, {credits} credits, ");
                let _ = write!(head, "calls up to {send} bytes inline, replies up to {receive}");
            }
            _ => head.push_str("not connected"),
        }
        head
    }

    /// Returns the line of a call.
    pub(super) fn line(&self, answer: &Answer) -> String {
        match answer {
            Ok(time) => format!("reply {} in {:.1} us", self.calls, micros(time.as_nanos() as f64)),
            Err(error) => format!("call {}: {error}", self.calls),
        }
    }

    /// Describes the use of the Reply chunk, as a word and as text.
    fn chunk(&self) -> (&'static str, String) {
        match &self.chunk {
            Ok(None) => ("none", "not offered".to_owned()),
            Ok(Some(true)) => ("used", "used by the server".to_owned()),
            Ok(Some(false)) => ("inline", "offered, answered inline".to_owned()),
            Err(error) => ("failed", format!("offered, and the call failed: {error}")),
        }
    }

    /// Returns the numbers of connections, and of windows revoked by the server and by the client.
    fn counts(&self) -> [u64; 3] {
        let stats = self.stats.as_ref();
        stats.map_or([0; 3], |stats| {
            [stats.connections_made, stats.windows_revoked_by_peers, stats.windows_revoked_here]
        })
    }

    /// Returns the last lines.
    pub(super) fn summary(&self) -> String {
        let [connections, by_server, here] = self.counts();
        let (calls, answered) = (self.calls, self.times.len());
        let lost = if calls == 0 { 0.0 } else { 100.0 * (calls - answered) as f64 / calls as f64 };
        let mut text = format!("\n--- {} ---\n{calls} calls, {answered} answered, ", self.address);
        let _ = writeln!(text, "{lost:.1}% failed; connections begun: {connections}");
        let (_, offered) = self.chunk();
        let _ = writeln!(
            text,
            "Reply chunk: {offered}; handles invalidated by the server: {by_server}, by this side: {here}"
        );
        for (error, count) in &self.errors {
            let _ = writeln!(text, "{count} times: {error}");
        }
        if answered > 0 {
            let _ = write!(text, "round trip, us:");
            for (name, value) in self.times_us() {
                let _ = write!(text, " {name} {value:.1}");
            }
            text.push('\n');
        }
        text
    }

    /// Returns statistics of round trips in microseconds.
    fn times_us(&self) -> Vec<(&'static str, f64)> {
        let times = &self.times;
        let mut all = vec![("min", times.min() as f64), ("mean", times.mean())];
        all.extend(PERCENTILES.map(|(name, p)| (name, times.value_at_percentile(p) as f64)));
        all.push(("max", times.max() as f64));
        all.into_iter().map(|(name, ns)| (name, micros(ns))).collect()
    }

    /// Returns all results as JSON.
    pub(super) fn json(&self) -> Value {
        let [connections, by_server, here] = self.counts();
        let times = (!self.times.is_empty())
            .then(|| self.times_us().into_iter().map(|(name, us)| (name.to_owned(), us.into())).collect::<Map<_, _>>());
        json!({
            "address": self.address.to_string(),
            "program": self.args.program,
            "version": self.args.program_version,
            "rdma_version": self.terms.map(|terms| terms.version()),
            "inline_send": self.terms.map(|terms| terms.send_inline_threshold()),
            "inline_receive": self.terms.map(|terms| terms.receive_inline_threshold()),
            "credits": self.credits,
            "credits_at_start": self.credits_at_start,
            "connections": connections,
            "reply_chunk": self.chunk().0,
            "invalidated_by_server": by_server,
            "invalidated_here": here,
            "calls": self.calls,
            "answered": self.times.len(),
            "failed": self.calls - self.times.len(),
            "errors": self.errors,
            "rtt_us": times,
        })
    }
}

fn micros(ns: f64) -> f64 {
    (ns / 100.0).round() / 10.0
}
