//! Knobs, their settings, and settings as code.

use std::collections::BTreeMap;
use std::fmt;

use super::{Aim, Args};

/// A field of `Config` or `ServerConfig` that can be tuned.
pub(super) struct Knob {
    /// Path to the field in `ServerConfig`.
    path: &'static str,
    pub(super) name: &'static str,
    /// Its option of `rpcperf`.
    pub(super) option: &'static str,
    /// Its value in `rpcperf` without the option. Empty if it depends on the load.
    default: &'static str,
    /// Its values. Empty if its values are numbers, whose limits `rpcperf` checks. If they are `on` and `off`, `option`
    /// takes no value, and sets `off`.
    words: &'static [&'static str],
    /// Whether the client alone cannot change it, because it belongs to the server or both ends must agree.
    pub(super) needs_server: bool,
}

/// All knobs, in the order in which settings list them.
pub(super) const KNOBS: &[Knob] = {
    macro_rules! knobs {
        ($($path:literal $name:literal $option:literal $default:literal $words:tt $needs_server:literal;)*) => {
            &[$(Knob {
                path: $path, name: $name, option: $option, default: $default, words: &$words, needs_server: $needs_server,
            }),*]
        };
    }
    knobs! {
        "shard.limits." "credits"         "--credits"         ""     []                            false;
        "shard.debug."  "batch"           "--no-batch"        "on"   ["on", "off"]                 false;
        "shard.debug."  "coalesce_grants" "--no-coalesce"     "on"   ["on", "off"]                 false;
        "shard.debug."  "signal_every"    "--signal-every"    "16"   []                            false;
        "shard.wire."   "receive_size"    "--inline"          "4096" []                            true;
        "shard.poll."   "idle"            "--idle"            "poll" ["poll", "adaptive", "event"] false;
        "shard.memory." "small_buffers"   "--small-buffers"   ""     []                            false;
        "shard.memory." "message_buffers" "--message-buffers" ""     []                            false;
        "shard.memory." "bulk_buffers"    "--bulk-buffers"    ""     []                            true;
        ""              "shards"          "--shards"          "1"    []                            true;
        ""              "workers"         "--workers"         "0"    []                            true;
    }
};

/// Values to try by default. They include a knob's default, because the settings at the start may differ from it.
const USUAL: &str = "credits=16,64,256 batch=on,off signal_every=1,16,64 idle=poll,adaptive,event \
                     message_buffers=256,2048 shards=1,2 workers=0,1,2";
const USUAL_FOR_CALLS: &str = "receive_size=4096,8192 small_buffers=512,4096";
const USUAL_FOR_BYTES: &str = "receive_size=4096,16384 bulk_buffers=64K:16+1M:4,64K:64+1M:16";

/// A knob and its new value.
pub(super) type Change = (&'static str, String);
/// The values of a knob to try.
pub(super) type Choice = Vec<Change>;

/// Parses `NAME=VALUE`. In the name, `-` stands for `_`, and `inline` for `receive_size`.
pub(super) fn parse_change(text: &str) -> Result<Change, String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, e.g. credits=64")?;
    let name = name.replace('-', "_").replace("inline", "receive_size");
    let names: Vec<&str> = KNOBS.iter().map(|knob| knob.name).collect();
    let unknown = || format!("unknown knob `{name}`: expected {}", names.join(", "));
    let knob = KNOBS.iter().find(|knob| knob.name == name).ok_or_else(unknown)?;
    // `rpcperf` checks the characters after the first digit, as in `1M:8`.
    let is_number = value.starts_with(|first: char| first.is_ascii_digit()) && !value.contains(',');
    let is_valid = if knob.words.is_empty() { is_number } else { knob.words.contains(&value) };
    let expected = if knob.words.is_empty() { "a number".to_owned() } else { knob.words.join(" or ") };
    if is_valid {
        Ok((knob.name, value.to_owned()))
    } else {
        Err(format!("invalid {name} `{value}`: expected {expected}"))
    }
}

/// Parses `NAME=VALUE,VALUE…`.
pub(super) fn parse_choice(text: &str) -> Result<Choice, String> {
    let (name, list) = text.split_once('=').ok_or("expected NAME=VALUE,VALUE…, e.g. credits=16,64,256")?;
    list.split(',').map(|value| parse_change(&format!("{name}={value}"))).collect()
}

/// Returns the values to try: those of `--knob`, or the usual values of the knobs that can be changed.
pub(super) fn choices(args: &Args) -> Vec<Choice> {
    let of_aim = if args.aim == Aim::Bytes { USUAL_FOR_BYTES } else { USUAL_FOR_CALLS };
    let usual = USUAL.split(' ').chain(of_aim.split(' ')).filter_map(|text| parse_choice(text).ok());
    let usual = usual.filter(|choice| choice.iter().all(|change| args.can_change(change)));
    if args.knobs.is_empty() { usual.collect() } else { args.knobs.clone() }
}

/// The values of all knobs. A value that depends on the load is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings(BTreeMap<&'static str, String>);

/// The defaults of `rpcperf`.
impl Default for Settings {
    fn default() -> Self {
        Self(KNOBS.iter().map(|knob| (knob.name, knob.default.to_owned())).collect())
    }
}

impl Settings {
    /// Returns these settings with a changed knob.
    pub(super) fn with(mut self, (knob, value): &Change) -> Self {
        self.0.insert(knob, value.clone());
        self
    }

    /// Returns the value of a knob.
    pub(super) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// Returns the values that differ from those of other settings.
    pub(super) fn changes(&self, from: &Self) -> Vec<Change> {
        let changed = KNOBS.iter().map(|knob| knob.name).filter(|name| self.get(name) != from.get(name));
        changed.map(|name| (name, self.get(name).to_owned())).collect()
    }

    /// Returns the options of `rpcperf` for these settings.
    pub(super) fn arguments(&self) -> Vec<String> {
        let set = KNOBS.iter().filter(|knob| self.get(knob.name) != knob.default);
        let words = set.flat_map(|knob| [knob.option.to_owned(), self.get(knob.name).replace('+', ",")]);
        // The option of a knob with the values `on` and `off` takes no value.
        words.filter(|word| word != "off").collect()
    }

    /// Returns Rust code that uses items of `rpcrdma` and `rpcrdma::server`.
    ///
    /// The first text is the configuration of a server. The second has changes to `shard` of a client's
    /// `ClientConfig::new`. `cores` has the client's core, then those of the shards and the workers. `credits` is the
    /// number in force if the settings have none, or empty if it is unknown.
    pub(super) fn code(&self, cores: &[usize], credits: &str) -> [String; 2] {
        let core_list = |first: usize, count: usize| {
            cores.get(first..first + count).map_or("None".to_owned(), |cores| format!("Some(vec!{cores:?})"))
        };
        let [shards, workers] = ["shards", "workers"].map(|name| self.get(name).parse::<u16>().map_or(0, usize::from));
        let mut server = "let mut server = ServerConfig::default();\n".to_owned();
        let mut client = cores.first().map_or_else(String::new, |core| format!("shard.poll.core = Some({core});\n"));
        for Knob { path, name, default, .. } in KNOBS {
            let value = match (*name, self.get(name)) {
                ("credits", "") if !credits.is_empty() => credits.to_owned(),
                // The default of `rpcperf` differs from that of `Config`.
                ("idle", "poll") => "IdlePolicy::Poll".to_owned(),
                (_, value) if value == *default => continue,
                ("idle", "event") => "IdlePolicy::Event".to_owned(),
                ("idle", _) => "IdlePolicy::default()".to_owned(),
                ("workers", count) => {
                    let cores = core_list(1 + shards, workers);
                    let fields = format!("count: {count}, cores: {cores}, idle: server.shard.poll.idle");
                    format!("Some(WorkerConfig {{ {fields}, ..WorkerConfig::default() }})")
                }
                ("bulk_buffers", list) => {
                    let classes = list.replace(':', ", ").replace('+', "), (");
                    format!("vec![({})]", classes.replace(['K', 'k'], " << 10").replace(['M', 'm'], " << 20"))
                }
                (_, value) => value.replace("off", "false"),
            };
            server += &format!("server.{path}{name} = {value};\n");
            if !path.is_empty() && *name != "bulk_buffers" {
                client += &format!("{path}{name} = {value};\n");
            }
        }
        [server + &format!("server.cores = {};\n", core_list(1, shards)), client]
    }
}

/// Formats changes as `NAME=VALUE`, separated by blanks, or as `default` if there are none.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changes = self.changes(&Self::default()).into_iter();
        let all: Vec<String> = changes.map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(if all.is_empty() { "default".to_owned() } else { all.join(" ") }.as_str())
    }
}
