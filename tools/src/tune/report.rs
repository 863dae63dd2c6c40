//! The final report, as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::code::Code;
use super::paired::median;
use super::rpcperf::Test;
use super::search::{Found, Measured, Stage, Trial};
use super::settings::Settings;
use crate::units;

/// A completed tuning.
pub(super) struct Report<'a> {
    pub(super) test: &'a Test,
    pub(super) start: &'a Settings,
    pub(super) found: &'a Found,
    /// As `rpcperf` prints it.
    pub(super) version: &'a str,
}

impl Report<'_> {
    /// For people.
    pub(super) fn text(&self) -> String {
        let Self { test, start, found, version } = self;
        let mut text = String::new();
        let better = if test.aim.wants_more() { "more" } else { "less" };
        let _ = writeln!(text, "aim: {} ({}), {better} is better", test.aim.name(), test.aim.figure());
        let _ = writeln!(text, "{version}: rpcperf {}", test.arguments(start).join(" "));
        let figures: Vec<f64> = found.start.iter().map(|run| run.figure).collect();
        let _ = writeln!(text, "start: {start}: {}", self.spread(&figures));
        if found.start.iter().any(|run| !run.optimized) {
            text.push_str("this rpcperf is a debug build: its figures say nothing of a release build\n");
        }
        for sweep in 0..=found.trials.iter().map(|trial| trial.sweep).max().unwrap_or(0) {
            for stage in Stage::ALL {
                let is_here = |trial: &&Trial| trial.sweep == sweep && trial.stage == stage;
                let mut trials: Vec<&Trial> = found.trials.iter().filter(is_here).collect();
                if !trials.is_empty() {
                    trials.sort_by(|one, other| other.gain().total_cmp(&one.gain()));
                    let again = if sweep > 0 { format!(", sweep {}", sweep + 1) } else { String::new() };
                    text.push_str(&self.table(&format!("{}{again}", stage.name()), &trials));
                }
            }
        }
        if !found.left_out.is_empty() {
            text.push_str("\nleft out\n");
        }
        for (settings, why) in &found.left_out {
            let _ = writeln!(text, "  {settings}: {why}");
        }
        text.push('\n');
        text.push_str(&self.verdict());
        let _ = writeln!(text, "\nrpcperf {}", test.arguments(self.recommended()).join(" "));
        let code = self.code();
        if !test.remote {
            let _ = writeln!(text, "\n// the server\n{}", code.server());
        }
        let _ = writeln!(text, "\n// the client, where `shard` is that of `ClientConfig::new`\n{}", code.client());
        text
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        let Self { test, start, found, version } = self;
        let trial = |trial: &Trial| {
            json!({
                "settings": trial.settings.to_string(),
                "sweep": trial.sweep + 1,
                "stage": trial.stage.name(),
                "runs": trial.gains.len(),
                "figure": median(&trial.figures),
                "ratio": median(&trial.gains).map(|gain| test.aim.ratio(gain)),
                "failed": trial.failed,
                "stayed": trial.stayed,
            })
        };
        let left_out = |(settings, why): &(Settings, String)| json!({"settings": settings.to_string(), "why": why});
        let duel = found.duel.map(|duel| {
            let [one, other] = [duel.least, duel.most].map(|gain| test.aim.ratio(gain));
            json!({
                "pairs": duel.pairs,
                "better": duel.better,
                "ratio": test.aim.ratio(duel.estimate),
                "interval": [one.min(other), one.max(other)],
                "confidence": duel.confidence,
            })
        });
        let figures: Vec<f64> = found.start.iter().map(|run| run.figure).collect();
        let code = self.code();
        json!({
            "aim": test.aim.name(),
            "rpcperf": version,
            "start": {"settings": start.to_string(), "runs": figures.len(), "figure": median(&figures)},
            "candidates": found.trials.iter().map(trial).collect::<Vec<_>>(),
            "left_out": found.left_out.iter().map(left_out).collect::<Vec<_>>(),
            "best": found.best.to_string(),
            "duel": duel,
            "proven": found.is_proven(),
            "recommended": {
                "settings": self.recommended().to_string(),
                "arguments": test.arguments(self.recommended()),
                "server": (!test.remote).then(|| code.server()),
                "client": code.client(),
            },
        })
    }

    fn recommended(&self) -> &Settings {
        self.found.recommended(self.start)
    }

    fn code(&self) -> Code<'_> {
        let of: &[Measured] = if self.found.is_proven() { &self.found.of_best } else { &self.found.start };
        let credits = of.first().and_then(|run| run.credits);
        Code { settings: self.recommended(), credits, cores: self.test.cores.as_deref().unwrap_or_default() }
    }

    fn table(&self, head: &str, trials: &[&Trial]) -> String {
        let aim = self.test.aim;
        let mut text = format!("\n{head}\n  {:>7} {:>4} {:>8}  settings\n", "times", "runs", aim.figure());
        for trial in trials {
            let runs = trial.gains.len();
            let _ = match (&trial.failed, median(&trial.gains), median(&trial.figures)) {
                (Some(why), ..) => writeln!(text, "  {:>7} {runs:>4} {:>8}  {}: {why}", "failed", "-", trial.settings),
                (None, Some(gain), Some(figure)) => {
                    let (ratio, figure) = (aim.ratio(gain), aim.text(figure));
                    writeln!(text, "  {ratio:>7.3} {runs:>4} {figure:>8}  {}", trial.settings)
                }
                _ => writeln!(text, "  {:>7} {runs:>4} {:>8}  {}", "-", "-", trial.settings),
            };
        }
        text
    }

    /// Median and middle half of some figures: the host's noise in equal runs.
    fn spread(&self, figures: &[f64]) -> String {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(middle), Some(low), Some(high)) =
            (median(&sorted), sorted.get(sorted.len() / 4), sorted.get(sorted.len() * 3 / 4))
        else {
            return "not run".to_owned();
        };
        let aim = self.test.aim;
        let [middle_text, low_text, high_text] = [middle, *low, *high].map(|figure| aim.text(figure));
        let spread = units::percent((high - low) / middle);
        format!("{middle_text}; half of {} runs from {low_text} to {high_text}, {spread} apart", sorted.len())
    }

    fn verdict(&self) -> String {
        let Self { test, start, found, .. } = self;
        if found.best == **start {
            return format!("recommended: {start}, the start: nothing that was tried is better\n");
        }
        let failed =
            found.trials.iter().find(|trial| trial.settings == found.best).and_then(|trial| trial.failed.clone());
        let Some(duel) = found.duel else {
            let why = failed.unwrap_or_else(|| "there were too few pairs".to_owned());
            return format!("recommended: {start}, the start: {} was best, but against it: {why}\n", found.best);
        };
        let ratio = |gain: f64| test.aim.ratio(gain);
        let (least, most) = (ratio(duel.least), ratio(duel.most));
        let said = format!(
            "{:.3} times the start's {}, from {:.3} to {:.3} (95 %); better in {} of {} pairs of runs that were made after \
             it was chosen",
            ratio(duel.estimate),
            test.aim.figure(),
            least.min(most),
            least.max(most),
            duel.better,
            duel.pairs
        );
        // Rounds down: with finite pairs it never reaches 100 %.
        let sure = (duel.confidence * 1000.0).floor() / 10.0;
        if found.is_proven() {
            format!("recommended: {}\n  {said}: a confidence of {sure:.1} %\n", found.best)
        } else {
            format!(
                "recommended: {start}, the start: {} cannot be told from it\n  {said}: a confidence of {sure:.1} \
                 %, and 97.5 % are wanted; more pairs (--pairs) or longer runs (--seconds) may tell\n",
                found.best
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::aim::Aim;
    use crate::tune::paired::Difference;

    fn test() -> Test {
        Test {
            aim: Aim::P99,
            rate: Some(1e4),
            address: None,
            remote: false,
            cores: None,
            seconds: 0.5,
            load: Vec::new(),
        }
    }

    fn found(gains: &[f64]) -> Found {
        let run = |figure| Measured { figure, credits: Some(64), optimized: false };
        let trial = |settings: &str, gains: &[f64], failed: Option<&str>| Trial {
            settings: settings.parse().unwrap(),
            sweep: 0,
            stage: Stage::Alone,
            figures: gains.iter().map(|gain| 2000.0 * (-gain).exp()).collect(),
            gains: gains.to_vec(),
            failed: failed.map(str::to_owned),
            stayed: failed.is_none(),
        };
        Found {
            trials: vec![trial("workers=1", &[], Some("it broke")), trial("idle=event", gains, None)],
            left_out: vec![("shards=2".parse().unwrap(), "no core".to_owned())],
            start: [2000.0, 1900.0, 2100.0].map(run).into(),
            best: "idle=event".parse().unwrap(),
            of_best: vec![run(1000.0)],
            duel: Difference::of(gains),
        }
    }

    #[test]
    fn a_proven_best_is_recommended() {
        let found = found(&[0.7; 12]);
        let (test, start) = (test(), Settings::default());
        let report = Report { test: &test, start: &start, found: &found, version: "rpcperf 1" };
        let text = report.text();
        for words in [
            "aim: p99 (p99), less is better\n",
            "start: default: 2.00µs; half of 3 runs from 1.90µs to 2.10µs",
            "debug build",
            "    0.497   12    993ns  idle=event\n",
            "   failed    0        -  workers=1: it broke\n",
            "left out\n  shards=2: no core\n",
            "recommended: idle=event\n  0.497 times the start's p99, from 0.497 to 0.497 (95 %); better in 12 of 12 pairs",
            "was chosen: a confidence of 99.9 %\n",
            "rpcperf lat --rate 10000 --loopback -D 0.5 --idle event\n",
            "shard.poll.idle = IdlePolicy::Event;\n",
        ] {
            assert!(text.contains(words), "{words:?} is not in: {text}");
        }
        let json = report.json();
        assert_eq!((&json["proven"], &json["best"]), (&true.into(), &"idle=event".into()));
        assert!((json["duel"]["ratio"].as_f64().unwrap() - (-0.7_f64).exp()).abs() < 1e-9, "{json}");
        assert_eq!(json["candidates"][0]["failed"], "it broke");
        assert_eq!(json["recommended"]["arguments"][0], "lat");
    }

    #[test]
    fn settings_within_the_noise_are_not_recommended() {
        let found = found(&[0.1, -0.1, 0.2, -0.2, 0.05, -0.06]);
        let (test, start) = (test(), Settings::default());
        let report = Report { test: &test, start: &start, found: &found, version: "rpcperf 1" };
        let text = report.text();
        assert!(text.contains("recommended: default, the start: idle=event cannot be told from it\n"), "{text}");
        assert!(text.contains("\nrpcperf lat --rate 10000 --loopback -D 0.5\n") && text.contains("IdlePolicy::Poll"));
        assert_eq!(report.json()["recommended"]["settings"], "default");
        let nothing = Found { best: start.clone(), duel: None, ..found.clone() };
        let report = Report { found: &nothing, ..report };
        assert!(report.text().contains("nothing that was tried is better"));
    }
}
