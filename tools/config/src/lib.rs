//! Configuration of programs on `rpcrdma`: file, environment, command line.
//!
//! Precedence, lowest first: the program's defaults, `--config FILE` (TOML), the environment
//! (`RPCRDMA_MEMORY_RECEIVES=8192`), the program's own options, `--set memory.receives=8192`. Options that size buffers
//! set defaults. `--print-config` prints every knob in force, as a file for `--config`. Times are written as `"10s"`,
//! sizes as `"64KiB"` or a number of bytes. `"unset"` is no value.
//!
//! ```toml
//! [memory]
//! receives = 16384
//! bulk_buffers = [["64KiB", 128], ["1MiB", 16]]
//!
//! [timeouts]
//! progress = "30s"
//!
//! [poll]
//! idle = { adaptive = { spin = 5000 } }
//! ```
//!
//! A program flattens [`ConfigArgs`] into its options, loads the [`Settings`], and applies them to its defaults.
//! [`program`] has what the `main` functions share, [`secret_file`] the files of their keys.
#![warn(clippy::print_stderr)]

#[cfg(feature = "clap")]
mod args;
#[cfg(feature = "clap")]
mod host_key;
#[cfg(feature = "clap")]
pub mod program;
mod replaced;
#[cfg(feature = "secret_file")]
pub mod secret_file;

#[cfg(feature = "clap")]
pub use args::{ConfigArgs, Named, given};
#[cfg(feature = "clap")]
pub use host_key::{HOST_KEY_ID, HostKeyArgs};

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use rpcrdma::IdlePolicy;
use rpcrdma::config::{AcceptConfig, Config, ConfigError, ConnectConfig, MemoryConfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Value of a knob without one.
const UNSET: &str = "unset";
/// Its form in files, for errors.
const UNSET_FORM: &str = "(in a file: \"unset\")";
/// Longest name or value in an error, in characters.
const SHOWN: usize = 64;
/// Most bytes of a file.
const LONGEST: u64 = 4 << 20;

/// Knobs of a server or of a client.
pub trait Role: Serialize + DeserializeOwned {
    /// Name of the group.
    const GROUP: &str;

    /// Checks ranges.
    ///
    /// # Errors
    /// Names the knob and its bounds.
    fn validate(&self) -> Result<(), ConfigError>;
}

impl Role for AcceptConfig {
    const GROUP: &str = "accept";

    fn validate(&self) -> Result<(), ConfigError> {
        AcceptConfig::validate(self)
    }
}

impl Role for ConnectConfig {
    const GROUP: &str = "connect";

    fn validate(&self) -> Result<(), ConfigError> {
        ConnectConfig::validate(self)
    }
}

/// True for a knob of the other role.
fn is_of_other_role<R: Role>(knob: &str) -> bool {
    let group = knob.split('.').next().unwrap_or_default();
    group != R::GROUP && [ConnectConfig::GROUP, AcceptConfig::GROUP].contains(&group)
}

/// Idle policy by name: `--idle` of the programs, and the knob `poll.idle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Idle {
    /// Poll always; for dedicated cores, which are always busy
    Poll,
    /// Poll for a while, then sleep
    Adaptive,
    /// Yield the core for a while, then sleep; for cores shared with clients
    Yield,
    /// Sleep at once; each call pays for a wake-up
    Event,
}

impl Idle {
    /// Empty polls of [`Idle::Yield`] before it sleeps.
    pub const YIELDS: u32 = 16;

    /// The policy of this name.
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "poll" => Self::Poll,
            "adaptive" => Self::Adaptive,
            "yield" => Self::Yield,
            "event" => Self::Event,
            _ => return None,
        })
    }

    /// The policy with its default number of polls.
    pub fn policy(self) -> IdlePolicy {
        match self {
            Self::Poll => IdlePolicy::Poll,
            Self::Adaptive => IdlePolicy::default(),
            Self::Yield => IdlePolicy::Yield { times: Self::YIELDS },
            Self::Event => IdlePolicy::Event,
        }
    }
}

/// A knob with the readings of its text; the first valid one counts.
#[derive(Clone, Debug)]
struct Setting {
    /// The file, the variable, or `--set`.
    source: String,
    is_argument: bool,
    knob: String,
    values: Vec<Value>,
}

/// Settings of file, environment and `--set`, lowest precedence first.
#[derive(Clone, Debug, Default)]
pub struct Settings(Vec<Setting>);

/// Error in a configuration: source, knob, value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The file cannot be read.
    #[error("--config {}: {why}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What failed.
        why: String,
        /// The system's error number, if a system call failed.
        errno: Option<i32>,
    },
    /// The argument of `--set` has no value.
    #[error("--set {0}: wanted GROUP.KNOB=VALUE, such as memory.receives=8192")]
    NoValue(String),
    /// Unknown knob.
    #[error("{source_}: no knob {knob}: {known}")]
    Unknown {
        /// Its source.
        source_: String,
        /// Its name.
        knob: String,
        /// Known knobs.
        known: String,
    },
    /// A knob of an earlier version.
    #[error("{source_}: knob {knob} {became}")]
    Replaced {
        /// Its source.
        source_: String,
        /// Its name.
        knob: String,
        /// Its new name, or why it was removed.
        became: String,
    },
    /// Wrong type of value.
    #[error("{source_}: {knob} = {value}: {why}")]
    Value {
        /// Its source.
        source_: String,
        /// Its name.
        knob: String,
        /// Its value.
        value: String,
        /// Wanted value.
        why: String,
    },
    /// The value is out of range, or the configuration cannot work.
    #[error("{source_}: {error}")]
    Refused {
        /// Last source of the knob.
        source_: String,
        /// Knob, value and range.
        error: ConfigError,
    },
}

/// The knobs of a file.
fn file(path: &Path) -> Result<Vec<Setting>, SettingError> {
    let bad = |why: String| SettingError::File { path: path.to_owned(), why, errno: None };
    let unreadable = |error: std::io::Error| SettingError::File {
        path: path.to_owned(),
        why: error.to_string(),
        errno: error.raw_os_error(),
    };
    // One byte more tells a longer file from one of the limit. Pipes and devices have no length.
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(unreadable)?;
    let length = opened.metadata().map_err(unreadable)?.len();
    opened.take(LONGEST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > LONGEST {
        let size = if length > LONGEST { length.to_string() } else { format!("more than {LONGEST}") };
        return Err(bad(format!("a file of {size} bytes; a configuration has at most {LONGEST}")));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|&byte| byte == b'\n').count();
        bad(format!("line {line}: not UTF-8"))
    })?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
        let (line, why) = (before.matches('\n').count(), short(error.message(), 4 * SHOWN));
        let unset = text.lines().nth(line).is_some_and(|line| line.contains(UNSET));
        let hint = if unset { format!(" {UNSET_FORM}") } else { String::new() };
        bad(format!("line {}: {why}{hint}", line + 1))
    })?;
    if !table.values().all(is_finite) {
        return Err(bad("`nan` and `inf` are no values of any knob".to_owned()));
    }
    let mut all = Vec::new();
    for (group, knobs) in table {
        let source = path.display().to_string();
        let Ok(Value::Object(knobs)) = serde_json::to_value(knobs) else {
            return Err(SettingError::Unknown {
                source_: source,
                knob: short(&group, SHOWN),
                known: no_group(std::iter::empty()),
            });
        };
        for (knob, value) in knobs {
            let knob = format!("{group}.{knob}");
            all.push(Setting { source: source.clone(), is_argument: false, knob, values: vec![value] });
        }
    }
    Ok(all)
}

/// The text; if too long, its beginning and length.
fn short(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// A value in TOML.
fn to_text(value: &Value) -> String {
    let value = if value.is_null() { &Value::from(UNSET) } else { value };
    toml::Value::try_from(value).map_or_else(|error| error.to_string(), |value| value.to_string())
}

/// True if JSON, in which configurations are merged, can hold the value.
fn is_finite(value: &toml::Value) -> bool {
    match value {
        toml::Value::Float(number) => number.is_finite(),
        toml::Value::Array(values) => values.iter().all(is_finite),
        toml::Value::Table(table) => table.values().all(is_finite),
        _ => true,
    }
}

/// Readings of a variable or argument: TOML, then a string without quotes.
fn values(text: &str) -> Vec<Value> {
    let table: Option<toml::Table> = format!("value = {text}").parse().ok();
    // Lines that follow it would be lost.
    let value = table.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value")).filter(is_finite);
    let value = value.and_then(|value| serde_json::to_value(value).ok());
    value.into_iter().chain([Value::String(text.to_owned())]).collect()
}

/// Hint for a knob without a group, and these groups.
fn no_group<'a>(groups: impl Iterator<Item = &'a str>) -> String {
    let names = groups.collect::<Vec<_>>().join(", ");
    format!("knobs are in groups, as memory.receives{}{names}", if names.is_empty() { "" } else { ": " })
}

/// The groups of [`Config`] by name: their knobs, and their replacement.
macro_rules! groups {
    ($($group:ident),*) => {
        /// Names of the groups that every configuration has.
        const SHARED: &[&str] = &[$(stringify!($group)),*];

        /// The knobs of a group. `None` if there is no such group.
        fn knobs_of<R: Role>(config: &Config, role: &R, group: &str) -> Option<Map<String, Value>> {
            let knobs = match group {
                $(stringify!($group) => serde_json::to_value(&config.$group),)*
                _ if group == R::GROUP => serde_json::to_value(role),
                _ => return None,
            };
            match knobs {
                Ok(Value::Object(knobs)) => Some(knobs),
                _ => None,
            }
        }

        /// Replaces the knobs of a group. An error changes nothing.
        fn set_knobs<R: Role>(
            config: &mut Config,
            role: &mut R,
            group: &str,
            knobs: &Map<String, Value>,
        ) -> Result<(), serde_json::Error> {
            match group {
                $(stringify!($group) => config.$group = Deserialize::deserialize(knobs)?,)*
                _ => *role = Deserialize::deserialize(knobs)?,
            }
            Ok(())
        }
    };
}

groups!(memory, limits, timeouts, wire, device, iwarp, poll, debug);

/// All groups with all knobs.
fn groups_of<R: Role>(config: &Config, role: &R) -> Map<String, Value> {
    let knobs = |group: &str| Some((group.to_owned(), Value::Object(knobs_of(config, role, group)?)));
    SHARED.iter().copied().chain([R::GROUP]).filter_map(knobs).collect()
}

/// All knobs of this name, as `group.knob`.
pub fn knobs_named(name: &str) -> Vec<String> {
    static ALL: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
        let mut groups = groups_of(&Config::default(), &ConnectConfig::default());
        groups.extend(groups_of(&Config::default(), &AcceptConfig::default()));
        let names = |(group, knobs): (&String, &Value)| {
            let knobs = knobs.as_object().into_iter().flat_map(Map::keys);
            knobs.map(|knob| (knob.clone(), format!("{group}.{knob}"))).collect::<Vec<_>>()
        };
        groups.iter().flat_map(names).collect()
    });
    ALL.iter().filter(|(knob, _)| knob == name).map(|(_, full)| full.clone()).collect()
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, has more than 4 MiB, or is no TOML of groups.
    pub fn read(&mut self, path: &Path) -> Result<(), SettingError> {
        self.0.extend(file(path)?);
        Ok(())
    }

    /// Sets a knob, `group.knob`, as `text` says. `source` is for errors. It is checked when all are applied.
    pub fn set(&mut self, source: &str, knob: &str, text: &str) {
        let (source, knob, values) = (source.to_owned(), knob.to_owned(), values(text));
        self.0.push(Setting { source, is_argument: false, knob, values });
    }

    /// Takes out a knob that is not the library's: its last value as text, lists with commas.
    pub fn take(&mut self, knob: &str) -> Option<String> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let found = self.0.iter().rfind(|setting| setting.knob == knob)?.values.last()?;
        let taken = match found {
            Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
            other => text(other),
        };
        self.0.retain(|setting| setting.knob != knob);
        Some(taken)
    }

    /// Applies them to a program's defaults, and checks the result.
    ///
    /// `options` are the knobs that options of the program have set. They override file and environment, which may
    /// hold groups of the other role, too.
    ///
    /// # Errors
    /// Source, knob and value.
    pub fn apply<R: Role>(&self, config: &Config, role: &R, options: &[&str]) -> Result<(Config, R), SettingError> {
        let (mut made, mut made_role) = (config.clone(), read_again(role)?);
        let mut sources: BTreeMap<&str, String> = options.iter().map(|&knob| (knob, "options".to_owned())).collect();
        let for_others = |setting: &&Setting| !setting.is_argument && is_of_other_role::<R>(&setting.knob);
        for setting in self.0.iter().filter(|setting| !for_others(setting)) {
            let own = !setting.is_argument && options.contains(&setting.knob.as_str());
            if own {
                // Checked only.
                setting.apply(&mut made.clone(), &mut read_again(&made_role)?, (config, role))?;
            } else {
                setting.apply(&mut made, &mut made_role, (config, role))?;
                sources.insert(&setting.knob, setting.source.clone());
            }
        }
        // Files cannot hold these.
        made.memory.arenas.clone_from(&config.memory.arenas);
        made.wire.host_auth.clone_from(&config.wire.host_auth);
        let source_of = |knob: &str| sources.get(knob).map_or("defaults", String::as_str).to_owned();
        let refused = |error: ConfigError| SettingError::Refused { source_: source_of(error.knob), error };
        keep_to_budget(&mut made, config, |knob| sources.contains_key(knob)).map_err(refused)?;
        let (made, made_role) = validated(made, made_role, source_of)?;
        Ok((made.sized().map_err(refused)?, made_role))
    }

    /// Sets a knob as [`set`](Self::set) does, and applies it to a configuration that has the settings before it.
    ///
    /// It costs the same whatever was set before. On an error nothing has changed.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn set_applied<R: Role + Clone + Default>(
        &mut self,
        source: &str,
        knob: &str,
        text: &str,
        (config, role): (&mut Config, &mut R),
    ) -> Result<(), SettingError> {
        let (source, knob, values) = (source.to_owned(), knob.to_owned(), values(text));
        let setting = Setting { source, is_argument: false, knob, values };
        let (mut made, mut made_role, usual) = (config.clone(), role.clone(), Config::default());
        setting.apply(&mut made, &mut made_role, (&usual, &R::default()))?;
        let is_set = |knob: &str| knob == setting.knob || self.0.iter().any(|earlier| earlier.knob == knob);
        let refused = |error| SettingError::Refused { source_: setting.source.clone(), error };
        keep_to_budget(&mut made, &usual, is_set).map_err(refused)?;
        (*config, *role) = validated(made, made_role, |_| setting.source.clone())?;
        self.0.retain(|earlier| earlier.knob != setting.knob);
        self.0.push(setting);
        Ok(())
    }
}

/// Leaves numbers of buffers that are not set to the budget. If the defaults have none, these are all numbers. The
/// defaults of a program count as its needs: it has fewer buffers than these, beside its receives, if they exceed the
/// budget.
fn keep_to_budget(config: &mut Config, defaults: &Config, is_set: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    let (mut needs, all) = (config.memory.clone(), defaults.memory.budget == 0);
    if needs.budget == 0 && numbers(&mut config.memory).any(|(_, number)| *number == 0) {
        // An earlier budget may have determined these.
        let (memory, usual) = (&mut config.memory, &defaults.memory);
        restore(&mut memory.receives, &usual.receives, is_set("memory.receives"));
        restore(&mut memory.small_buffers, &usual.small_buffers, is_set("memory.small_buffers"));
        restore(&mut memory.message_buffers, &usual.message_buffers, is_set("memory.message_buffers"));
        restore(&mut memory.bulk_buffers, &usual.bulk_buffers, is_set("memory.bulk_buffers"));
        restore(&mut memory.long_buffers, &usual.long_buffers, is_set("memory.long_buffers"));
    }
    if needs.budget == 0 || !all && config.memory_bytes() <= needs.budget {
        return Ok(());
    }
    let derived = |knob: &str| (all || knob != "memory.receives") && !is_set(knob);
    numbers(&mut config.memory).filter(|(knob, _)| derived(knob)).for_each(|(_, number)| *number = 0);
    if all {
        return Ok(());
    }
    loop {
        // What gets as much as is needed leaves the rest to the others.
        let (mut sized, mut is_met) = (config.sized()?.memory, false);
        let each = numbers(&mut config.memory).zip(numbers(&mut sized)).zip(numbers(&mut needs));
        for (((_, number), (_, sized)), (_, need)) in each {
            if *number == 0 && *need > 0 && *sized >= *need {
                (*number, is_met) = (*need, true);
            }
        }
        if !is_met {
            config.memory = sized;
            return Ok(());
        }
    }
}

/// Gives a knob its default again, unless it is set.
fn restore<T: Clone>(knob: &mut T, usual: &T, is_set: bool) {
    if !is_set {
        knob.clone_from(usual);
    }
}

/// The numbers that a budget may determine, with their knobs.
fn numbers(memory: &mut MemoryConfig) -> impl Iterator<Item = (&'static str, &mut usize)> {
    let MemoryConfig { receives, small_buffers, message_buffers, bulk_buffers, long_buffers, .. } = memory;
    [
        ("memory.receives", receives),
        ("memory.small_buffers", small_buffers),
        ("memory.message_buffers", message_buffers),
    ]
    .into_iter()
    .chain(bulk_buffers.iter_mut().map(|(_, number)| ("memory.bulk_buffers", number)))
    .chain(long_buffers.iter_mut().map(|(_, number)| ("memory.long_buffers", number)))
}

/// A copy of a role's knobs.
fn read_again<R: Role>(role: &R) -> Result<R, SettingError> {
    let copy = serde_json::to_value(role).and_then(serde_json::from_value);
    copy.map_err(|error| SettingError::Value {
        source_: "defaults".into(),
        knob: R::GROUP.into(),
        value: String::new(),
        why: error.to_string(),
    })
}

/// A configuration, if it can work. `source_of` names the source of a knob.
fn validated<R: Role>(
    config: Config,
    role: R,
    source_of: impl Fn(&str) -> String,
) -> Result<(Config, R), SettingError> {
    let refused = |mut error: ConfigError| {
        if error.wanted.contains(UNSET) {
            error.wanted.to_mut().push_str(&format!(" {UNSET_FORM}"));
        }
        SettingError::Refused { source_: source_of(error.knob), error }
    };
    config.validate().map_err(refused)?;
    role.validate().map_err(refused)?;
    Ok((config, role))
}

impl Setting {
    /// Sets the knob in a configuration. `defaults` are for errors.
    fn apply<R: Role>(&self, config: &mut Config, role: &mut R, defaults: (&Config, &R)) -> Result<(), SettingError> {
        let unknown = |known| {
            let (source_, knob) = (self.source.clone(), short(&self.knob, SHOWN));
            SettingError::Unknown { source_, knob, known }
        };
        let outside = || {
            // Files may have the group of the other role, too.
            let groups = groups_of(defaults.0, defaults.1);
            let roles = [AcceptConfig::GROUP, ConnectConfig::GROUP];
            let others = roles.into_iter().filter(|role| *role != R::GROUP && !self.is_argument);
            unknown(no_group(groups.keys().map(String::as_str).chain(others)))
        };
        if let Some(became) = replaced::replacement(&self.knob) {
            return Err(SettingError::Replaced { source_: self.source.clone(), knob: self.knob.clone(), became });
        }
        let (group, name) = self.knob.split_once('.').ok_or_else(outside)?;
        let mut knobs = knobs_of(config, role, group).ok_or_else(outside)?;
        if !knobs.contains_key(name) {
            let names: Vec<_> = knobs.keys().map(String::as_str).collect();
            return Err(unknown(format!("{group} has {}", names.join(", "))));
        }
        let mut why = String::new();
        for value in &self.values {
            let value = if value == UNSET { Value::Null } else { with_fields(&self.knob, value) };
            knobs.insert(name.to_owned(), value);
            match set_knobs(config, role, group, &knobs) {
                Ok(()) => return Ok(()),
                // The first error is about the written type.
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        let default = knobs_of(defaults.0, defaults.1, group).and_then(|mut knobs| knobs.remove(name));
        let beyond = self.beyond_type(config, role, knobs.clone());
        knobs.insert(name.to_owned(), Value::Null);
        let optional = set_knobs(config, role, group, &knobs).is_ok();
        let mut why = wanted(&why, &default.unwrap_or_default(), optional);
        match beyond {
            Some(Ok(most)) if !why.contains(", 0 to ") => {
                why = why.replacen("a whole number", &format!("a whole number, 0 to {most}"), 1);
            }
            Some(Err(error)) => return Err(SettingError::Refused { source_: self.source.clone(), error }),
            _ => {}
        }
        let value = self.values.last().map_or_else(String::new, |value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let value = short(&value, SHOWN);
        Err(SettingError::Value { source_: self.source.clone(), knob: self.knob.clone(), value, why })
    }
}

impl Setting {
    /// For a whole number that the knob's type does not hold: the error with the range of the knob, or else the highest
    /// number of the type. `None` for any other value. `knobs` are those of the group.
    fn beyond_type<R: Role>(
        &self,
        config: &Config,
        role: &R,
        mut knobs: Map<String, Value>,
    ) -> Option<Result<u64, ConfigError>> {
        let text = self.values.last().map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))?;
        let digits = text.strip_prefix('-').unwrap_or(&text);
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let (group, name) = self.knob.split_once('.')?;
        // TOML has numbers up to that of i64.
        let highest = [i64::MAX as u64, u32::MAX.into(), u16::MAX.into(), u8::MAX.into()];
        let (mut config, mut role) = (config.clone(), read_again(role).ok()?);
        let most = highest.into_iter().find(|most| {
            knobs.insert(name.to_owned(), Value::from(*most));
            set_knobs(&mut config, &mut role, group, &knobs).is_ok()
        })?;
        if digits.len() < text.len() {
            knobs.insert(name.to_owned(), Value::from(0));
            set_knobs(&mut config, &mut role, group, &knobs).ok()?;
        }
        let refused = config.validate().and_then(|()| role.validate()).err();
        Some(match refused.filter(|error| error.knob == self.knob) {
            Some(mut error) => {
                error.value = short(&text, SHOWN);
                Err(error)
            }
            None => Ok(most),
        })
    }
}

/// The value; the plain name of an idle policy gets its default number of polls.
fn with_fields(knob: &str, value: &Value) -> Value {
    let name = value.as_str().filter(|_| knob == "poll.idle");
    let idle = name.and_then(Idle::named);
    idle.and_then(|idle| serde_json::to_value(idle.policy()).ok()).unwrap_or_else(|| value.clone())
}

/// Form and default of a knob, from the error about a value.
fn wanted(why: &str, default: &Value, optional: bool) -> String {
    let expected = why.rsplit_once(", expected ").map_or("", |(_, expected)| expected);
    let form = match expected {
        _ if why.starts_with("wanted ") => why.trim_start_matches("wanted "),
        choices if choices.contains('`') => choices,
        "u8" => "a whole number, 0 to 255",
        "u16" => "a whole number, 0 to 65535",
        "u32" | "u64" | "usize" => "a whole number",
        "a boolean" => "true or false",
        "a string" => "text in quotes",
        _ if default.as_array().is_some_and(Vec::is_empty) => "a list such as [[\"64KiB\", 32]]",
        _ => "a value like the default",
    };
    let unset = if optional { format!(", or {UNSET} {UNSET_FORM}") } else { String::new() };
    format!("wanted {form}{unset}; default {}", to_text(default))
}

/// The configuration as a file that `--config` takes, with every knob, and with the memory that it costs.
pub fn to_toml<R: Role>(config: &Config, role: &R) -> String {
    let mut text = String::from("# Knobs without a number of bytes take no memory.\n");
    let costs = config.costs();
    for (group, knobs) in groups_of(config, role) {
        text += &format!("\n[{group}]\n");
        for (knob, value) in knobs.as_object().into_iter().flatten() {
            let cost = costs.iter().find(|cost| cost.0.split_once('.') == Some((&group, knob)));
            let cost = cost.map_or_else(String::new, |(_, bytes, of)| format!(" # {bytes} bytes {of}"));
            text += &format!("{knob} = {}{cost}\n", to_text(value));
        }
    }
    text
}

/// A line about the memory that this many such shards are about to take.
///
/// Each of a client's `connections` has chunks of its own; a server has 0 of them.
pub fn memory_line(config: &Config, shards: usize, connections: usize) -> String {
    let MemoryConfig { budget, bulk_buffers, .. } = &config.memory;
    let exposed: usize = bulk_buffers.iter().map(|(size, count)| size.saturating_mul(*count)).sum();
    let more = exposed.saturating_mul(connections.saturating_sub(1));
    let total = config.memory_bytes().saturating_mul(shards).saturating_add(more);
    format!("memory: {total} bytes for {shards} shard(s) (memory.budget of each: {budget})")
}

/// Budget of a shard of the programs.
pub const BUDGET: usize = 1 << 30;
