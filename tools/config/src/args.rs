//! Configuration options of programs, and their environment variables.

use std::ffi::OsString;
use std::path::PathBuf;

use rpcrdma::config::{AcceptConfig, ConnectConfig};

use super::{MAX_SHOWN, Role, SHARED, Setting, SettingError, Settings, is_of_other_role, parse_values, shorten};

/// Returns the groups of knobs: first the groups of all programs, then the groups of only one role.
fn groups() -> impl Iterator<Item = &'static str> {
    SHARED.iter().copied().chain([ConnectConfig::GROUP, AcceptConfig::GROUP])
}

/// Prefix of the environment variables.
const PREFIX: &str = "RPCRDMA_";

/// Values of an option with their names on the command line.
pub trait Named: clap::ValueEnum {
    /// The name of this value on the command line.
    fn name(&self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl<T: clap::ValueEnum> Named for T {}

/// Heading of these options in help texts.
const HEADING: &str = "Configuration";

/// Configuration options of every program.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigArgs {
    /// Read knobs from this file, in TOML; the environment (RPCRDMA_MEMORY_RECEIVES=8192) overrides it
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub config: Option<PathBuf>,
    /// Set a knob, such as memory.receives=8192; overrides file and environment
    #[arg(long, value_name = "GROUP.KNOB=VALUE", help_heading = HEADING)]
    pub set: Vec<String>,
    /// Print the configuration in force and the memory that it takes, in TOML, and exit
    #[arg(long, help_heading = HEADING)]
    pub print_config: bool,
}

impl ConfigArgs {
    /// Reads the file, the environment and the arguments of `--set`.
    ///
    /// # Errors
    /// The file cannot be read, or an argument of `--set` has no value.
    pub fn load(&self) -> Result<Settings, SettingError> {
        self.load_with(std::env::vars_os())
    }

    /// Reads the settings, with these variables as the environment.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_with(&self, variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Settings, SettingError> {
        let mut settings = Settings::default();
        if let Some(path) = &self.config {
            settings.read(path)?;
        }
        let with_name = |(name, value): (OsString, _)| Some((name.into_string().ok()?, value));
        let mut variables: Vec<_> = variables.filter_map(with_name).collect();
        variables.sort();
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix(PREFIX).map(str::to_lowercase) else { continue };
            let group = groups().find(|group| rest.starts_with(&format!("{group}_")));
            // Other programs use the prefix, too, so other names are ignored.
            if let Some(group) = group {
                let knob = format!("{group}.{}", &rest[group.len() + 1..]);
                let text = text.into_string().map_err(|text| SettingError::Value {
                    source_: name.clone(),
                    knob: knob.clone(),
                    value: shorten(&text.to_string_lossy(), MAX_SHOWN),
                    why: "expected text in UTF-8".to_owned(),
                })?;
                settings.set(&name, &knob, &text);
            }
        }
        for text in &self.set {
            let (knob, value) = text.split_once('=').ok_or_else(|| SettingError::NoValue(shorten(text, MAX_SHOWN)))?;
            let (source, is_argument) = ("--set".to_owned(), true);
            settings.0.push(Setting {
                source,
                is_argument,
                knob: knob.trim().to_owned(),
                values: parse_values(value.trim()),
            });
        }
        Ok(settings)
    }

    /// Returns these options as arguments for a child process of role `R`.
    pub fn arguments<R: Role>(&self) -> Vec<String> {
        let config = self.config.iter().map(|path| format!("--config={}", path.display()));
        let set = self.set.iter().filter(|text| !is_of_other_role::<R>(text));
        config.chain(set.map(|text| format!("--set={text}"))).collect()
    }
}

/// Returns the knobs whose options were given. `options` has each option with its knob.
pub fn given<'a>(matches: &clap::ArgMatches, options: &[(&str, &'a str)]) -> Vec<&'a str> {
    let is_given = |option| matches.value_source(option) == Some(clap::parser::ValueSource::CommandLine);
    options.iter().filter(|(option, _)| is_given(option)).map(|&(_, knob)| knob).collect()
}
