//! Configuration of programs on `rpcrdma`: one form for all of them.
//!
//! Precedence, lowest first: the program's defaults, `--config FILE` (TOML), the environment
//! (`RPCRDMA_MEMORY_RECEIVES=8192`), the program's own options, `--set memory.receives=8192`. `--print-config` prints
//! what is in force: every knob, as a file that `--config` takes. Times are written as `"10s"`, sizes as `"64KiB"` or a
//! number of bytes. `"unset"` is the value of a knob without one.
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

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use rpcrdma::config::{AcceptConfig, Config, ConfigError, ConnectConfig};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// What begins the names of variables.
const PREFIX: &str = "RPCRDMA_";
/// The value of a knob that has none.
const UNSET: &str = "unset";
/// How it is written.
const UNSET_FORM: &str = "(in a file: \"unset\")";
/// Characters of a name or value that errors show.
const SHOWN: usize = 64;
/// Every group: those of all programs, then those of one role.
const GROUPS: [&str; 9] =
    ["memory", "limits", "timeouts", "wire", "device", "iwarp", "poll", ConnectConfig::GROUP, AcceptConfig::GROUP];

/// The group of knobs that a program has as a server or as a client.
pub trait Role: Serialize + DeserializeOwned {
    /// Its name.
    const GROUP: &str;

    /// Checks what the types do not.
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

/// Whether a knob is of a group that programs of another role than this have.
fn is_of_other_role<R: Role>(knob: &str) -> bool {
    let group = knob.split('.').next().unwrap_or_default();
    group != R::GROUP && [ConnectConfig::GROUP, AcceptConfig::GROUP].contains(&group)
}

/// Options of every program.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Configuration")]
pub struct ConfigArgs {
    /// Read knobs from this file, in TOML; the environment (RPCRDMA_MEMORY_RECEIVES=8192) overrides it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Set a knob, such as memory.receives=8192; overrides file and environment
    #[arg(long, value_name = "GROUP.KNOB=VALUE")]
    pub set: Vec<String>,
    /// Print the configuration in force, in TOML, and exit
    #[arg(long)]
    pub print_config: bool,
}

impl ConfigArgs {
    /// Reads file and environment.
    ///
    /// # Errors
    /// The file, or the argument of `--set`, cannot be read.
    pub fn load(&self) -> Result<Settings, SettingError> {
        self.load_with(std::env::vars_os())
    }

    /// The same with these variables.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with(&self, variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Settings, SettingError> {
        let mut all = self.config.as_deref().map_or(Ok(Vec::new()), file)?;
        let named = |(name, value): (OsString, _)| Some((name.into_string().ok()?, value));
        let mut variables: Vec<_> = variables.filter_map(named).collect();
        variables.sort();
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix(PREFIX).map(str::to_lowercase) else { continue };
            let group = GROUPS.into_iter().find(|group| rest.starts_with(&format!("{group}_")));
            // Others have variables that begin so, too.
            if let Some(group) = group {
                let knob = format!("{group}.{}", &rest[group.len() + 1..]);
                let text = text.into_string().map_err(|text| SettingError::Value {
                    source_: name.clone(),
                    knob: knob.clone(),
                    value: short(&text.to_string_lossy(), SHOWN),
                    why: "wanted text in UTF-8".to_owned(),
                })?;
                all.push(Setting { source: Source::Environment(name), knob, values: values(&text) });
            }
        }
        for text in &self.set {
            let (knob, value) = text.split_once('=').ok_or_else(|| SettingError::NoValue(short(text, SHOWN)))?;
            let knob = knob.trim().to_owned();
            all.push(Setting { source: Source::CommandLine, knob, values: values(value.trim()) });
        }
        Ok(Settings(all))
    }

    /// The same options as arguments, for a program of role `R` that this one starts.
    pub fn arguments<R: Role>(&self) -> Vec<String> {
        let config = self.config.iter().map(|path| format!("--config={}", path.display()));
        let set = self.set.iter().filter(|text| !is_of_other_role::<R>(text));
        config.chain(set.map(|text| format!("--set={text}"))).collect()
    }
}

/// The knobs of those of these options that were given; each option with its knob.
pub fn given<'a>(matches: &clap::ArgMatches, options: &[(&str, &'a str)]) -> Vec<&'a str> {
    let is_given = |option| matches.value_source(option) == Some(clap::parser::ValueSource::CommandLine);
    options.iter().filter(|(option, _)| is_given(option)).map(|&(_, knob)| knob).collect()
}

/// Where a setting is from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    File(PathBuf),
    Environment(String),
    CommandLine,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => f.write_str(name),
            Self::CommandLine => f.write_str("--set"),
        }
    }
}

/// One knob, and what its text may mean: the first of its values that the knob takes.
#[derive(Clone, Debug)]
struct Setting {
    source: Source,
    knob: String,
    values: Vec<Value>,
}

/// Knobs that file, environment and command line set, lowest precedence first.
#[derive(Clone, Debug, Default)]
pub struct Settings(Vec<Setting>);

/// Why a configuration is refused: source, knob, value.
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
    /// The argument has no value.
    #[error("--set {0}: wanted GROUP.KNOB=VALUE, such as memory.receives=8192")]
    NoValue(String),
    /// There is no such knob.
    #[error("{source_}: no knob {knob}: {known}")]
    Unknown {
        /// Where it is named.
        source_: String,
        /// Its name.
        knob: String,
        /// Those that there are.
        known: String,
    },
    /// The value is not of the knob's type.
    #[error("{source_}: {knob} = {value}: {why}")]
    Value {
        /// Where it is set.
        source_: String,
        /// Its name.
        knob: String,
        /// What it is set to.
        value: String,
        /// What is wanted.
        why: String,
    },
    /// The value is out of range, or the configuration cannot work.
    #[error("{source_}: {error}")]
    Refused {
        /// What set the knob last.
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
        let source = Source::File(path.to_owned());
        let Ok(Value::Object(knobs)) = serde_json::to_value(knobs) else {
            return Err(SettingError::Unknown {
                source_: source.to_string(),
                knob: short(&group, SHOWN),
                known: no_group(None),
            });
        };
        for (knob, value) in knobs {
            let knob = format!("{group}.{knob}");
            all.push(Setting { source: source.clone(), knob, values: vec![value] });
        }
    }
    Ok(all)
}

/// The text, or its beginning and length.
fn short(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// A value as files have it.
fn to_text(value: &Value) -> String {
    let value = if value.is_null() { &Value::from(UNSET) } else { value };
    toml::Value::try_from(value).map_or_else(|error| error.to_string(), |value| value.to_string())
}

/// Whether JSON, in which configurations are merged, has all of it.
fn is_finite(value: &toml::Value) -> bool {
    match value {
        toml::Value::Float(number) => number.is_finite(),
        toml::Value::Array(values) => values.iter().all(is_finite),
        toml::Value::Table(table) => table.values().all(is_finite),
        _ => true,
    }
}

/// What the text of a variable or argument may mean: TOML, or a string without its quotes.
fn values(text: &str) -> Vec<Value> {
    let table: Option<toml::Table> = format!("value = {text}").parse().ok();
    let value = table.and_then(|mut table| table.remove("value")).filter(is_finite);
    let value = value.and_then(|value| serde_json::to_value(value).ok());
    value.into_iter().chain([Value::String(text.to_owned())]).collect()
}

/// What there is instead of a knob outside of all groups.
fn no_group(groups: Option<&Map<String, Value>>) -> String {
    let names = groups.map(|groups| groups.keys().map(String::as_str).collect::<Vec<_>>().join(", "));
    format!("knobs are in groups, as memory.receives{}", names.map_or(String::new(), |names| format!(": {names}")))
}

/// All groups with all knobs.
fn groups_of<R: Role>(config: &Config, role: &R) -> Map<String, Value> {
    let Ok(Value::Object(mut groups)) = serde_json::to_value(config) else { unreachable!("it is a struct of structs") };
    if let Ok(group @ Value::Object(_)) = serde_json::to_value(role) {
        groups.insert(R::GROUP.to_owned(), group);
    }
    groups
}

/// The configurations of these groups.
fn read<R: Role>(mut groups: Map<String, Value>) -> Result<(Config, R), String> {
    let text = |error: serde_json::Error| error.to_string();
    let role = serde_json::from_value(groups.remove(R::GROUP).unwrap_or_default()).map_err(text)?;
    Ok((serde_json::from_value(Value::Object(groups)).map_err(text)?, role))
}

impl Settings {
    /// Applies them to a program's defaults, and checks the result. `options` are the knobs that the program's own
    /// options have set: file and environment leave them as they are. Servers and clients may share file and
    /// environment: groups of the other role are passed over there.
    ///
    /// # Errors
    /// Source, knob and value of what is refused.
    pub fn apply<R: Role>(&self, config: &Config, role: &R, options: &[&str]) -> Result<(Config, R), SettingError> {
        let defaults = groups_of(config, role);
        let mut groups = defaults.clone();
        let mut sources: BTreeMap<&str, String> = options.iter().map(|&knob| (knob, "options".to_owned())).collect();
        let for_others =
            |setting: &&Setting| setting.source != Source::CommandLine && is_of_other_role::<R>(&setting.knob);
        for setting in self.0.iter().filter(|setting| !for_others(setting)) {
            let own = setting.source != Source::CommandLine && options.contains(&setting.knob.as_str());
            let before = own.then(|| groups.clone());
            setting.apply::<R>(&mut groups, &defaults)?;
            match before {
                Some(before) => groups = before,
                None => drop(sources.insert(&setting.knob, setting.source.to_string())),
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
        // What files do not have.
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
            let (source_, knob) = (self.source.to_string(), short(&self.knob, SHOWN));
            SettingError::Unknown { source_, knob, known }
        };
        let (group, name) = self.knob.split_once('.').ok_or_else(|| unknown(no_group(Some(groups))))?;
        let Some(knobs) = groups.get(group).and_then(Value::as_object) else {
            return Err(unknown(no_group(Some(groups))));
        };
        if !knobs.contains_key(name) {
            let names: Vec<_> = knobs.keys().map(String::as_str).collect();
            return Err(unknown(format!("{group} has {}", names.join(", "))));
        }
        let mut why = String::new();
        for value in &self.values {
            let value = if value == UNSET { Value::Null } else { value.clone() };
            let before = groups[group][name].take();
            groups[group][name] = value;
            match read::<R>(groups.clone()) {
                Ok(_) => return Ok(()),
                // That of the first is about the type, as written.
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
        Err(SettingError::Value { source_: self.source.to_string(), knob: self.knob.clone(), value, why })
    }
}

/// What a knob takes, from the reason why it does not take a value, and its default.
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
