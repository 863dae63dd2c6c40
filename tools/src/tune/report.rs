//! The final report, as JSON and as text.

use serde_json::{Value, json};

use super::paired::{Difference, PROOF, median};
use super::search::{SearchResult, Trial};
use super::{AimDescription, Args, rpcperf};

/// Returns the report of a completed tuning, as JSON and as text.
pub(super) fn report(args: &Args, found: &SearchResult) -> (Value, String) {
    let SearchResult { trials, left_out, best, comparison } = found;
    let (start, trials) = (&trials[0], &trials[1..]);
    let AimDescription { name: aim, figure, format: format_figure, sign } = args.aim.description();
    let ratio = |gain: f64| (sign * gain).exp();
    let is_proven = comparison.as_ref().is_some_and(|comparison| comparison.confidence > PROOF);
    let Trial { settings, info, .. } = if is_proven { best } else { start };
    let arguments = rpcperf::arguments(args, settings);
    let [server, client] =
        settings.code(&args.cores(), &info["credits"].as_u64().map_or_else(String::new, |credits| credits.to_string()));
    let server = Some(server).filter(|_| !args.remote);
    let version = format!("rpcperf {}", info["rpcperf_version"].as_str().unwrap_or("of an unknown version"));
    let candidate = |trial: &Trial| {
        json!({
            "settings": trial.settings.to_string(), "sweep": trial.sweep, "stage": trial.stage,
            "runs": trial.figures.len(), "figure": median(&trial.figures), "ratio": median(&trial.gains).map(ratio),
            "failed": trial.failed, "kept": trial.kept && trial.failed.is_none(),
        })
    };
    let json = json!({
        "aim": aim,
        "rpcperf": version,
        "start": candidate(start),
        "candidates": trials.iter().map(candidate).collect::<Vec<_>>(),
        "left_out": left_out.iter().map(|(of, why)| json!({"settings": of.to_string(), "why": why})).collect::<Vec<_>>(),
        "best": best.settings.to_string(),
        "comparison": comparison,
        "proven": is_proven,
        "recommended": {"settings": settings.to_string(), "arguments": arguments, "server": server, "client": client},
    });

    let better = if sign > 0.0 { "more" } else { "less" };
    let command = rpcperf::arguments(args, &start.settings).join(" ");
    let mut text = format!("aim: {aim} ({figure}), {better} is better\n{version}: rpcperf {command}\n");
    // The range of the middle half of equal runs shows the host's noise.
    let mut figures = start.figures.clone();
    figures.sort_by(f64::total_cmp);
    let quartile = |part: usize| *figures.get(figures.len() * part / 4).unwrap_or(&0.0);
    let [low, middle, high] = [1, 2, 3].map(|part| format_figure(quartile(part)));
    text += &format!("start: {}: {middle}; half of {} runs from {low} to {high}\n", start.settings, figures.len());
    if info["optimized_build"] == false {
        text += "this rpcperf is a debug build, whose figures do not apply to a release build\n";
    }
    for trials in trials.chunk_by(|first, second| (first.sweep, first.stage) == (second.sweep, second.stage)) {
        text += &format!("\n{}\n  {:>7} {:>4} {figure:>8}  settings\n", trials[0].stage, "times", "runs");
        let mut trials: Vec<&Trial> = trials.iter().collect();
        trials.sort_by(|first, second| second.gain().total_cmp(&first.gain()));
        for Trial { settings, figures, gains, failed, .. } in trials {
            let gain = median(gains).filter(|_| failed.is_none());
            let times = gain.map_or_else(|| "failed".to_owned(), |gain| format!("{:.3}", ratio(gain)));
            let why = failed.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            let figure = median(figures).map_or("-".to_owned(), format_figure);
            text += &format!("  {times:>7} {:>4} {figure:>8}  {settings}{why}\n", gains.len());
        }
    }
    for (at, (settings, why)) in left_out.iter().enumerate() {
        text += &format!("{}  {settings}: {why}\n", if at == 0 { "\nleft out\n" } else { "" });
    }
    text += &format!("\nrecommended: {settings}");
    text += &match &best.failed {
        Some(why) => format!(", the start: {} was best, but failed in the final comparison: {why}\n", best.settings),
        None if best.settings == start.settings => ", the start: no candidate is better\n".to_owned(),
        None if is_proven => "\n".to_owned(),
        None => format!(", the start: {} is not proven better\n", best.settings),
    };
    if let Some(Difference { pairs, better, ratio, interval: [low, high], confidence, .. }) = comparison {
        // The confidence is rounded down, because it never reaches 100 %.
        let percent = (confidence * 1000.0).floor() / 10.0;
        text += &format!(
            "  {ratio:.3} times the start's {figure}, from {low:.3} to {high:.3} (95 %); better in {better} of {pairs} pairs of \
             runs that were made after the choice: a confidence of {percent:.1} %"
        );
        let advice = ", below the required 97.5 %; try more pairs (--pairs) or longer runs (--seconds)\n";
        text += if is_proven { "\n" } else { advice };
    }
    text += &format!("\nrpcperf {}\n", arguments.join(" "));
    text += &server.map_or_else(String::new, |server| format!("\n// the server\n{server}"));
    text += &format!("\n// the client, where `shard` is that of `ClientConfig::new`\n{client}");
    (json, text)
}
