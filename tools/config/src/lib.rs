//! Configuration of programs on `rpcrdma`: file, environment, command line.
//!
//! Precedence, lowest first: the program's defaults, `--config FILE` (TOML), the environment
//! (`RPCRDMA_MEMORY_RECEIVES=8192`), the program's own options, `--set memory.receives=8192`. Options that size buffers
//! set defaults. `--print-config` prints every knob in force, as a file for `--config`. Times are written as `"10s"`,
//! sizes as `"64KiB"` or a number of bytes. `"unset"` stands for no value.
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
//! [`program`] has the common parts of the `main` functions, and [`secret_file`] handles the files of their keys.
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

/// Text for a knob without a value.
const UNSET: &str = "unset";
/// Form of [`UNSET`] in files, for errors.
const UNSET_FORM: &str = "(in a file: \"unset\")";
/// Longest name or value in an error, in characters.
const MAX_SHOWN: usize = 64;
/// Longest configuration file, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// The group of knobs that only servers, or only clients, have.
pub trait Role: Serialize + DeserializeOwned {
    /// Name of the group.
    const GROUP: &str;

    /// Checks the ranges of the knobs.
    ///
    /// # Errors
    /// A knob is out of range. The error names the knob and its bounds.
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

/// Whether a knob belongs to the other role.
fn is_of_other_role<R: Role>(knob: &str) -> bool {
    let group = knob.split('.').next().unwrap_or_default();
    group != R::GROUP && [ConnectConfig::GROUP, AcceptConfig::GROUP].contains(&group)
}

/// Idle policy by name: `--idle` of the programs, and the knob `poll.idle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Idle {
    /// Poll always; for dedicated cores, which it keeps busy
    Poll,
    /// Poll for a while, then sleep
    Adaptive,
    /// Yield the core for a while, then sleep; for cores shared with clients
    Yield,
    /// Sleep immediately; each call costs a wake-up
    Event,
}

impl Idle {
    /// Empty polls of [`Idle::Yield`] before it sleeps.
    pub const YIELDS: u32 = 16;

    /// Returns the policy with this name.
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "poll" => Self::Poll,
            "adaptive" => Self::Adaptive,
            "yield" => Self::Yield,
            "event" => Self::Event,
            _ => return None,
        })
    }

    /// Returns the policy with its default number of polls.
    pub fn policy(self) -> IdlePolicy {
        match self {
            Self::Poll => IdlePolicy::Poll,
            Self::Adaptive => IdlePolicy::default(),
            Self::Yield => IdlePolicy::Yield { times: Self::YIELDS },
            Self::Event => IdlePolicy::Event,
        }
    }
}

/// A knob and its possible values. Text can be read in several ways, and the first valid value is used.
#[derive(Clone, Debug)]
struct Setting {
    /// The file, the variable, or `--set`.
    source: String,
    /// Whether the source is `--set`.
    is_argument: bool,
    knob: String,
    values: Vec<Value>,
}

/// Settings from file, environment and `--set`, in ascending order of precedence.
#[derive(Clone, Debug, Default)]
pub struct Settings(Vec<Setting>);

/// Error in a configuration. It names source, knob and value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The file cannot be read.
    #[error("--config {}: {why}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What failed.
        why: String,
        /// The system's error number, if a system call failed.
        errno: Option<i32>,
    },
    /// The argument of `--set` has no value.
    #[error("invalid --set `{0}`: expected GROUP.KNOB=VALUE, such as memory.receives=8192")]
    NoValue(String),
    /// There is no such knob.
    #[error("{source_}: unknown knob `{knob}`: {known}")]
    Unknown {
        /// Source of the setting.
        source_: String,
        /// Name of the knob.
        knob: String,
        /// The known knobs or groups.
        known: String,
    },
    /// The knob was renamed or removed in an earlier version.
    #[error("{source_}: knob {knob} {became}")]
    Replaced {
        /// Source of the setting.
        source_: String,
        /// Name of the knob.
        knob: String,
        /// The knob's new name, or why it was removed.
        became: String,
    },
    /// The value has the wrong type.
    #[error("{source_}: invalid {knob} `{value}`: {why}")]
    Value {
        /// Source of the setting.
        source_: String,
        /// Name of the knob.
        knob: String,
        /// The value as written.
        value: String,
        /// The expected form, and the default.
        why: String,
    },
    /// The value is out of range, or knobs conflict.
    #[error("{source_}: {error}")]
    Refused {
        /// The last source that set the knob.
        source_: String,
        /// The knob, its value and range.
        error: ConfigError,
    },
}

/// Reads the knobs of a file.
fn read_file(path: &Path) -> Result<Vec<Setting>, SettingError> {
    let invalid = |why: String| SettingError::File { path: path.to_owned(), why, errno: None };
    let unreadable = |error: std::io::Error| SettingError::File {
        path: path.to_owned(),
        why: error.to_string(),
        errno: error.raw_os_error(),
    };
    // One byte more than the limit is read to detect a longer file, because pipes and devices have no length.
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(unreadable)?;
    let length = opened.metadata().map_err(unreadable)?.len();
    opened.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE {
        let size = if length > MAX_FILE { length.to_string() } else { format!("more than {MAX_FILE}") };
        return Err(invalid(format!("file of {size} bytes exceeds limit {MAX_FILE}")));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|&byte| byte == b'\n').count();
        invalid(format!("line {line}: not UTF-8"))
    })?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
        let (line, why) = (before.matches('\n').count(), shorten(error.message(), 4 * MAX_SHOWN));
        let unset = text.lines().nth(line).is_some_and(|line| line.contains(UNSET));
        let hint = if unset { format!(" {UNSET_FORM}") } else { String::new() };
        invalid(format!("line {}: {why}{hint}", line + 1))
    })?;
    if !table.values().all(is_finite) {
        return Err(invalid("no knob accepts `nan` or `inf`".to_owned()));
    }
    let mut all = Vec::new();
    for (group, knobs) in table {
        let source = path.display().to_string();
        let Ok(Value::Object(knobs)) = serde_json::to_value(knobs) else {
            return Err(SettingError::Unknown {
                source_: source,
                knob: shorten(&group, MAX_SHOWN),
                known: group_hint(std::iter::empty()),
            });
        };
        for (knob, value) in knobs {
            let knob = format!("{group}.{knob}");
            all.push(Setting { source: source.clone(), is_argument: false, knob, values: vec![value] });
        }
    }
    Ok(all)
}

/// Returns the text, or if it is too long, its beginning and length.
fn shorten(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Returns a value in TOML.
fn to_text(value: &Value) -> String {
    let value = if value.is_null() { &Value::from(UNSET) } else { value };
    toml::Value::try_from(value).map_or_else(|error| error.to_string(), |value| value.to_string())
}

/// Whether JSON, in which configurations are merged, can represent the value.
fn is_finite(value: &toml::Value) -> bool {
    match value {
        toml::Value::Float(number) => number.is_finite(),
        toml::Value::Array(values) => values.iter().all(is_finite),
        toml::Value::Table(table) => table.values().all(is_finite),
        _ => true,
    }
}

/// Returns the values that the text of a variable or argument may have: as TOML, then as a string without quotes.
fn parse_values(text: &str) -> Vec<Value> {
    let table: Option<toml::Table> = format!("value = {text}").parse().ok();
    // Further lines would be ignored, so they make the text invalid TOML.
    let value = table.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value")).filter(is_finite);
    let value = value.and_then(|value| serde_json::to_value(value).ok());
    value.into_iter().chain([Value::String(text.to_owned())]).collect()
}

/// Returns a hint for a knob without a valid group, with these groups.
fn group_hint<'a>(groups: impl Iterator<Item = &'a str>) -> String {
    let names = groups.collect::<Vec<_>>().join(", ");
    format!("knobs are in groups, such as memory.receives{}{names}", if names.is_empty() { "" } else { ": " })
}

/// Defines how the groups of [`Config`] are read and replaced by name.
macro_rules! groups {
    ($($group:ident),*) => {
        /// Names of the groups that every configuration has.
        const SHARED: &[&str] = &[$(stringify!($group)),*];

        /// Returns the knobs of a group, or `None` if there is no such group.
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

        /// Replaces the knobs of a group. On an error nothing has changed.
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

/// Returns all groups with all their knobs.
fn groups_of<R: Role>(config: &Config, role: &R) -> Map<String, Value> {
    let knobs = |group: &str| Some((group.to_owned(), Value::Object(knobs_of(config, role, group)?)));
    SHARED.iter().copied().chain([R::GROUP]).filter_map(knobs).collect()
}

/// Returns all knobs of this name, as `group.knob`.
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
    /// The file cannot be read, exceeds 4 MiB, or is not TOML with a table per group.
    pub fn read(&mut self, path: &Path) -> Result<(), SettingError> {
        self.0.extend(read_file(path)?);
        Ok(())
    }

    /// Sets the knob `group.knob` to the value in `text`. [`apply`](Self::apply) checks it. `source` is for errors.
    pub fn set(&mut self, source: &str, knob: &str, text: &str) {
        let (source, knob, values) = (source.to_owned(), knob.to_owned(), parse_values(text));
        self.0.push(Setting { source, is_argument: false, knob, values });
    }

    /// Removes a knob of the program and returns its last value as text. Elements of a list are separated by commas.
    pub fn take(&mut self, knob: &str) -> Option<String> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let last = self.0.iter().rfind(|setting| setting.knob == knob)?.values.last()?;
        let value = match last {
            Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
            other => text(other),
        };
        self.0.retain(|setting| setting.knob != knob);
        Some(value)
    }

    /// Applies the settings to a program's defaults, and checks the result.
    ///
    /// `options` are the knobs that options of the program have set in the defaults. They override file and
    /// environment, which may contain the group of the other role, too.
    ///
    /// # Errors
    /// A knob is unknown, a value is invalid, or knobs conflict.
    pub fn apply<R: Role>(&self, config: &Config, role: &R, options: &[&str]) -> Result<(Config, R), SettingError> {
        let (mut merged, mut merged_role) = (config.clone(), copy_role(role)?);
        let mut sources: BTreeMap<&str, String> = options.iter().map(|&knob| (knob, "options".to_owned())).collect();
        let is_for_other_role = |setting: &&Setting| !setting.is_argument && is_of_other_role::<R>(&setting.knob);
        for setting in self.0.iter().filter(|setting| !is_for_other_role(setting)) {
            let is_overridden = !setting.is_argument && options.contains(&setting.knob.as_str());
            if is_overridden {
                // The setting is checked, but has no effect.
                setting.apply(&mut merged.clone(), &mut copy_role(&merged_role)?, (config, role))?;
            } else {
                setting.apply(&mut merged, &mut merged_role, (config, role))?;
                sources.insert(&setting.knob, setting.source.clone());
            }
        }
        keep_unnamed(&mut merged, config);
        let source_of = |knob: &str| sources.get(knob).map_or("defaults", String::as_str).to_owned();
        let refused = |error: ConfigError| SettingError::Refused { source_: source_of(error.knob), error };
        apply_budget(&mut merged, config, |knob| sources.contains_key(knob)).map_err(refused)?;
        let (merged, merged_role) = check_ranges(merged, merged_role, source_of)?;
        Ok((merged.sized().map_err(refused)?, merged_role))
    }

    /// Sets a knob and applies it to a configuration that already has all earlier settings.
    ///
    /// The cost does not grow with the number of earlier settings. On an error nothing has changed.
    ///
    /// # Errors
    /// Those of [`apply`](Self::apply).
    pub fn set_applied<R: Role + Clone + Default>(
        &mut self,
        source: &str,
        knob: &str,
        text: &str,
        (config, role): (&mut Config, &mut R),
    ) -> Result<(), SettingError> {
        let (source, knob, values) = (source.to_owned(), knob.to_owned(), parse_values(text));
        let setting = Setting { source, is_argument: false, knob, values };
        let (mut merged, mut merged_role, defaults) = (config.clone(), role.clone(), Config::default());
        setting.apply(&mut merged, &mut merged_role, (&defaults, &R::default()))?;
        keep_unnamed(&mut merged, config);
        let is_set = |knob: &str| knob == setting.knob || self.0.iter().any(|earlier| earlier.knob == knob);
        let refused = |error| SettingError::Refused { source_: setting.source.clone(), error };
        apply_budget(&mut merged, &defaults, is_set).map_err(refused)?;
        (*config, *role) = check_ranges(merged, merged_role, |_| setting.source.clone())?;
        self.0.retain(|earlier| earlier.knob != setting.knob);
        self.0.push(setting);
        Ok(())
    }
}

/// Copies the knobs that no setting can name, because a setting resets all such knobs of its group.
fn keep_unnamed(merged: &mut Config, before: &Config) {
    merged.memory.arenas.clone_from(&before.memory.arenas);
    merged.wire.host_auth.clone_from(&before.wire.host_auth);
}

/// Sets the numbers of buffers that no setting determines to 0, so that the budget determines them.
///
/// If the defaults have no budget, the budget determines all these numbers. Otherwise the defaults state what the
/// program needs. If its needs exceed the budget, the program gets fewer buffers than it needs, but not fewer receives.
fn apply_budget(config: &mut Config, defaults: &Config, is_set: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    let (mut needs, determines_all) = (config.memory.clone(), defaults.memory.budget == 0);
    if needs.budget == 0 && buffer_counts(&mut config.memory).any(|(_, number)| *number == 0) {
        // An earlier budget may have set these numbers to 0.
        let (memory, defaults) = (&mut config.memory, &defaults.memory);
        restore(&mut memory.receives, &defaults.receives, is_set("memory.receives"));
        restore(&mut memory.small_buffers, &defaults.small_buffers, is_set("memory.small_buffers"));
        restore(&mut memory.message_buffers, &defaults.message_buffers, is_set("memory.message_buffers"));
        restore(&mut memory.bulk_buffers, &defaults.bulk_buffers, is_set("memory.bulk_buffers"));
        restore(&mut memory.long_buffers, &defaults.long_buffers, is_set("memory.long_buffers"));
    }
    if needs.budget == 0 || !determines_all && config.memory_bytes() <= needs.budget {
        return Ok(());
    }
    let is_derived = |knob: &str| (determines_all || knob != "memory.receives") && !is_set(knob);
    buffer_counts(&mut config.memory).filter(|(knob, _)| is_derived(knob)).for_each(|(_, number)| *number = 0);
    if determines_all {
        return Ok(());
    }
    loop {
        // A number whose need is met is fixed at the need, so that the rest of the budget goes to the others.
        let (mut sized, mut is_met) = (config.sized()?.memory, false);
        let each = buffer_counts(&mut config.memory).zip(buffer_counts(&mut sized)).zip(buffer_counts(&mut needs));
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

/// Resets a knob to its default, unless it is set.
fn restore<T: Clone>(knob: &mut T, default: &T, is_set: bool) {
    if !is_set {
        knob.clone_from(default);
    }
}

/// Returns the numbers of buffers that a budget may determine, with their knobs.
fn buffer_counts(memory: &mut MemoryConfig) -> impl Iterator<Item = (&'static str, &mut usize)> {
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

/// Copies a role's knobs. `R` need not be `Clone`.
fn copy_role<R: Role>(role: &R) -> Result<R, SettingError> {
    let copy = serde_json::to_value(role).and_then(serde_json::from_value);
    copy.map_err(|error| SettingError::Value {
        source_: "defaults".into(),
        knob: R::GROUP.into(),
        value: String::new(),
        why: error.to_string(),
    })
}

/// Checks a configuration and returns it. `source_of` returns the source of a knob.
fn check_ranges<R: Role>(
    config: Config,
    role: R,
    source_of: impl Fn(&str) -> String,
) -> Result<(Config, R), SettingError> {
    let refused = |mut error: ConfigError| {
        if error.expected.contains(UNSET) {
            error.expected.to_mut().push_str(&format!(" {UNSET_FORM}"));
        }
        SettingError::Refused { source_: source_of(error.knob), error }
    };
    config.validate().map_err(refused)?;
    role.validate().map_err(refused)?;
    Ok((config, role))
}

impl Setting {
    /// Sets the knob in a configuration. `defaults` are used in errors.
    fn apply<R: Role>(&self, config: &mut Config, role: &mut R, defaults: (&Config, &R)) -> Result<(), SettingError> {
        let unknown = |known| {
            let (source_, knob) = (self.source.clone(), shorten(&self.knob, MAX_SHOWN));
            SettingError::Unknown { source_, knob, known }
        };
        let unknown_group = || {
            // Files and environment may also have the group of the other role.
            let groups = groups_of(defaults.0, defaults.1);
            let roles = [AcceptConfig::GROUP, ConnectConfig::GROUP];
            let others = roles.into_iter().filter(|role| *role != R::GROUP && !self.is_argument);
            unknown(group_hint(groups.keys().map(String::as_str).chain(others)))
        };
        if let Some(became) = replaced::replacement(&self.knob) {
            return Err(SettingError::Replaced { source_: self.source.clone(), knob: self.knob.clone(), became });
        }
        let (group, name) = self.knob.split_once('.').ok_or_else(unknown_group)?;
        let mut knobs = knobs_of(config, role, group).ok_or_else(unknown_group)?;
        if !knobs.contains_key(name) {
            let names: Vec<_> = knobs.keys().map(String::as_str).collect();
            return Err(unknown(format!("{group} has {}", names.join(", "))));
        }
        let mut why = String::new();
        for value in &self.values {
            let value = if value == UNSET { Value::Null } else { with_default_polls(&self.knob, value) };
            knobs.insert(name.to_owned(), value);
            match set_knobs(config, role, group, &knobs) {
                Ok(()) => return Ok(()),
                // The first value is the one in TOML, so its error is about the type that was written.
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        let default = knobs_of(defaults.0, defaults.1, group).and_then(|mut knobs| knobs.remove(name));
        let overflow = self.check_overflow(config, role, knobs.clone());
        knobs.insert(name.to_owned(), Value::Null);
        let is_optional = set_knobs(config, role, group, &knobs).is_ok();
        let mut why = expected_form(&why, &default.unwrap_or_default(), is_optional);
        match overflow {
            Some(Ok(max)) if !why.contains(", 0 to ") => {
                why = why.replacen("a whole number", &format!("a whole number, 0 to {max}"), 1);
            }
            Some(Err(error)) => return Err(SettingError::Refused { source_: self.source.clone(), error }),
            _ => {}
        }
        let value = self.values.last().map_or_else(String::new, |value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let value = shorten(&value, MAX_SHOWN);
        Err(SettingError::Value { source_: self.source.clone(), knob: self.knob.clone(), value, why })
    }

    /// Explains a whole number that the knob's type cannot represent. Returns the error with the knob's range, or the
    /// highest number of the type if the knob has no range; `None` for any other value. `knobs` are those of the group.
    fn check_overflow<R: Role>(
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
        // The highest number in TOML is that of i64.
        let highest = [i64::MAX as u64, u32::MAX.into(), u16::MAX.into(), u8::MAX.into()];
        let (mut config, mut role) = (config.clone(), copy_role(role).ok()?);
        let max = highest.into_iter().find(|max| {
            knobs.insert(name.to_owned(), Value::from(*max));
            set_knobs(&mut config, &mut role, group, &knobs).is_ok()
        })?;
        if digits.len() < text.len() {
            knobs.insert(name.to_owned(), Value::from(0));
            set_knobs(&mut config, &mut role, group, &knobs).ok()?;
        }
        let refused = config.validate().and_then(|()| role.validate()).err();
        Some(match refused.filter(|error| error.knob == self.knob) {
            Some(mut error) => {
                error.value = shorten(&text, MAX_SHOWN);
                Err(error)
            }
            None => Ok(max),
        })
    }
}

/// Adds the default number of polls to an idle policy that is only a name. Returns other values unchanged.
fn with_default_polls(knob: &str, value: &Value) -> Value {
    let name = value.as_str().filter(|_| knob == "poll.idle");
    let idle = name.and_then(Idle::from_name);
    idle.and_then(|idle| serde_json::to_value(idle.policy()).ok()).unwrap_or_else(|| value.clone())
}

/// Returns the expected form of a knob and its default, from the error about a value.
fn expected_form(why: &str, default: &Value, is_optional: bool) -> String {
    let expected = why.rsplit_once(", expected ").map_or("", |(_, expected)| expected);
    // Errors about times and sizes consist of the expected form.
    let stated = ["wanted ", "expected "].iter().find_map(|start| why.strip_prefix(*start));
    let form = match (stated, expected) {
        (Some(form), _) => form,
        (None, choices) if choices.contains('`') => choices,
        (None, "u8") => "a whole number, 0 to 255",
        (None, "u16") => "a whole number, 0 to 65535",
        (None, "u32" | "u64" | "usize") => "a whole number",
        (None, "a boolean") => "true or false",
        (None, "a string") => "text in quotes",
        _ if default.as_array().is_some_and(Vec::is_empty) => "a list such as [[\"64KiB\", 32]]",
        _ => "a value like the default",
    };
    let unset = if is_optional { format!(", or {UNSET} {UNSET_FORM}") } else { String::new() };
    format!("expected {form}{unset}; default {}", to_text(default))
}

/// Returns the configuration as a file for `--config`, with every knob and the memory that it takes.
pub fn to_toml<R: Role>(config: &Config, role: &R) -> String {
    let mut text = String::from("# Knobs without a number of bytes take no memory.\n");
    let costs = config.costs();
    for (group, knobs) in groups_of(config, role) {
        text += &format!("\n[{group}]\n");
        for (knob, value) in knobs.as_object().into_iter().flatten() {
            let cost = costs.iter().find(|cost| cost.0.split_once('.') == Some((&group, knob)));
            let cost = cost.map_or_else(String::new, |(_, bytes, scope)| format!(" # {bytes} bytes {scope}"));
            text += &format!("{knob} = {}{cost}\n", to_text(value));
        }
    }
    text
}

/// Returns a line about the memory that this many shards will take.
///
/// Each of a client's `connections` has its own chunk memory. For a server, `connections` is 0.
pub fn memory_line(config: &Config, shards: usize, connections: usize) -> String {
    let MemoryConfig { budget, bulk_buffers, .. } = &config.memory;
    let exposed: usize = bulk_buffers.iter().map(|(size, count)| size.saturating_mul(*count)).sum();
    let more = exposed.saturating_mul(connections.saturating_sub(1));
    let total = config.memory_bytes().saturating_mul(shards).saturating_add(more);
    format!("memory: {total} bytes for {shards} shard(s) (memory.budget of each: {budget})")
}

/// Default memory budget of a program's shard, in bytes.
pub const BUDGET: usize = 1 << 30;
