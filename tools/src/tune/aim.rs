//! Aims: their test of `rpcperf`, their figure, and its comparison.

use clap::ValueEnum;
use serde_json::Value;

use crate::units;

/// The optimization goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Aim {
    /// Calls per second
    Calls,
    /// Bytes of payload per second
    Bytes,
    /// 99th percentile of round trips at --rate
    P99,
    /// Processor time per call, of both ends; at --rate, or at full speed
    Cpu,
}

impl Aim {
    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The name of the figure.
    pub(super) fn figure(self) -> &'static str {
        match self {
            Self::Calls => "calls/s",
            Self::Bytes => "bytes/s",
            Self::P99 => "p99",
            Self::Cpu => "CPU/call",
        }
    }

    /// Higher figures are better.
    pub(super) fn wants_more(self) -> bool {
        matches!(self, Self::Calls | Self::Bytes)
    }

    /// The test of `rpcperf` that measures it, with the calls per second if given.
    pub(super) fn test(self, rate: Option<f64>) -> Vec<String> {
        let words: &[&str] = match (self, rate) {
            (Self::Bytes, _) => &["bw"],
            (Self::P99, _) | (Self::Cpu, Some(_)) => &["lat"],
            (Self::Calls | Self::Cpu, _) => &["rate"],
        };
        let rate = rate.into_iter().flat_map(|rate| ["--rate".to_owned(), rate.to_string()]);
        words.iter().map(|&word| word.to_owned()).chain(rate).collect()
    }

    /// The default load: at a rate, calls start whether others are outstanding or not.
    pub(super) fn usual_load(self, rate: Option<f64>) -> &'static [&'static str] {
        if rate.is_some() { &["-t", "16"] } else { &[] }
    }

    /// The figure in the output of `rpcperf --json`.
    pub(super) fn read(self, report: &Value) -> Option<f64> {
        let result = &report["results"][0];
        let figure = match self {
            Self::Calls => result["rps"].as_f64(),
            Self::Bytes => result["bytes_per_s"].as_f64(),
            Self::P99 => result["rtt_ns"]["p99"].as_f64(),
            Self::Cpu => {
                let of = |side: &str| result[side]["cpu_ns_per_call"].as_f64();
                // A remote server reports nothing about itself.
                of("client").map(|client| client + of("server").unwrap_or(0.0))
            }
        };
        figure.filter(|figure| figure.is_finite() && *figure > 0.0)
    }

    /// A figure for human readers.
    pub(super) fn text(self, figure: f64) -> String {
        match self {
            Self::Calls => units::count(figure),
            Self::Bytes => units::bytes(figure),
            Self::P99 | Self::Cpu => units::time(figure),
        }
    }

    /// Gain of `figure` over `than`: the logarithm of their ratio, above 0 for better.
    pub(super) fn gain(self, figure: f64, than: f64) -> f64 {
        let more = (figure / than).ln();
        if self.wants_more() { more } else { -more }
    }

    /// The ratio of figures that corresponds to a gain.
    pub(super) fn ratio(self, gain: f64) -> f64 {
        if self.wants_more() { gain.exp() } else { (-gain).exp() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_aim_has_its_test_and_its_figure() {
        let report = json!({"results": [{
            "rps": 5.0, "bytes_per_s": 7.0, "rtt_ns": {"p99": 9.0},
            "client": {"cpu_ns_per_call": 2.0}, "server": {"cpu_ns_per_call": 3.0},
        }]});
        for (aim, rate, test, figure) in [
            (Aim::Calls, None, "rate", 5.0),
            (Aim::Bytes, None, "bw", 7.0),
            (Aim::P99, Some(5e4), "lat --rate 50000", 9.0),
            (Aim::Cpu, None, "rate", 5.0),
            (Aim::Cpu, Some(10.0), "lat --rate 10", 5.0),
        ] {
            assert_eq!((aim.test(rate).join(" ").as_str(), aim.read(&report)), (test, Some(figure)), "{aim:?}");
            assert_eq!(aim.read(&json!({"results": [{"rps": 0.0}]})), None);
        }
        let far = json!({"results": [{"client": {"cpu_ns_per_call": 2.0}}]});
        assert_eq!(Aim::Cpu.read(&far), Some(2.0));
    }

    #[test]
    fn better_is_above_0() {
        assert!(Aim::Calls.gain(2.0, 1.0) > 0.0 && Aim::P99.gain(1.0, 2.0) > 0.0 && Aim::Cpu.gain(2.0, 1.0) < 0.0);
        for aim in Aim::value_variants() {
            assert!((aim.ratio(aim.gain(3.0, 4.0)) - 0.75).abs() < 1e-9);
        }
    }
}
