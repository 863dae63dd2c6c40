//! Text form of a report in perftest's style: banner, titles, rows.
#![forbid(unsafe_code)]

use std::fmt::Write;

use serde_json::Value;

use crate::cli::{Direction, Named};
use crate::counters::Usage;
use crate::figures::Test;
use crate::report::{Entry, Measured, TestInfo};

/// Width of perftest's separator line.
const DASHES: usize = 87;
/// Longest key and value that share a line with another pair.
const HALF: usize = 42;

/// A title with its leading space, and its value.
type Column = (&'static str, fn(&Entry) -> String);

/// Round trips. The titles up to 99.9 % are perftest's, verbatim. perftest reports half round trips for Send and Write;
/// these values are full round trips.
const LATENCY: &[Column] = &[
    (" #bytes", |e| e.size.to_string()),
    (" #iterations", |e| e.own.iters.to_string()),
    ("    t_min[usec]", |e| us(e, |l| l.min as f64)),
    ("    t_max[usec]", |e| us(e, |l| l.max as f64)),
    ("  t_typical[usec]", |e| us(e, |l| l.p50 as f64)),
    ("    t_avg[usec]", |e| us(e, |l| l.mean)),
    ("    t_stdev[usec]", |e| us(e, |l| l.stdev)),
    ("   99% percentile[usec]", |e| us(e, |l| l.p99 as f64)),
    ("   99.9% percentile[usec]", |e| us(e, |l| l.p999 as f64)),
    ("   99.99% percentile[usec]", |e| us(e, |l| l.p9999 as f64)),
    ("   probe[nsec]", probes),
    ("   preempted", |e| e.preemptions.map_or_else(none, |n| n.to_string())),
];

/// Bandwidth: perftest's titles, then additional ones.
const BANDWIDTH: &[Column] = &[
    (" #bytes", |e| e.size.to_string()),
    ("     #iterations", |e| e.own.iters.to_string()),
    ("    BW peak[MiB/sec]", |e| mib(e.own.peak_bytes_per_s)),
    ("    BW average[MiB/sec]", |e| mib(e.own.bytes_per_s)),
    ("   MsgRate[Mpps]", |e| mega(e.own.rps)),
    ("   memcpy[MiB/sec]", |e| mib(e.memcpy_bytes_per_s)),
    ("   BW/memcpy", |e| e.memcpy_ratio.map_or_else(none, |r| format!("{r:.3}"))),
    ("   probe[nsec]", probes),
    ("   preempted", |e| e.preemptions.map_or_else(none, |n| n.to_string())),
];

/// Calls per second. perftest has no such test; its titles are used where they apply.
const RATE: &[Column] = &[
    (" #bytes", |e| e.size.to_string()),
    ("     #iterations", |e| e.own.iters.to_string()),
    ("    peak[Mcalls/sec]", |e| mega(e.own.peak_rps)),
    ("    average[Mcalls/sec]", |e| mega(e.own.rps)),
    ("   probe[nsec]", probes),
    ("   preempted", |e| e.preemptions.map_or_else(none, |n| n.to_string())),
];

/// Title of the direction column.
const DIRECTION: &str = "   direction";

/// The table of a test.
impl Test {
    fn columns(self) -> &'static [Column] {
        match self {
            Self::Latency { .. } => LATENCY,
            Self::Rate => RATE,
            Self::Bandwidth => BANDWIDTH,
        }
    }

    /// The column titles, with the direction column of [`rows`](Self::rows).
    pub(crate) fn header(self, directions: bool) -> String {
        let titles = self.columns().iter().map(|(title, _)| *title);
        titles.chain(directions.then_some(DIRECTION)).collect()
    }

    /// Lines of a result: one, or three with two directions.
    pub(crate) fn rows(self, entry: &Entry, direction: Direction) -> Vec<String> {
        let of = |measured: Option<Measured>, direction: &str| {
            let entry = Entry { own: measured?, memcpy_ratio: None, ..entry.clone() };
            Some(self.labelled(&entry, direction))
        };
        match direction {
            Direction::Forward => vec![self.row(entry)],
            Direction::Reverse => vec![self.labelled(entry, &direction.name())],
            Direction::Both => [
                Some(self.labelled(entry, &Direction::Forward.name())),
                of(entry.reverse, &Direction::Reverse.name()),
                of(entry.sum, "sum"),
            ]
            .into_iter()
            .flatten()
            .collect(),
        }
    }

    fn labelled(self, entry: &Entry, direction: &str) -> String {
        let row = self.row(entry);
        let pad = (self.header(true).len() - DIRECTION.trim_start().len()).saturating_sub(row.len()).max(1);
        format!("{row}{:pad$}{direction}", "")
    }

    /// One line of values beneath their titles.
    fn row(self, entry: &Entry) -> String {
        let mut line = String::new();
        let mut column = 0;
        for (title, value) in self.columns() {
            let indent = title.len() - title.trim_start().len();
            // A value wider than its title shifts the rest to the right; one space always separates values.
            let pad = (column + indent).saturating_sub(line.len()).max(1);
            let _ = write!(line, "{:pad$}{}", "", value(entry));
            column += title.len();
        }
        line
    }
}

/// Separator line.
pub(crate) fn rule() -> String {
    "-".repeat(DASHES)
}

/// Costs of a call on each side with engine counters, warm-up included.
pub(crate) fn per_call(entry: &Entry) -> impl Iterator<Item = String> {
    let size = entry.size;
    let sides = [("client", entry.client.as_ref()), ("server", entry.server.as_ref())];
    let line = move |(side, usage): (&str, Option<&Usage>)| {
        Some(format!(" {side}, a call of {size} bytes: {}", usage?.per_call()))
    };
    sides.into_iter().filter_map(line)
}

/// All fields of `test_info`, short ones two to a line.
pub(crate) fn banner(info: &TestInfo) -> String {
    let mut out = format!("{}\n{:^DASHES$}\n", rule(), info.title);
    let mut pending: Option<String> = None;
    // The serialized form supplies the list of fields, so new fields of the report appear here too.
    if let Ok(Value::Object(fields)) = serde_json::to_value(info) {
        for (key, value) in fields {
            let value = match value {
                Value::Null => continue,
                Value::Bool(on) => if on { "ON" } else { "OFF" }.to_owned(),
                Value::String(text) => text,
                other => other.to_string(),
            };
            if key == "title" {
                continue;
            }
            let item = format!(" {:<16}: {value}", key.replace('_', " "));
            match pending.take() {
                Some(first_item) if item.len() <= HALF => {
                    let _ = writeln!(out, "{first_item:<HALF$}{item}");
                }
                first_item => {
                    if let Some(first_item) = first_item {
                        let _ = writeln!(out, "{first_item}");
                    }
                    if item.len() <= HALF {
                        pending = Some(item);
                    } else {
                        let _ = writeln!(out, "{item}");
                    }
                }
            }
        }
    }
    if let Some(first_item) = pending {
        let _ = writeln!(out, "{first_item}");
    }
    out + &rule()
}

fn us(entry: &Entry, of: fn(&crate::samples::Latency) -> f64) -> String {
    entry.own.rtt_ns.as_ref().map_or_else(none, |latency| format!("{:.2}", of(latency) / 1000.0))
}

fn mib(bytes: Option<f64>) -> String {
    bytes.map_or_else(none, |bytes| format!("{:.2}", bytes / f64::from(1 << 20)))
}

fn mega(rate: Option<f64>) -> String {
    rate.map_or_else(none, |rate| format!("{:.6}", rate / 1e6))
}

fn probes(entry: &Entry) -> String {
    match (entry.probe_rtt_ns.before, entry.probe_rtt_ns.after) {
        (Some(before), Some(after)) => format!("{before}/{after}"),
        _ => none(),
    }
}

fn none() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::Probes;
    use crate::samples::Samples;

    const LATENCIES: Test = Test::Latency { rate: None };

    #[test]
    fn titles_begin_like_those_of_perftest() {
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    \
                       t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]";
        assert!(LATENCIES.header(false).starts_with(latency));
        let bandwidth = " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]";
        assert!(Test::Bandwidth.header(false).starts_with(bandwidth));
        assert_eq!(rule().len(), 87);
    }

    #[test]
    fn values_are_below_their_titles() {
        let mut samples = Samples::new();
        samples.record(12_340);
        let probe_rtt_ns = Probes { before: Some(110), after: Some(450) };
        let own = Measured { iters: 1000, rtt_ns: samples.latency(), ..Measured::default() };
        let entry = Entry { size: 64, own, probe_rtt_ns, ..Entry::default() };
        let (header, row) = (LATENCIES.header(false), LATENCIES.row(&entry));
        for (title, value) in [("#bytes", "64"), ("#iter", "1000"), ("t_max", "12.34"), ("probe", "110/450")] {
            let at = header.find(title).unwrap();
            assert!(row[at..].starts_with(value), "{title}:\n{header}\n{row}");
        }
        let own = Measured { iters: 123_456_789_012_345, ..own };
        let wide = Entry { size: 8 << 20, own, ..Entry::default() };
        let row = LATENCIES.row(&wide);
        assert_eq!(row.split_whitespace().count(), LATENCIES.columns().len(), "{row}");
    }

    #[test]
    fn each_direction_has_a_line() {
        let own = |iters| Measured { iters, rps: Some(1e6), ..Measured::default() };
        let entry = Entry { own: own(1), reverse: Some(own(2)), sum: Some(own(3)), ..Entry::default() };
        let header = Test::Rate.header(true);
        let at = header.find("direction").unwrap();
        let rows = Test::Rate.rows(&entry, Direction::Both);
        let labels: Vec<&str> = rows.iter().map(|row| &row[at..]).collect();
        assert_eq!(labels, ["forward", "reverse", "sum"]);
        let iterations = header.find("#iter").unwrap();
        assert!(rows.iter().zip(["1", "2", "3"]).all(|(row, n)| row[iterations..].starts_with(n)), "{rows:?}");
        let alone = Entry { reverse: None, sum: None, ..entry };
        assert!(Test::Rate.rows(&alone, Direction::Reverse)[0].ends_with("reverse"));
        assert!(!Test::Rate.rows(&alone, Direction::Forward)[0].contains("forward"));
    }
}
