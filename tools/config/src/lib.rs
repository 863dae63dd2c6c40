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
//! [`program`] has what the `main` functions share.

#[cfg(feature = "clap")]
mod args;
#[cfg(feature = "clap")]
pub mod program;

#[cfg(feature = "clap")]
pub use args::{ConfigArgs, Named, given};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rpcrdma::IdlePolicy;
use rpcrdma::config::{AcceptConfig, Config, ConfigError, ConnectConfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Value of a knob without one.
const UNSET: &str = "unset";
/// Its form in files, for errors.
const UNSET_FORM: &str = "(in a file: \"unset\")";
/// Longest name or value in an error, in characters.
const SHOWN: usize = 64;

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
    let bad = |why: String| SettingError::File { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
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

/// All groups with all knobs.
fn groups_of<R: Role>(config: &Config, role: &R) -> Map<String, Value> {
    let Ok(Value::Object(mut groups)) = serde_json::to_value(config) else { unreachable!("it is a struct of structs") };
    if let Ok(group @ Value::Object(_)) = serde_json::to_value(role) {
        groups.insert(R::GROUP.to_owned(), group);
    }
    groups
}

/// All knobs of this name, as `group.knob`.
pub fn knobs_named(name: &str) -> Vec<String> {
    let mut groups = groups_of(&Config::default(), &ConnectConfig::default());
    groups.extend(groups_of(&Config::default(), &AcceptConfig::default()));
    let has = |knobs: &Value| knobs.as_object().is_some_and(|knobs| knobs.contains_key(name));
    groups.iter().filter(|(_, knobs)| has(knobs)).map(|(group, _)| format!("{group}.{name}")).collect()
}

/// The configurations of these groups.
fn read<R: Role>(mut groups: Map<String, Value>) -> Result<(Config, R), String> {
    let text = |error: serde_json::Error| error.to_string();
    let role = serde_json::from_value(groups.remove(R::GROUP).unwrap_or_default()).map_err(text)?;
    Ok((serde_json::from_value(Value::Object(groups)).map_err(text)?, role))
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no TOML of groups.
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
        let defaults = groups_of(config, role);
        let mut groups = defaults.clone();
        let mut sources: BTreeMap<&str, String> = options.iter().map(|&knob| (knob, "options".to_owned())).collect();
        let for_others = |setting: &&Setting| !setting.is_argument && is_of_other_role::<R>(&setting.knob);
        for setting in self.0.iter().filter(|setting| !for_others(setting)) {
            let own = !setting.is_argument && options.contains(&setting.knob.as_str());
            let before = own.then(|| groups.clone());
            setting.apply::<R>(&mut groups, &defaults)?;
            match before {
                Some(before) => groups = before,
                None => drop(sources.insert(&setting.knob, setting.source.clone())),
            }
        }
        let refused = |mut error: ConfigError| {
            if error.wanted.contains(UNSET) {
                error.wanted.to_mut().push_str(&format!(" {UNSET_FORM}"));
            }
            let source_ = sources.get(error.knob).map_or("defaults", String::as_str).to_owned();
            SettingError::Refused { source_, error }
        };
        let (mut made, role) = read::<R>(groups).map_err(|why| SettingError::Value {
            source_: "defaults".into(),
            knob: "config".into(),
            value: String::new(),
            why,
        })?;
        // Files cannot hold these.
        made.memory.arenas.clone_from(&config.memory.arenas);
        made.wire.host_auth.clone_from(&config.wire.host_auth);
        made.validate().map_err(refused)?;
        role.validate().map_err(refused)?;
        Ok((made, role))
    }
}

impl Setting {
    fn apply<R: Role>(
        &self,
        groups: &mut Map<String, Value>,
        defaults: &Map<String, Value>,
    ) -> Result<(), SettingError> {
        let unknown = |known| {
            let (source_, knob) = (self.source.clone(), short(&self.knob, SHOWN));
            SettingError::Unknown { source_, knob, known }
        };
        let outside = || {
            // Files may have the group of the other role, too.
            let roles = [AcceptConfig::GROUP, ConnectConfig::GROUP];
            let others = roles.into_iter().filter(|role| *role != R::GROUP && !self.is_argument);
            unknown(no_group(defaults.keys().map(String::as_str).chain(others)))
        };
        let (group, name) = self.knob.split_once('.').ok_or_else(outside)?;
        let knobs = groups.get(group).and_then(Value::as_object).ok_or_else(outside)?;
        if !knobs.contains_key(name) {
            let names: Vec<_> = knobs.keys().map(String::as_str).collect();
            return Err(unknown(format!("{group} has {}", names.join(", "))));
        }
        let mut why = String::new();
        for value in &self.values {
            let value = if value == UNSET { Value::Null } else { with_fields(&self.knob, value) };
            let before = groups[group][name].take();
            groups[group][name] = value;
            match read::<R>(groups.clone()) {
                Ok(_) => return Ok(()),
                // The first error is about the written type.
                Err(error) if why.is_empty() => why = error,
                Err(_) => {}
            }
            groups[group][name] = before;
        }
        groups[group][name] = Value::Null;
        let why = wanted(&why, &defaults[group][name], read::<R>(groups.clone()).is_ok());
        let value = self.values.last().map_or_else(String::new, |value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let value = short(&value, SHOWN);
        Err(SettingError::Value { source_: self.source.clone(), knob: self.knob.clone(), value, why })
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

/// The configuration as a file that `--config` takes, with every knob.
pub fn to_toml<R: Role>(config: &Config, role: &R) -> String {
    let mut text = String::new();
    for (group, knobs) in groups_of(config, role) {
        text += &format!("{}[{group}]\n", if text.is_empty() { "" } else { "\n" });
        for (knob, value) in knobs.as_object().into_iter().flatten() {
            text += &format!("{knob} = {}\n", to_text(value));
        }
    }
    text
}
