//! Tests of the parts of a tuning, and of searches on a simulated machine with the noise of a busy host.

use std::fs::{self, File};

use clap::Parser;
use fastrand::Rng;
use rpcrdma::client::ClientConfig;
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::{Config, IdlePolicy};
use rustix::fs::{CWD, Mode, mkfifoat};

use super::knobs::{self, KNOBS, parse_choice};
use super::search::{Outcome, SearchResult, search};
use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

/// Parses the arguments of `rpcrdma tune`.
fn args(line: &str) -> Args {
    Cli::try_parse_from(["tune"].into_iter().chain(line.split_whitespace()))
        .unwrap_or_else(|error| panic!("{error}"))
        .args
}

fn settings(text: &str) -> Settings {
    let changes = text.split(' ').filter(|word| *word != "default").map(|word| knobs::parse_change(word).unwrap());
    changes.fold(Settings::default(), |all, change| all.with(&change))
}

#[test]
fn values_of_knobs_are_parsed_or_refused() {
    for (text, expected) in [
        ("credits=16,64", "credits=16 credits=64"),
        ("signal-every=4", "signal_every=4"),
        ("inline=8192", "receive_size=8192"),
        ("bulk_buffers=64K:4+1M:2,7:1", "bulk_buffers=64K:4+1M:2 bulk_buffers=7:1"),
    ] {
        let all: Vec<_> = parse_choice(text).unwrap().iter().map(|(knob, value)| format!("{knob}={value}")).collect();
        assert_eq!(all.join(" "), expected);
    }
    for (text, words) in [
        ("credits", "expected NAME=VALUE"),
        ("speed=1", "unknown knob `speed`: expected credits, batch,"),
        ("credits=16,many", "invalid credits `many`: expected a number"),
        ("batch=yes", "invalid batch `yes`: expected on or off"),
        ("idle=yield", "invalid idle `yield`: expected poll or adaptive or event"),
    ] {
        let error = parse_choice(text).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    assert!(knobs::parse_change("credits=16,64").unwrap_err().contains("expected a number"));
}

#[test]
fn settings_list_only_changes_of_defaults() {
    for text in ["default", "credits=128 batch=off", "bulk_buffers=64K:4+1M:2 workers=1"] {
        assert_eq!(settings(text).to_string(), text);
    }
    let start = settings("batch=off credits=128");
    assert_eq!(start.to_string(), "credits=128 batch=off");
    let reset = start.clone().with(&("batch", "on".to_owned()));
    assert_eq!((reset.to_string().as_str(), reset.get("batch")), ("credits=128", "on"));
    assert_eq!(reset.changes(&start), [("batch", "on".to_owned())]);
    assert_eq!((start.get("shards"), start.get("credits"), start.get("small_buffers")), ("1", "128", ""));
    let line = |text: &str| settings(text).arguments().join(" ");
    assert_eq!(
        line("credits=64 batch=off bulk_buffers=64K:4+1M:2"),
        "--credits 64 --no-batch --bulk-buffers 64K:4,1M:2"
    );
}

/// The defaults of `rpcperf`'s options equal the defaults of the engine's fields.
#[test]
fn defaults_are_those_of_the_engine_and_usual_values_are_valid() {
    let (config, server, default) = (Config::default(), ServerConfig::default(), Settings::default());
    assert_eq!(default.get("signal_every"), config.debug.signal_every.to_string());
    assert_eq!(default.get("receive_size"), config.wire.receive_size.to_string());
    assert_eq!((default.get("shards"), default.get("workers")), (server.shards.to_string().as_str(), "0"));
    assert!(config.debug.batch && config.debug.coalesce_grants && server.workers.is_none());
    assert_eq!((default.get("batch"), default.get("coalesce_grants")), ("on", "on"));
    // An invalid value would leave out its knob.
    for (aim, all, with_remote) in [("calls", 9, 6), ("bytes", 9, 5), ("p99 --rate 9", 9, 6), ("cpu", 9, 6)] {
        let count = |remote| knobs::choices(&args(&format!("--aim {aim} {remote}"))).len();
        assert_eq!((count(""), count("soft:x --remote")), (all, with_remote), "{aim}");
    }
}

/// Returns the value of a block and the text of its code.
macro_rules! value_and_code {
    ($($code:tt)*) => {
        ({ $($code)* }, stringify!($($code)*))
    };
}

/// The printed code compiles: the fields exist, and the values have their types.
#[test]
fn printed_code_compiles_and_has_all_changes() {
    let assert_same_code = |code: &str, text: &str| {
        let without_blanks = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(without_blanks(code), without_blanks(text));
    };
    let all = settings(
        "credits=128 batch=off coalesce_grants=off signal_every=4 receive_size=8192 idle=event small_buffers=512 \
         message_buffers=300 bulk_buffers=64K:4+1M:2+7:1 shards=2 workers=1",
    );
    assert_eq!(all.changes(&Settings::default()).len(), KNOBS.len(), "every knob is changed");
    let [server_code, client_code] = all.code(&[0, 1, 2, 3], "64");
    #[rustfmt::skip]
    let (server, text) = value_and_code! {
        let mut server = ServerConfig::default();
        server.shard.limits.credits = 128;
        server.shard.debug.batch = false;
        server.shard.debug.coalesce_grants = false;
        server.shard.debug.signal_every = 4;
        server.shard.wire.receive_size = 8192;
        server.shard.poll.idle = IdlePolicy::Event;
        server.shard.memory.small_buffers = 512;
        server.shard.memory.message_buffers = 300;
        server.shard.memory.bulk_buffers = vec![(64 << 10, 4), (1 << 20, 2), (7, 1)];
        server.shards = 2;
        server.workers = Some(WorkerConfig {
            count: 1, cores: Some(vec![3]), idle: server.shard.poll.idle, ..WorkerConfig::default()
        });
        server.cores = Some(vec![1, 2]);
        server
    };
    assert_same_code(&format!("{server_code}server"), text);
    assert_eq!((server.shards, server.shard.limits.credits), (2, 128));
    let mut shard = ClientConfig::new(1, 1).shard;
    #[rustfmt::skip]
    let ((), text) = value_and_code! {
        shard.poll.core = Some(0);
        shard.limits.credits = 128;
        shard.debug.batch = false;
        shard.debug.coalesce_grants = false;
        shard.debug.signal_every = 4;
        shard.wire.receive_size = 8192;
        shard.poll.idle = IdlePolicy::Event;
        shard.memory.small_buffers = 512;
        shard.memory.message_buffers = 300;
    };
    assert_same_code(&client_code, text);
    assert_eq!(shard.poll.core, Some(0));
    // Defaults are not printed, except for defaults of `rpcperf` that differ from the engine's.
    let [server_code, client_code] = Settings::default().code(&[], "64");
    let shown = "shard.limits.credits = 64;\nshard.poll.idle = IdlePolicy::Poll;\n";
    assert_eq!(client_code, shown);
    let shown = shown.replace("shard", "server.shard");
    assert_same_code(&server_code, &format!("let mut server = ServerConfig::default(); {shown} server.cores = None;"));
    let [server_code, _] = settings("idle=adaptive workers=2").code(&[0, 1], "");
    let expected = "IdlePolicy::default();\nserver.workers = Some(WorkerConfig { count: 2, cores: None, idle: ";
    assert!(server_code.contains(expected) && !server_code.contains("credits"), "{server_code}");
}

#[test]
fn settings_and_load_become_arguments_of_rpcperf() {
    for (line, text, expected) in [
        (
            "--aim p99 --rate 5e4 --cores 2,3,5 -- -t 8",
            "credits=64 batch=off",
            "lat --rate 50000 --loopback --cores 2,3 -D 0.5 -t 8 --credits 64 --no-batch",
        ),
        ("--aim calls", "default", "rate --loopback -D 0.5"),
        ("--aim cpu --seconds 2", "default", "rate --loopback -D 2"),
        ("--aim cpu --rate 10", "default", "lat --rate 10 --loopback -D 0.5 -t 16"),
        ("--aim calls iwarp:h:1 --cores 4", "shards=2", "rate --loopback=iwarp:h:1 --cores 4,4 -D 0.5 --shards 2"),
        ("--aim bytes iwarp:h:1 --remote --cores 4", "default", "bw iwarp:h:1 --cores 4 -D 0.5"),
    ] {
        assert_eq!(rpcperf::arguments(&args(line), &settings(text)).join(" "), expected);
    }
    assert_eq!(args("--aim calls --cores 5,2-4").cores(), [5, 2, 3, 4]);
}

#[test]
fn the_cause_of_a_failed_run_is_in_its_last_lines() {
    for (output, expected) in [
        (
            "rpcperf: placement: x\nrpcperf: serve: no\nrpcperf: the server did not start\n",
            Some("serve: no; the server did not start"),
        ),
        ("error: what?\n\nUsage: rpcperf\n\nFor more information, try\n", Some("error: what?")),
        ("rpcperf: placement: x\n", None),
    ] {
        assert_eq!(rpcperf::failure_cause(output).as_deref(), expected);
    }
    assert_eq!(rpcperf::failure_cause(&"x".repeat(999)).unwrap().len(), 300);
}

#[test]
fn each_aim_reads_its_figure_from_the_report() {
    let report = json!({"results": [{
        "rps": 5.0, "bytes_per_s": 7.0, "rtt_ns": {"p99": 9.0},
        "client": {"cpu_ns_per_call": 2.0}, "server": {"cpu_ns_per_call": 3.0},
    }]});
    for (aim, figure) in [(Aim::Calls, 5.0), (Aim::Bytes, 7.0), (Aim::P99, 9.0), (Aim::Cpu, 5.0)] {
        assert_eq!(aim.read(&report), Some(figure), "{aim:?}");
        assert_eq!(aim.read(&json!({"results": [{"rps": 0.0}]})), None);
    }
    let remote = json!({"results": [{"client": {"cpu_ns_per_call": 2.0}}]});
    assert_eq!(Aim::Cpu.read(&remote), Some(2.0));
}

/// A machine whose figure is the product of the settings' worth and noise. The noise is a drift of the host's speed,
/// and occasional disturbed runs that are at most half as fast.
struct SimulatedMachine {
    random: Rng,
    speed: f64,
    noise: f64,
    runs: Vec<String>,
}

impl SimulatedMachine {
    fn new(seed: u64, noise: f64) -> Self {
        Self { random: Rng::with_seed(seed), speed: 1.0, noise, runs: Vec::new() }
    }

    fn run(&mut self, settings: &Settings, worth: f64) -> Outcome {
        self.runs.push(settings.to_string());
        self.speed *= (self.noise * (self.random.f64() - 0.5)).exp();
        self.speed = self.speed.clamp(0.2, 5.0);
        let disturbance = if self.random.f64() < self.noise { 0.1 + 0.4 * self.random.f64() } else { 1.0 };
        let jitter = (self.noise * (self.random.f64() - 0.5)).exp();
        Ok(((1e6 * worth * self.speed * disturbance * jitter) as f32, json!({"credits": 64})))
    }
}

/// Returns the product of the worths of these settings.
fn worth(settings: &Settings, worths: &[(&str, f64)]) -> f64 {
    let text = settings.to_string();
    let of_word = |word: &str| worths.iter().find(|(name, _)| *name == word).map_or(1.0, |(_, worth)| *worth);
    text.split(' ').map(of_word).product()
}

fn is_proven(found: &SearchResult) -> bool {
    found.comparison.as_ref().is_some_and(|comparison| comparison.confidence > paired::PROOF)
}

/// Searches on eight cores of a machine without noise. Returns the result, and the settings of all runs.
fn search_without_noise(
    line: &str,
    worth: impl Fn(&Settings) -> Result<f64, String>,
) -> (Result<SearchResult, CommandError>, Vec<String>) {
    let mut machine = SimulatedMachine::new(1, 0.0);
    let found = search(&args(&format!("--aim calls {line}")), 8, &mut |settings| {
        let worth = worth(settings);
        let outcome = machine.run(settings, *worth.as_ref().unwrap_or(&1.0));
        Ok(worth.and(outcome))
    });
    (found, machine.runs)
}

#[test]
fn a_bad_start_value_is_improved_on_a_noisy_host() {
    let (mut without_gain, mut unproven) = (0, 0);
    for seed in 0..40 {
        // The start has bad credits. All other changes are worth nothing, or less.
        let bad = [("credits=4", 0.5), ("batch=off", 0.9), ("idle=event", 0.3), ("workers=1", 0.6)];
        let (mut machine, args) =
            (SimulatedMachine::new(seed, 0.15), args(&format!("--aim calls --start credits=4 --seed {seed}")));
        let found = search(&args, 8, &mut |settings| Ok(machine.run(settings, worth(settings, &bad)))).unwrap();
        unproven += u32::from(!is_proven(&found));
        let best = &found.best.settings;
        assert!(best.get("credits") != "4", "{seed}: {best}");
        assert!(found.comparison.as_ref().unwrap().ratio > 1.5, "{seed}: {found:?}");
        assert!(best.get("workers") != "1" && best.get("idle") != "event", "{seed}");
        assert!((100..300).contains(&machine.runs.len()), "{} runs", machine.runs.len());
        without_gain += best.changes(&args.start()).len() - 1;
    }
    // One run in seven is disturbed. If six of twenty pairs are disturbed, the test correctly proves nothing.
    assert!(unproven <= 3, "{unproven} of 40 searches proved nothing");
    assert!(without_gain <= 12, "{without_gain} knobs without a gain were changed in 40 searches");
}

#[test]
fn the_start_is_kept_if_nothing_is_better() {
    let mut wrong = 0;
    for seed in 0..60 {
        let mut machine = SimulatedMachine::new(seed, 0.15);
        let args = args(&format!("--aim calls --seed {seed}"));
        let found = search(&args, 8, &mut |settings| Ok(machine.run(settings, 1.0))).unwrap();
        wrong += u32::from(is_proven(&found));
    }
    // The test's confidence allows one of 40 searches to err. The seeds are fixed.
    assert!(wrong <= 4, "{wrong} of 60 searches proved a gain that does not exist");
}

#[test]
fn winners_of_several_knobs_are_combined() {
    let line = "--knob credits=16,64,256 --knob batch=off --knob signal_every=1,64 --knob shards=2 --knob workers=1";
    let good = [("credits=256", 1.3), ("signal_every=64", 1.25), ("shards=2", 1.4), ("workers=1", 0.7)];
    let mut all = 0;
    for seed in 0..20 {
        let mut machine = SimulatedMachine::new(seed, 0.05);
        let args = args(&format!("--aim calls --seed {seed} {line}"));
        let found = search(&args, 8, &mut |settings| Ok(machine.run(settings, worth(settings, &good)))).unwrap();
        let has_all_winners = found.best.settings.to_string() == "credits=256 signal_every=64 shards=2";
        all += u32::from(has_all_winners);
        assert!(is_proven(&found), "{found:?}");
        assert!(!has_all_winners || (found.comparison.as_ref().unwrap().ratio / 2.275).ln().abs() < 0.15, "{found:?}");
    }
    // A value is dropped in the first round if two of its three runs are disturbed.
    assert!(all >= 18, "{all} of 20 searches found all three");
}

#[test]
fn a_second_sweep_finds_settings_that_need_the_first() {
    let hidden = |settings: &Settings| {
        Ok(match (settings.get("credits") == "16", settings.get("batch") == "off") {
            (false, false) => 1.0,
            (true, false) => 1.5,
            (true, true) => 2.0,
            (false, true) => 0.8,
        })
    };
    let line = "--knob credits=16,64 --knob batch=off";
    let first = search_without_noise(line, hidden).0.unwrap();
    assert_eq!(first.best.settings.to_string(), "credits=16");
    let second = search_without_noise(&format!("{line} --sweeps 3"), hidden).0.unwrap();
    assert_eq!(second.best.settings.to_string(), "credits=16 batch=off");
    assert!((second.comparison.as_ref().unwrap().ratio - 2.0).abs() < 1e-5, "{:?}", second.comparison);
}

#[test]
fn a_failing_candidate_is_dropped_and_a_failing_start_is_an_error() {
    let worth = |settings: &Settings| match settings.get("credits") {
        "16" => Err("it broke".to_owned()),
        "64" => Ok(2.0),
        _ => Ok(1.0),
    };
    let found = search_without_noise("--knob credits=16,64 --knob workers=1", worth).0.unwrap();
    let broken = found.trials.iter().find(|trial| trial.settings.to_string() == "credits=16").unwrap();
    assert_eq!((broken.failed.as_deref(), broken.gains.len()), (Some("it broke"), 0));
    assert_eq!(found.best.settings.to_string(), "credits=64");
    let failed = |_: &Settings| Err("no core".to_owned());
    let error = search_without_noise("--start workers=2 --knob credits=16", failed).0.unwrap_err().to_string();
    assert!(error.contains("(workers=2): no core"), "{error}");
}

#[test]
fn occasional_failures_do_not_drop_candidates() {
    let runs = std::cell::Cell::new(0);
    let worth = |settings: &Settings| {
        runs.set(runs.get() + 1);
        if runs.get() % 5 == 0 { Err("a hiccup".to_owned()) } else { Ok(worth(settings, &[("credits=16", 2.0)])) }
    };
    let found = search_without_noise("--knob credits=16,64 --knob workers=1", worth).0.unwrap();
    assert!(is_proven(&found) && found.best.settings.to_string() == "credits=16", "{found:?}");
    assert!(found.trials.iter().all(|trial| trial.failed.is_none()), "{found:?}");
}

/// The stages are one knob at a time, then winners together, both with interleaved runs of the start, then pairs.
#[test]
fn the_number_and_order_of_runs_follow_the_stages() {
    let worth = |settings: &Settings| Ok(worth(settings, &[("credits=16", 1.2), ("batch=off", 1.2)]));
    let (found, runs) = search_without_noise("--knob credits=16,64,16 --knob batch=on,off", worth);
    assert_eq!(found.unwrap().best.settings.to_string(), "credits=16 batch=off");
    // All three values of credits are candidates, including the repeated one, and one value of batch. There are three
    // rounds for credits and one for batch, two rounds of three combinations with twice the runs, and the comparison.
    let rounds = 3 * (4 + 2) + 3 * (2 + 1) + 6 * (3 + 1) + 6 * (2 + 1) + 2 * 20;
    assert_eq!(runs.len(), rounds);
    let gaps = runs.split(|run| run == "default").map(<[_]>::len);
    assert!(gaps.max() <= Some(6));
}

#[test]
fn candidates_with_more_polling_threads_than_cores_are_left_out() {
    for (line, cores, left_out) in [
        ("--knob shards=2 --knob workers=1", 2, 2),
        ("--knob shards=2 --knob workers=1 --start idle=event", 2, 0),
        ("--knob credits=16 --knob workers=0,2 --start workers=1", 2, 1),
        ("--knob credits=16 --knob shards=2", 1, 1),
        ("--knob shards=2 --knob workers=1", 3, 1),
        ("--knob shards=2 --knob workers=1", 4, 0),
    ] {
        let args = args(&format!("--aim calls --repeats 1 {line}"));
        let mut machine = SimulatedMachine::new(1, 0.0);
        let found = search(&args, cores, &mut |settings| {
            Ok(machine.run(settings, settings.changes(&args.start()).len() as f64 + 1.0))
        });
        let found = found.unwrap();
        assert_eq!(found.left_out.len(), left_out, "{line}: {:?}", found.left_out);
        assert!(found.left_out.iter().all(|(_, why)| why.contains("polling threads exceed")), "{found:?}");
    }
}

#[test]
fn only_a_proven_improvement_is_recommended() {
    let tuned = |gains: &'static [f64]| {
        let args = args("--aim p99 --rate 1e4 --knob idle=event --knob workers=1 --knob shards=2 --pairs 6 -- -t 8");
        let mut noise = gains.iter().cycle();
        let found = search(&args, 2, &mut |settings| {
            let figure = match settings.to_string().as_str() {
                "idle=event" => 2000.0 * (-noise.next().unwrap()).exp(),
                _ => 2000.0,
            };
            Ok(Ok((figure as f32, json!({"credits": 64, "optimized_build": false, "rpcperf_version": "1"}))))
        });
        report::report(&args, &found.unwrap())
    };
    let (json, text) = tuned(&[0.7]);
    for words in [
        "aim: p99 (p99), less is better\nrpcperf 1: rpcperf lat --rate 10000 --loopback -D 0.5 -t 8\n",
        "start: default: 2.00µs; half of 9 runs from 2.00µs to 2.00µs\n",
        "debug build",
        "    0.497    3    993ns  idle=event\n",
        "left out\n  workers=1: 3 polling threads exceed limit 2",
        "recommended: idle=event\n  0.497 times the start's p99, from 0.497 to 0.497 (95 %); better in 6 of 6 pairs of runs",
        "after the choice: a confidence of 98.4 %\n",
        "\nrpcperf lat --rate 10000 --loopback -D 0.5 -t 8 --idle event\n",
        "\n// the server\nlet mut server = ",
        "shard.poll.idle = IdlePolicy::Event;\n",
    ] {
        assert!(text.contains(words), "{words:?} is not in: {text}");
    }
    assert_eq!((&json["proven"], &json["best"]), (&true.into(), &"idle=event".into()));
    assert!((json["comparison"]["ratio"].as_f64().unwrap() - (-0.7_f64).exp()).abs() < 1e-6, "{json}");
    assert_eq!(json["recommended"]["arguments"][0], "lat");
    let (json, text) = tuned(&[0.2, 0.1, 0.2, -0.1, 0.2, -0.2, 0.05, -0.06]);
    assert!(text.contains("recommended: default, the start: idle=event is not proven better\n"), "{text}");
    assert!(text.contains("\nrpcperf lat --rate 10000 --loopback -D 0.5 -t 8\n") && text.contains("IdlePolicy::Poll"));
    assert_eq!((&json["recommended"]["settings"], &json["proven"]), (&"default".into(), &false.into()));
    assert!(tuned(&[-0.1]).1.contains("recommended: default, the start: no candidate is better\n"));
}

#[test]
fn a_state_file_returns_runs_of_the_same_options_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let args_for = |aim: &str| args(&format!("--aim {aim} --state ignored"));
    // This figure has all digits of single precision.
    let good: Outcome = Ok(((1.0_f32 / 3.0).sqrt(), json!({"credits": 64})));
    let bad: Outcome = Err("it\nbroke".to_owned());
    let open = |aim: &str, cores| rpcperf::open_state(&path, &args_for(aim), cores).map_err(|error| error.to_string());
    let (mut file, runs) = open("calls", 2).unwrap();
    assert!(runs.is_empty());
    for outcome in [&good, &bad, &good, &bad] {
        rpcperf::add_run(&mut file, outcome).unwrap();
    }
    assert!(open("calls", 2).unwrap_err().contains("another rpcrdma tune uses it"));
    drop(file);
    // The last line is incomplete, because its process ended.
    fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"Ok\":[0.5").unwrap();
    // Failures at the end are dropped, so that they are repeated.
    for _ in 0..2 {
        assert_eq!(open("calls", 2).unwrap().1, [good.clone(), bad.clone(), good.clone()]);
    }
    for (aim, cores) in [("bytes", 2), ("calls", 3)] {
        assert!(open(aim, cores).unwrap_err().contains("belongs to a tuning with other options"));
    }
    assert_eq!(open("calls", 2).unwrap().1.len(), 3, "a refusal changes nothing");
}

#[test]
fn files_other_than_states_are_refused_and_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let refused = |path: &Path| rpcperf::open_state(path, &args("--aim calls"), 2).unwrap_err().to_string();
    for other in ["no JSON\n", "no JSON, and no line", "{", "{}\n"] {
        fs::write(&path, other).unwrap();
        assert!(refused(&path).contains("belongs to a tuning with other options"), "{other}");
        assert_eq!(fs::read_to_string(&path).unwrap(), other);
    }
    let (sparse, pipe) = (directory.path().join("sparse"), directory.path().join("pipe"));
    File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    mkfifoat(CWD, &pipe, Mode::RWXU).unwrap();
    refused(&sparse);
    refused(&pipe);
    refused(directory.path());
    let (link, nowhere) = (directory.path().join("link"), directory.path().join("nowhere"));
    std::os::unix::fs::symlink(&nowhere, &link).unwrap();
    assert!(refused(&link).contains("symbolic link") && !nowhere.exists());
}
