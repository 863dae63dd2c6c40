//! Sources of a configuration, their precedence, and errors.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use clap::Parser;
use rpcrdma::config::{AcceptConfig, Config, ConnectConfig};
use rpcrdma::{CreditMode, IdlePolicy, PagePolicy};
use rpcrdma_config::{ConfigArgs, Idle, Named, SettingError, Settings, to_toml};

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    config: ConfigArgs,
    /// An option of the program.
    #[arg(long)]
    own: bool,
}

fn temporary_file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("written");
    file
}

/// Returns the configuration of a server with these sources.
fn resolve(text: &str, variables: &[(&str, &str)], set: &[&str], options: &[&str]) -> Result<Config, SettingError> {
    let file = temporary_file(text);
    let path = file.path().to_str().expect("a path");
    let arguments = ["program", "--config", path].into_iter().chain(set.iter().flat_map(|text| ["--set", text]));
    let args = Program::parse_from(arguments).config;
    let variables = variables.iter().map(|&(name, value)| (name.into(), value.into()));
    args.load_with(variables)?.apply(&Config::default(), &AcceptConfig::default(), options).map(|(config, _)| config)
}

fn resolve_error(text: &str, variables: &[(&str, &str)], set: &[&str]) -> String {
    resolve(text, variables, set, &[]).expect_err("it is invalid").to_string()
}

#[test]
fn the_command_line_overrides_the_environment_which_overrides_the_file() {
    let text = "[memory]\nreceives = 1000\nsmall_buffers = 1000\nmessage_buffers = 1000\n";
    let variables = [("RPCRDMA_MEMORY_SMALL_BUFFERS", "2000"), ("RPCRDMA_MEMORY_MESSAGE_BUFFERS", "2000")];
    let config = resolve(text, &variables, &["memory.message_buffers=3000"], &[]).expect("a configuration");
    let memory = config.memory;
    assert_eq!((memory.receives, memory.small_buffers, memory.message_buffers), (1000, 2000, 3000));
    assert_eq!(memory.bulk_buffers, Config::default().memory.bulk_buffers, "the default");
}

#[test]
fn options_of_the_program_override_all_sources_but_set() {
    let text = "[limits]\ncredits = 8\nmax_credits = 8\n";
    let variables = [("RPCRDMA_LIMITS_CREDITS", "16")];
    let options = ["limits.credits", "limits.max_credits"];
    let limits = resolve(text, &variables, &["limits.max_credits=96"], &options).expect("a configuration").limits;
    assert_eq!((limits.credits, limits.max_credits), (64, 96));
}

#[test]
fn the_heading_covers_only_configuration_options() {
    let command = <Program as clap::CommandFactory>::command();
    let heading =
        |name| command.get_arguments().find(|option| option.get_id() == name).and_then(clap::Arg::get_help_heading);
    for name in ["config", "set", "print_config"] {
        assert_eq!(heading(name), Some("Configuration"), "{name}");
    }
    assert_eq!(heading("own"), None);
}

#[test]
fn values_are_parsed_in_their_readable_forms() {
    let set = [
        "poll.idle=event",
        "timeouts.progress=never",
        "timeouts.keep_alive=1m 30s",
        "wire.receive_size=8KiB",
        "wire.credit_mode=v2-incremental",
        "limits.max_read_bytes=1MiB",
        "memory.bulk_buffers=[[\"64KiB\", 4], [1048576, 2]]",
        "memory.pages={require=\"2MiB\"}",
        "device.name=mlx5_0",
        "iwarp.crc=always",
        "iwarp.busy_poll=50us",
    ];
    let config = resolve("", &[("RPCRDMA_FABRIC", "of others")], &set, &[]).expect("a configuration");
    assert_eq!(config.poll.idle, IdlePolicy::Event);
    assert_eq!((config.timeouts.progress, config.timeouts.keep_alive), (Duration::MAX, Duration::from_secs(90)));
    assert_eq!((config.wire.receive_size, config.wire.credit_mode), (8192, CreditMode::V2Incremental));
    assert_eq!(config.limits.max_read_bytes, Some(1 << 20));
    assert_eq!(config.memory.bulk_buffers, [(64 << 10, 4), (1 << 20, 2)]);
    assert_eq!(config.memory.pages, PagePolicy::Require(rpcrdma::PageSize::Huge2M));
    assert_eq!(config.device.name.as_deref(), Some("mlx5_0"));
    assert_eq!(config.iwarp.busy_poll, Some(Duration::from_micros(50)));
    for name in ["poll", "adaptive", "yield", "event"] {
        let idle = <Idle as clap::ValueEnum>::from_str(name, false).expect("a name");
        let from_set = resolve("", &[], &[&format!("poll.idle={name}")], &[]).expect("a configuration");
        let from_file = resolve(&format!("[poll]\nidle = \"{name}\"\n"), &[], &[], &[]).expect("a configuration");
        assert_eq!((from_set.poll.idle, from_file.poll.idle), (idle.policy(), idle.policy()), "{name}");
        assert_eq!(idle.name(), name);
    }
    let unset = resolve("[limits]\nmax_reads = 4\n", &[], &["limits.max_reads=unset"], &[]).expect("a configuration");
    assert_eq!(unset.limits.max_reads, None);
}

#[test]
fn the_printed_configuration_has_every_knob_and_reads_back() {
    let mut config = Config::default();
    config.limits.max_write_bytes = Some(3 << 20);
    config.timeouts.progress = Duration::MAX;
    config.poll.idle = IdlePolicy::Adaptive { spin: 77 };
    config.wire.receive_size = 5000;
    let connect = ConnectConfig { reconnect_attempts: 5, ..ConnectConfig::default() };
    let text = to_toml(&config, &connect);
    let path = temporary_file(&text);
    let args = ConfigArgs { config: Some(path.path().to_owned()), ..ConfigArgs::default() };
    let settings = args.load_with(std::iter::empty()).expect("a file");
    let (reread, connect) =
        settings.apply(&Config::default(), &ConnectConfig::default(), &[]).expect("what was printed");
    assert_eq!(to_toml(&reread, &connect), text);
    assert_eq!((reread.wire.receive_size, reread.poll.idle), (5000, IdlePolicy::Adaptive { spin: 77 }));
    assert_eq!(connect.reconnect_attempts, 5);
    let costs =
        ["receives = 4096 # 20709376 bytes per shard", "credits = 64 # 325000 bytes of the receives, per connection"];
    for line in ["max_reads = \"unset\"", "progress = \"never\"", "max_write_bytes = \"3MiB\""].into_iter().chain(costs)
    {
        assert!(text.lines().any(|printed| printed == line), "{line} is not in {text}");
    }
}

#[test]
fn a_budget_determines_numbers_that_are_not_set() {
    let config = resolve("[memory]\nbudget = \"64MiB\"\nmessage_buffers = 100\n", &[], &[], &[]).expect("it suffices");
    assert!(config.memory.receives > 4096 && config.memory.message_buffers == 100, "{:?}", config.memory);
    assert!((48 << 20..=64 << 20).contains(&config.memory_bytes()), "{}", config.memory_bytes());
    let error = resolve_error("[memory]\nbudget = \"1MiB\"\n", &[], &[]);
    assert!(
        error.contains(".tmp") && error.contains(": invalid memory.budget `1048576`: expected at least "),
        "{error}"
    );
    // The program states how many buffers it needs. A budget lowers these numbers if necessary, but never raises them.
    let program = |set: &str| {
        let mut needs = Config::default();
        (needs.memory.budget, needs.memory.bulk_buffers) = (64 << 20, vec![(1 << 20, 100)]);
        let args = ConfigArgs { set: vec![set.to_owned()], ..ConfigArgs::default() };
        let settings = args.load_with(std::iter::empty()).expect("a knob");
        settings.apply(&needs, &AcceptConfig::default(), &[]).map(|(config, _)| config.memory)
    };
    let memory = program("limits.credits=32").expect("fewer buffers suffice");
    assert_eq!((memory.receives, memory.small_buffers), (4096, 4096));
    assert!((30..45).contains(&memory.bulk_buffers[0].1), "{memory:?}");
    let memory = program("memory.budget=4GiB").expect("it suffices");
    assert_eq!((memory.receives, memory.bulk_buffers), (4096, vec![(1 << 20, 100)]));
    let error = program("memory.receives=65536").expect_err("the receives exceed the budget").to_string();
    assert!(error.contains("invalid memory.budget `67108864`: expected at least 2"), "{error}");
}

#[test]
fn a_renamed_knob_is_an_error_with_its_new_name() {
    let error = resolve_error("[poll]\nbatch = false\n", &[], &[]);
    assert!(error.ends_with(": knob poll.batch was renamed to debug.batch"), "{error}");
    let error = resolve_error("", &[("RPCRDMA_WIRE_REVISION", "cel09")], &[]);
    assert_eq!(error, "RPCRDMA_WIRE_REVISION: knob wire.revision was renamed to debug.revision");
    let error = resolve_error("", &[], &["iwarp.tos=3"]);
    assert_eq!(error, "--set: knob iwarp.tos was removed, because device.tos determines its value");
    assert!(!resolve("", &[], &["debug.batch=false"], &[]).expect("its name").debug.batch);
}

#[test]
fn servers_and_clients_share_a_file_and_the_environment() {
    let text = "[accept]\nsetup = \"7s\"\n[connect]\nreconnect_attempts = 3\n[limits]\ncredits = 99\n";
    let file = temporary_file(text);
    let args = ConfigArgs { config: Some(file.path().to_owned()), ..ConfigArgs::default() };
    let variables = [("RPCRDMA_CONNECT_TIMEOUT", "9s"), ("RPCRDMA_ACCEPT_EVICT_AFTER", "8s")];
    let variables = variables.iter().map(|&(name, value)| (name.into(), value.into()));
    let settings = args.load_with(variables).expect("a file");
    let (server, accept) = settings.apply(&Config::default(), &AcceptConfig::default(), &[]).expect("a server");
    let (client, connect) = settings.apply(&Config::default(), &ConnectConfig::default(), &[]).expect("a client");
    assert_eq!((accept.setup.as_secs(), accept.evict_after.as_secs()), (7, 8));
    assert_eq!((connect.reconnect_attempts, connect.timeout.as_secs()), (3, 9));
    assert_eq!((server.limits.credits, client.limits.credits), (99, 99));
    // An argument with a knob of the other role is an error.
    let error = resolve_error("", &[], &["connect.timeout=9s"]);
    assert!(error.starts_with("--set: unknown knob `connect.timeout`: knobs are in groups"), "{error}");
    let set = vec!["connect.timeout=9s".to_owned(), "limits.credits=5".to_owned()];
    let args = ConfigArgs { set, ..ConfigArgs::default() };
    assert_eq!(args.arguments::<AcceptConfig>(), ["--set=limits.credits=5"]);
}

#[test]
fn an_error_names_source_knob_and_value() {
    let error = resolve_error("[memory]\nreceive = 10\n", &[], &[]);
    assert!(error.contains(": unknown knob `memory.receive`: memory has budget, receives, small_buffers"), "{error}");
    let error = resolve_error("", &[("RPCRDMA_LIMITS_CREDIT", "10")], &[]);
    assert!(error.starts_with("RPCRDMA_LIMITS_CREDIT: unknown knob `limits.credit`: limits has credits"), "{error}");
    let error = resolve_error("", &[], &["receives=10"]);
    assert!(
        error.starts_with("--set: unknown knob `receives`: knobs are in groups, such as memory.receives: memory, lim"),
        "{error}"
    );
    let error = resolve_error("[accepts]\nsetup = \"1s\"\n", &[], &[]);
    assert!(error.contains(", iwarp") && error.contains(", accept") && error.ends_with(", connect"), "{error}");
    let error = resolve_error("", &[], &["accepts.setup=1s"]);
    assert!(error.contains(", accept") && !error.contains("connect"), "{error}");
    for (knob, value) in [("timeouts.keep_alive", "30"), ("iwarp.busy_poll", "50")] {
        let error = resolve_error("", &[], &[&format!("{knob}={value}")]);
        assert!(
            error.starts_with(&format!("--set: invalid {knob} `{value}`: expected a time such as \"10s\"")),
            "{error}"
        );
    }
    let error = resolve_error("", &[], &["accept.setup=soon"]);
    assert!(
        error.starts_with("--set: invalid accept.setup `soon`: expected a time such as \"10s\" or \"5ms\""),
        "{error}"
    );
    let error = resolve_error("", &[("RPCRDMA_WIRE_RECEIVE_SIZE", "-1k")], &[]);
    assert!(
        error.starts_with(
            "RPCRDMA_WIRE_RECEIVE_SIZE: invalid wire.receive_size `-1k`: expected a size such as \"64KiB\""
        ),
        "{error}"
    );
    let error = resolve_error("", &[], &["limits.max_reads=nan"]);
    assert!(error.starts_with("--set: invalid limits.max_reads `nan`: "), "{error}");
    let error = resolve_error("[limits]\nmax_reads = inf\n", &[], &[]);
    assert!(error.ends_with(": no knob accepts `nan` or `inf`"), "{error}");
    let error = resolve_error("", &[], &["memory.receives"]);
    assert!(error.contains("expected GROUP.KNOB=VALUE"), "{error}");
    let error = resolve_error("receives = 3\n", &[], &[]);
    assert!(error.contains("unknown knob `receives`: knobs are in groups"), "{error}");
    let error = resolve_error("[memory\n", &[], &[]);
    assert!(error.starts_with("--config ") && error.contains(": line 1: "), "{error}");
}

#[test]
fn knobs_of_the_program_can_be_taken_before_settings_are_applied() {
    let file = temporary_file("[server]\nshards = 2\ncores = [0, 2]\nstats = \"/run/stats\"\n[limits]\ncredits = 8\n");
    let mut settings = Settings::default();
    settings.read(file.path()).expect("a file");
    settings.set("a test", "server.shards", "3");
    let taken = ["shards", "cores", "stats", "workers"].map(|name| settings.take(&format!("server.{name}")));
    assert_eq!(taken, [Some("3"), Some("0,2"), Some("/run/stats"), None].map(|text| text.map(str::to_owned)));
    let (config, _) = settings.apply(&Config::default(), &AcceptConfig::default(), &[]).expect("only known knobs");
    assert_eq!(config.limits.credits, 8);
}

#[test]
fn a_value_of_several_lines_is_refused() {
    let error = resolve_error("", &[], &["limits.credits=8\n[limits]\nmax_calls = 1"]);
    assert!(error.contains("limits.credits"), "{error}");
}

#[test]
fn a_value_out_of_range_names_its_last_source() {
    let text = "[limits]\ncredits = 100\n[memory]\nreceives = 10\n";
    assert!(resolve_error(text, &[], &[]).ends_with(": invalid memory.receives `10`: expected 256 to 1048576"));
    let error = resolve_error(text, &[("RPCRDMA_MEMORY_RECEIVES", "20")], &[]);
    assert_eq!(error, "RPCRDMA_MEMORY_RECEIVES: invalid memory.receives `20`: expected 256 to 1048576");
    assert_eq!(
        resolve_error(text, &[("RPCRDMA_MEMORY_RECEIVES", "20")], &["memory.receives=2M"]),
        "--set: invalid memory.receives `2M`: expected a whole number; default 4096"
    );
}

#[test]
fn errors_about_values_state_the_form_and_the_default() {
    for (set, expected) in [
        ("memory.receives=unset", "expected a whole number; default 4096"),
        ("limits.max_reads=many", "expected a whole number, or unset (in a file: \"unset\"); default \"unset\""),
        ("device.service_level=300", "invalid device.service_level `300`: expected 0 to 15"),
        ("limits.credits=-1", "invalid limits.credits `-1`: expected 4 to 32767"),
        ("wire.receive_size=-1", "invalid wire.receive_size `-1`: expected 1024 to 1048576 bytes, a multiple of 4"),
        ("limits.credits=5000000000", "invalid limits.credits `5000000000`: expected 4 to 32767"),
        ("limits.max_deferred=4294967296", "expected a whole number, 0 to 4294967295; default 1024"),
        ("device.tos=256", "expected a whole number, 0 to 255, or unset (in a file: \"unset\"); default"),
        ("debug.prefault=maybe", "expected true or false; default true"),
        ("iwarp.crc=often", "expected one of `"),
        ("memory.bulk_buffers=[[1]]", "expected a value like the default; default [[\"64KiB\", 32], [\"1MiB\", 8]]"),
        ("memory.bulk_buffers=[[\"x\", 1]]", "expected a size such as \"64KiB\", or a number of bytes; default"),
        ("limits.max_reads=0", "at least 1, or unset for no limit (in a file: \"unset\")"),
    ] {
        let error = resolve_error("", &[], &[set]);
        assert!(error.contains(expected), "{error}");
    }
    let error = resolve_error("[limits]\nmax_reads = unset\n", &[], &[]);
    assert!(error.contains(": line 2: ") && error.ends_with(" (in a file: \"unset\")"), "{error}");
}

#[test]
fn errors_shorten_long_values_and_invalid_utf_8_is_refused() {
    let long = "x".repeat(1 << 20);
    let (value, knob) = (format!("memory.receives={long}"), format!("memory.{long}=1"));
    for set in [&value, &knob, &long] {
        let error = resolve_error("", &[], &[set]);
        assert!(error.len() < 1000 && error.contains("x… (1048"), "{error}");
    }
    for text in [format!("[memory]\nreceives = \"{long}\"\n"), format!("{long} = 1\n"), format!("[a]\nb = {long}\n")] {
        let error = resolve_error(&text, &[], &[]);
        assert!(error.len() < 1000, "{error}");
    }
    use std::os::unix::ffi::OsStringExt;
    let value = std::ffi::OsString::from_vec(vec![b'1', 0xFF]);
    let variables = [("RPCRDMA_MEMORY_RECEIVES".into(), value.clone()), ("RPCRDMA_FABRIC".into(), value)];
    let error = ConfigArgs::default().load_with(variables.into_iter()).expect_err("no text").to_string();
    assert_eq!(error, "RPCRDMA_MEMORY_RECEIVES: invalid memory.receives `1\u{FFFD}`: expected text in UTF-8");
}

#[test]
fn a_file_that_exceeds_the_limit_is_refused_with_its_size() {
    let long = temporary_file("");
    long.as_file().set_len(5 << 20).expect("a sparse file");
    for (path, size) in [(long.path(), "5242880"), (Path::new("/dev/zero"), "more than 4194304")] {
        let error = Settings::default().read(path).expect_err("too long").to_string();
        let path = path.display();
        assert_eq!(error, format!("--config {path}: file of {size} bytes exceeds limit 4194304"));
    }
}
