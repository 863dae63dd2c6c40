//! Tests of the program `rpcrdma tune`, with a script as `rpcperf`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// Script with constant figures, so that no test depends on time.
///
/// 256 credits are better than the start, and idle policy event is worse. The variable `runs` is the number of this
/// run, and changes the last digit as noise.
const PLANTED: &str = r#"
figure=1000
for word in "$@"; do
    case $word in
        --credits) ;;
        256) figure=2000 ;;
        event) figure=100 ;;
        --no-batch) echo "rpcperf: no batch today" >&2; exit 1 ;;
    esac
done
info='{"credits": 64, "optimized_build": true, "rpcperf_version": "0.0.0"}'
echo "{\"results\": [{\"rps\": $figure.$((runs % 7))}], \"test_info\": $info}"
"#;

/// A script that replaces `rpcperf`, in a temporary directory. It records its runs in the file `runs`.
struct FakeRpcperf {
    directory: TempDir,
}

impl FakeRpcperf {
    fn new(body: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let text = format!(
            "#!/bin/sh\ndir=${{0%/*}}\necho \"$@\" >>\"$dir/runs\"\nruns=0\n\
             while read -r _; do runs=$((runs + 1)); done <\"$dir/runs\"\n{body}\n"
        );
        let fake = Self { directory };
        fs::write(fake.path("rpcperf"), text).expect("a file");
        fs::set_permissions(fake.path("rpcperf"), fs::Permissions::from_mode(0o755)).expect("it is ours");
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn arguments(&self, arguments: &[&str]) -> Vec<String> {
        let program = self.path("rpcperf").display().to_string();
        let words = ["--rpcperf", &program, "--aim", "calls", "--repeats", "2", "--pairs", "6"];
        words.iter().chain(arguments).map(|&word| word.to_owned()).collect()
    }

    /// Runs the tuning. Returns exit status, standard output and standard error.
    fn tune(&self, arguments: &[&str]) -> (i32, String, String) {
        let arguments = self.arguments(arguments);
        crate::tool::rpcrdma("tune", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the command lines of all runs.
    fn runs(&self) -> Vec<String> {
        fs::read_to_string(self.path("runs")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

const KNOBS: &[&str] = &["--knob", "credits=16,256", "--knob", "batch=off", "--knob", "idle=adaptive,event"];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn the_best_knob_is_recommended_in_text_and_json() {
    let fake = FakeRpcperf::new(PLANTED);
    let file = fake.path("result.json");
    let path = file.to_str().expect("text");
    let (status, out, errors) = fake.tune(&[KNOBS, &["--json", path, "--", "-t", "8"]].concat());
    assert_eq!((status, errors.as_str()), (0, ""), "no progress bar without a terminal");
    for words in [
        "aim: calls (calls/s), more is better\nrpcperf 0.0.0: rpcperf rate --loopback -D 0.5 -t 8\n",
        "  credits=256\n",
        "batch=off: no batch today\n",
        "recommended: credits=256\n",
        "times the start's calls/s, from ",
        "\nrpcperf rate --loopback -D 0.5 -t 8 --credits 256\n",
        "\nserver.shard.limits.credits = 256;\nserver.shard.poll.idle = IdlePolicy::Poll;\n",
        "\nshard.limits.credits = 256;\nshard.poll.idle = IdlePolicy::Poll;\n",
    ] {
        assert!(out.contains(words), "{words:?} is not in: {out}");
    }
    let result = json(&fs::read_to_string(&file).expect("the result"));
    assert_eq!((&result["proven"], &result["best"]), (&true.into(), &"credits=256".into()));
    assert!(
        result["comparison"]["interval"][0].as_f64() > Some(1.9)
            && result["comparison"]["interval"][1].as_f64() < Some(2.1)
    );
    assert_eq!(result["recommended"]["settings"], "credits=256");
    let failed: Vec<_> = result["candidates"]
        .as_array()
        .expect("an array")
        .iter()
        .filter(|candidate| !candidate["failed"].is_null())
        .collect();
    assert!(failed.len() == 1 && failed[0]["settings"] == "batch=off", "{result}");
    let runs = fake.runs();
    assert!(runs.iter().all(|line| line.starts_with("rate --loopback -D 0.5 -t 8 ") && line.ends_with("--json -")));
    assert_eq!(
        runs.iter().filter(|line| line.contains("--no-batch")).count(),
        2,
        "a candidate that failed twice is dropped"
    );
}

#[test]
fn json_to_standard_output_replaces_the_text() {
    let fake = FakeRpcperf::new(PLANTED);
    let (status, out, _) = fake.tune(&["--knob", "idle=event", "--json", "-"]);
    let result = json(&out);
    assert_eq!((status, &result["proven"], &result["best"]), (0, &false.into(), &"default".into()));
    assert_eq!((&result["comparison"], &result["recommended"]["settings"]), (&Value::Null, &"default".into()));
}

#[test]
fn json_is_written_to_devices_and_pipes() {
    let fake = FakeRpcperf::new(PLANTED);
    let knob = ["--knob", "idle=event", "--json"];
    let (status, out, errors) = fake.tune(&[&knob[..], &["/dev/null"]].concat());
    assert_eq!((status, errors.as_str()), (0, ""));
    assert!(out.contains("recommended: default"), "{out}");

    let fifo = fake.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let name = fifo.display().to_string();
    let reader = std::thread::spawn(move || fs::read_to_string(fifo).expect("the pipe"));
    let (status, out, errors) = fake.tune(&[&knob[..], &[&name]].concat());
    assert_eq!((status, errors.as_str()), (0, ""));
    assert!(out.contains("recommended: default"), "{out}");
    assert_eq!(json(&reader.join().expect("the reader"))["best"], "default");
}

/// If the file cannot be written at the end, the text is still printed. If it cannot be opened, nothing is run.
#[test]
fn errors_of_the_json_file_name_it() {
    let fake = FakeRpcperf::new(PLANTED);
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--json", "/dev/full"]);
    let expected = "rpcrdma: --json /dev/full: No space left on device (os error 28); name another file\n";
    assert_eq!((status, errors.as_str()), (1, expected));
    assert!(out.contains("recommended: default"), "{out}");
    let fake = FakeRpcperf::new(PLANTED);
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--json", "/nowhere/result"]);
    assert_eq!((status, out.as_str(), fake.runs().len()), (1, "", 0));
    assert!(errors.contains("--json /nowhere/result: No such file or directory"), "{errors}");
}

#[test]
fn an_interrupted_tuning_resumes_from_its_state() {
    // There is no noise, because the repeated run must equal the original.
    let planted = PLANTED.replace("runs % 7", "0");
    let whole = FakeRpcperf::new(&planted);
    let (_, expected, _) = whole.tune(KNOBS);
    let all = whole.runs().len();

    // The ninth run and its child keep a pipe open and wait for an interrupt.
    let wait_script = "if [ -p \"$dir/there\" ] && [ $runs = 9 ]; then\n\
                 exec 3>\"$dir/there\"; echo there >&3; sleep 600 & wait; echo late >&3; fi\n";
    let fake = FakeRpcperf::new(&format!("{wait_script}{planted}"));
    assert!(Command::new("mkfifo").arg(fake.path("there")).status().expect("mkfifo").success());
    let state = fake.path("state").display().to_string();
    let result_path = fake.path("result.json").display().to_string();
    let arguments = fake.arguments(&[KNOBS, &["--state", &state, "--json", &result_path]].concat());
    let tune = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .arg("tune")
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut there = BufReader::new(fs::File::open(fake.path("there")).expect("the pipe"));
    let mut line = String::new();
    there.read_line(&mut line).expect("the ninth run");
    let kill = Command::new("kill").args(["-INT", &tune.id().to_string()]).status().expect("kill");
    assert!(kill.success());
    let output = tune.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]), "{errors}");
    assert!(errors.contains(&format!("interrupted; 8 runs are kept in {state}: the same command resumes")), "{errors}");
    let result = json(&fs::read_to_string(&result_path).expect("the result"));
    assert!(
        result["error"].as_str().is_some_and(|error| error.starts_with("interrupted; 8 runs are kept")),
        "{result}"
    );
    // The end of the pipe shows that no process has it open.
    let rest = there.read_to_string(&mut line).map(|_| line);
    assert_eq!(rest.expect("text"), "there\n", "no run outlives its tuning");

    fs::remove_file(fake.path("there")).expect("it is there");
    let (status, out, errors) = fake.tune(&[KNOBS, &["--state", &state]].concat());
    assert_eq!((status, errors.as_str()), (0, ""));
    assert_eq!(fake.runs().len(), all + 1, "only the interrupted run is repeated");
    assert_eq!(out, expected);
    // All runs are in the state file now.
    assert_eq!(fake.tune(&[KNOBS, &["--state", &state]].concat()).1, out);
    assert_eq!(fake.runs().len(), all + 1);

    let (status, out, errors) = fake.tune(&["--knob", "credits=16", "--state", &state]);
    assert_eq!((status, out.as_str()), (1, ""));
    assert!(errors.contains("it belongs to a tuning with other options"), "{errors}");
}

#[test]
fn a_terminal_shows_the_progress() {
    if !crate::wait::has("tmux") {
        return;
    }
    // From the third run on, each waits until the file `held` is removed.
    let hold_script = "while [ $runs -ge 3 ] && [ -e \"$dir/held\" ]; do sleep 0.05; done\n";
    let fake = FakeRpcperf::new(&format!("{hold_script}{PLANTED}"));
    fs::write(fake.path("held"), "").expect("a file");
    let words = fake.arguments(KNOBS).join(" ");
    let command = format!("{} tune {words}; read end", env!("CARGO_BIN_EXE_rpcrdma"));
    let mut terminal = crate::terminal::Terminal::open(fake.directory.path(), (120, 40), &command);
    let is_third = |screen: &str| screen.lines().any(|line| line.contains(" 2 runs, "));
    assert!(terminal.shows(is_third), "{}", terminal.seen);
    // A narrow terminal shows the start of the line.
    terminal.tmux(&["resize-window", "-t", "t", "-x", "40", "-y", "40"]);
    assert!(terminal.shows(is_third), "{}", terminal.seen);
    terminal.tmux(&["resize-window", "-t", "t", "-x", "120", "-y", "40"]);
    fs::remove_file(fake.path("held")).expect("it is there");
    // At the end the result replaces the progress.
    let is_finished = |screen: &str| screen.contains("recommended: credits=256") && !screen.contains(" runs, ");
    assert!(terminal.shows(is_finished), "{}", terminal.seen);
    terminal.key("Enter");
    assert!(terminal.ends());
}

#[test]
fn a_candidate_fails_if_its_run_exceeds_the_time_limit() {
    let fake = FakeRpcperf::new(&format!("case \"$*\" in *event*) sleep 600;; esac\n{PLANTED}"));
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--limit", "5"]);
    assert_eq!((status, errors.as_str()), (0, ""));
    assert!(out.contains("idle=event: time-out after 5 s (--limit)\n"), "{out}");
}

#[test]
fn a_failing_start_ends_the_tuning() {
    for (body, words) in [
        ("echo 'rpcperf: no such core' >&2; exit 2", "(default): no such core\n"),
        ("exit 3", "the start does not run (default): exit status: 3, without an error message"),
        ("echo '{}'", "no figure for calls"),
        ("echo hello", "output is not JSON"),
    ] {
        let fake = FakeRpcperf::new(body);
        let (status, out, errors) = fake.tune(KNOBS);
        assert_eq!((status, out.as_str()), (1, ""));
        assert!(errors.contains(words), "{words:?} is not in: {errors}");
    }
    let nowhere = ["--aim", "calls", "--rpcperf", "/nowhere/at/all"];
    let (status, _, errors) = crate::tool::rpcrdma("tune", &nowhere);
    assert!(status == 1 && errors.contains("cargo build --release -p rpcrdma-bench"), "{errors}");
    let (status, _, errors) = crate::tool::rpcrdma("tune", &["--aim", "calls", "--rpcperf", "/bin/true"]);
    assert!(status == 1 && errors.contains("output is not JSON"), "{errors}");
}

#[test]
fn wrong_usage_is_explained() {
    for (arguments, words) in [
        (&[][..], "--aim"),
        (&["--aim", "speed"], "possible values: calls, bytes, p99, cpu"),
        (&["--aim", "p99"], "--rate"),
        (&["--aim", "calls", "--rate", "5"], "--rate does not apply to --aim calls"),
        (&["--aim", "calls", "--knob", "credits=many"], "invalid credits `many`: expected a number"),
        (&["--aim", "calls", "--start", "credits=4,8"], "invalid credits `4,8`: expected a number"),
        (&["--aim", "calls", "--knob", "speed=1"], "unknown knob `speed`: expected credits, batch,"),
        (&["--aim", "calls", "--start", "batch=maybe"], "invalid batch `maybe`: expected on or off"),
        (&["--aim", "calls", "--cores", "8191"], "invalid --cores `8191`"),
        (&["--aim", "calls", "--cores", "x"], "invalid core `x`"),
        (&["--aim", "calls", "--remote"], "<ADDRESS>"),
        (&["--aim", "calls", "--remote", "soft:x", "--knob", "workers=1"], "workers: cannot be changed with --remote"),
        (&["--aim", "calls", "--pairs", "5"], "6..=200"),
        (&["--aim", "calls", "tcp:x"], "tcp:x"),
        (&["--aim", "calls", "--limit", "0"], "'--limit <SECONDS>': expected more than 0 seconds"),
        (&["--aim", "calls", "--seconds", "1e30"], "'--seconds <SECONDS>': cannot convert"),
        (&["--aim", "calls", "--seconds", "86401"], "'--seconds <SECONDS>': expected at most 86400 seconds"),
    ] {
        let (status, out, errors) = crate::tool::rpcrdma("tune", arguments);
        assert_eq!((status, out.as_str()), (2, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{words:?} is not in: {errors}");
    }
}
