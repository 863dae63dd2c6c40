//! `rpcrdma tune` as users run it, with a script as `rpcperf`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// Planted figures, so that no test depends on time: 64 credits are bad, and event loops worse. The script records its
/// runs in `runs` beside it, of which this one is the last. A last digit that differs from run to run is the noise.
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

/// A script that replaces `rpcperf`, in a directory of its own.
struct Fake {
    folder: TempDir,
}

impl Fake {
    fn new(body: &str) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let text = format!(
            "#!/bin/sh\ndir=${{0%/*}}\necho \"$@\" >>\"$dir/runs\"\nruns=0\n\
             while read -r _; do runs=$((runs + 1)); done <\"$dir/runs\"\n{body}\n"
        );
        let fake = Self { folder };
        fs::write(fake.path("rpcperf"), text).expect("a file");
        fs::set_permissions(fake.path("rpcperf"), fs::Permissions::from_mode(0o755)).expect("it is ours");
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arguments(&self, arguments: &[&str]) -> Vec<String> {
        let program = self.path("rpcperf").display().to_string();
        let words = ["--rpcperf", &program, "--aim", "calls", "--repeats", "2", "--pairs", "6"];
        words.iter().chain(arguments).map(|&word| word.to_owned()).collect()
    }

    /// Exit status, standard output, standard error.
    fn tune(&self, arguments: &[&str]) -> (i32, String, String) {
        let arguments = self.arguments(arguments);
        crate::tool::rpcrdma("tune", &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The command lines of its runs.
    fn runs(&self) -> Vec<String> {
        fs::read_to_string(self.path("runs")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

const KNOBS: &[&str] = &["--knob", "credits=16,256", "--knob", "batch=off", "--knob", "idle=adaptive,event"];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn the_planted_knob_is_found() {
    let fake = Fake::new(PLANTED);
    let file = fake.path("result.json");
    let result = file.to_str().expect("text");
    let (status, out, errors) = fake.tune(&[KNOBS, &["--json", result, "--", "-t", "8"]].concat());
    assert_eq!((status, errors.as_str()), (0, ""), "no progress where there is no terminal");
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
    let said = json(&fs::read_to_string(&file).expect("the result"));
    assert_eq!((&said["proven"], &said["best"]), (&true.into(), &"credits=256".into()));
    assert!(said["duel"]["interval"][0].as_f64() > Some(1.9) && said["duel"]["interval"][1].as_f64() < Some(2.1));
    assert_eq!(said["recommended"]["settings"], "credits=256");
    let failed: Vec<_> =
        said["candidates"].as_array().expect("an array").iter().filter(|one| !one["failed"].is_null()).collect();
    assert!(failed.len() == 1 && failed[0]["settings"] == "batch=off", "{said}");
    let runs = fake.runs();
    assert!(runs.iter().all(|line| line.starts_with("rate --loopback -D 0.5 -t 8 ") && line.ends_with("--json -")));
    assert_eq!(runs.iter().filter(|line| line.contains("--no-batch")).count(), 2, "what has failed twice is out");
}

#[test]
fn standard_output_is_json_alone() {
    let fake = Fake::new(PLANTED);
    let (status, out, _) = fake.tune(&["--knob", "idle=event", "--json", "-"]);
    let said = json(&out);
    assert_eq!((status, &said["proven"], &said["best"]), (0, &false.into(), &"default".into()));
    assert_eq!((&said["duel"], &said["recommended"]["settings"]), (&Value::Null, &"default".into()));
}

#[test]
fn json_goes_to_devices_and_pipes() {
    let fake = Fake::new(PLANTED);
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

/// A failure at the end leaves the text. One at the start leaves no run behind.
#[test]
fn json_that_cannot_be_written_is_named() {
    let fake = Fake::new(PLANTED);
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--json", "/dev/full"]);
    let says = "rpcrdma: --json /dev/full: No space left on device (os error 28); name another file\n";
    assert_eq!((status, errors.as_str()), (1, says));
    assert!(out.contains("recommended: default"), "{out}");
    let fake = Fake::new(PLANTED);
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--json", "/nowhere/result"]);
    assert_eq!((status, out.as_str(), fake.runs().len()), (1, "", 0));
    assert!(errors.contains("--json /nowhere/result: No such file or directory"), "{errors}");
}

#[test]
fn interrupted_system_calls_are_resumed() {
    // Without noise: the repeated run must equal the original.
    let planted = PLANTED.replace("runs % 7", "0");
    let whole = Fake::new(&planted);
    let (_, expected, _) = whole.tune(KNOBS);
    let all = whole.runs().len();

    // The ninth run announces itself and waits for an interrupt, with a child. Both hold the pipe open.
    let waits = "if [ -p \"$dir/there\" ] && [ $runs = 9 ]; then\n\
                 exec 3>\"$dir/there\"; echo there >&3; sleep 600 & wait; echo late >&3; fi\n";
    let fake = Fake::new(&format!("{waits}{planted}"));
    let made = Command::new("mkfifo").arg(fake.path("there")).status().expect("mkfifo");
    assert!(made.success());
    let state = fake.path("state").display().to_string();
    let result = fake.path("result.json").display().to_string();
    let arguments = fake.arguments(&[KNOBS, &["--state", &state, "--json", &result]].concat());
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
    assert!(errors.contains(&format!("interrupted; 8 runs are kept in {state}: the same command goes on")), "{errors}");
    let said = json(&fs::read_to_string(&result).expect("the result"));
    assert!(said["error"].as_str().is_some_and(|error| error.starts_with("interrupted; 8 runs are kept")), "{said}");
    // At the end of the pipe no process holds it open.
    let rest = there.read_to_string(&mut line).map(|_| line);
    assert_eq!(rest.expect("text"), "there\n", "a run outlives its tuning");

    fs::remove_file(fake.path("there")).expect("it is there");
    let (status, out, errors) = fake.tune(&[KNOBS, &["--state", &state]].concat());
    assert_eq!((status, errors.as_str()), (0, ""));
    assert_eq!(fake.runs().len(), all + 1, "only the run that was interrupted is made again");
    assert_eq!(out, expected);
    // All runs are known by now.
    assert_eq!(fake.tune(&[KNOBS, &["--state", &state]].concat()).1, out);
    assert_eq!(fake.runs().len(), all + 1);

    let (status, out, errors) = fake.tune(&["--knob", "credits=16", "--state", &state]);
    assert_eq!((status, out.as_str()), (1, ""));
    assert!(errors.contains("it is not of these options"), "{errors}");
}

#[test]
fn a_terminal_shows_how_far_it_is() {
    if !crate::patience::has("tmux") {
        return;
    }
    // From the third run on, each waits for its release.
    let holds = "while [ $runs -ge 3 ] && [ -e \"$dir/held\" ]; do sleep 0.05; done\n";
    let fake = Fake::new(&format!("{holds}{PLANTED}"));
    fs::write(fake.path("held"), "").expect("a file");
    let words = fake.arguments(KNOBS).join(" ");
    let command = format!("{} tune {words}; read end", env!("CARGO_BIN_EXE_rpcrdma"));
    let mut terminal = crate::terminal::Terminal::open(fake.folder.path(), (120, 40), &command);
    let is_third = |screen: &str| screen.lines().any(|line| line.contains(" 2 runs, "));
    assert!(terminal.shows(is_third), "{}", terminal.seen);
    // A narrow terminal shows the start of the line.
    terminal.tmux(&["resize-window", "-t", "t", "-x", "40", "-y", "40"]);
    assert!(terminal.shows(is_third), "{}", terminal.seen);
    terminal.tmux(&["resize-window", "-t", "t", "-x", "120", "-y", "40"]);
    fs::remove_file(fake.path("held")).expect("it is there");
    // At the end the line is gone, and the result is there.
    let is_over = |screen: &str| screen.contains("recommended: credits=256") && !screen.contains(" runs, ");
    assert!(terminal.shows(is_over), "{}", terminal.seen);
    terminal.key("Enter");
    assert!(terminal.ends());
}

#[test]
fn a_run_that_hangs_is_a_candidate_that_failed() {
    let fake = Fake::new(&format!("case \"$*\" in *event*) sleep 600;; esac\n{PLANTED}"));
    let (status, out, errors) = fake.tune(&["--knob", "idle=event", "--limit", "5"]);
    assert_eq!((status, errors.as_str()), (0, ""));
    assert!(out.contains("idle=event: no end after 5 s, which --limit allows\n"), "{out}");
}

#[test]
fn a_start_that_fails_ends_it() {
    for (body, words) in [
        ("echo 'rpcperf: no such core' >&2; exit 2", "(default): no such core\n"),
        ("exit 3", "the start does not run (default): it ended with exit status: 3, and said nothing"),
        ("echo '{}'", "no figure for calls"),
        ("echo hello", "no JSON"),
    ] {
        let fake = Fake::new(body);
        let (status, out, errors) = fake.tune(KNOBS);
        assert_eq!((status, out.as_str()), (1, ""));
        assert!(errors.contains(words), "{words:?} is not in: {errors}");
    }
    let nowhere = ["--aim", "calls", "--rpcperf", "/nowhere/at/all"];
    let (status, _, errors) = crate::tool::rpcrdma("tune", &nowhere);
    assert!(status == 1 && errors.contains("cargo build --release -p rpcrdma-bench"), "{errors}");
    let (status, _, errors) = crate::tool::rpcrdma("tune", &["--aim", "calls", "--rpcperf", "/bin/true"]);
    assert!(status == 1 && errors.contains("what it has written is no JSON"), "{errors}");
}

#[test]
fn wrong_usage_is_explained() {
    for (arguments, words) in [
        (&[][..], "--aim"),
        (&["--aim", "speed"], "possible values: calls, bytes, p99, cpu"),
        (&["--aim", "p99"], "--rate"),
        (&["--aim", "calls", "--rate", "5"], "--rate: with --aim calls"),
        (&["--aim", "calls", "--knob", "credits=many"], "credits=many: wanted a number"),
        (&["--aim", "calls", "--start", "credits=4,8"], "credits=4,8: wanted a number"),
        (&["--aim", "calls", "--knob", "speed=1"], "there are credits, batch,"),
        (&["--aim", "calls", "--start", "batch=maybe"], "batch=maybe: wanted on or off"),
        (&["--aim", "calls", "--cores", "8191"], "8191 is none of the cores"),
        (&["--aim", "calls", "--cores", "x"], "\"x\" is no core"),
        (&["--aim", "calls", "--remote"], "<ADDRESS>"),
        (&["--aim", "calls", "--remote", "soft:x", "--knob", "workers=1"], "workers: with --remote"),
        (&["--aim", "calls", "--pairs", "5"], "6..=200"),
        (&["--aim", "calls", "tcp:x"], "tcp:x"),
        (&["--aim", "calls", "--limit", "0"], "'--limit <SECONDS>': wanted more than 0 seconds"),
        (&["--aim", "calls", "--seconds", "1e30"], "'--seconds <SECONDS>': cannot convert"),
        (&["--aim", "calls", "--seconds", "86401"], "'--seconds <SECONDS>': more than 86400 seconds"),
    ] {
        let (status, out, errors) = crate::tool::rpcrdma("tune", arguments);
        assert_eq!((status, out.as_str()), (2, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{words:?} is not in: {errors}");
    }
}
