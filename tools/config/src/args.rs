//! Options of programs, and their environment.

use std::ffi::OsString;
use std::path::PathBuf;

use rpcrdma::config::{AcceptConfig, ConnectConfig};

use super::{Role, SHARED, SHOWN, Setting, SettingError, Settings, is_of_other_role, short, values};

/// Groups of all programs, then those of one role.
fn groups() -> impl Iterator<Item = &'static str> {
    SHARED.iter().copied().chain([ConnectConfig::GROUP, AcceptConfig::GROUP])
}

/// Prefix of the variables.
const PREFIX: &str = "RPCRDMA_";
/// Names of an option's values.
pub trait Named: clap::ValueEnum {
    /// Name on the command line.
    fn name(&self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl<T: clap::ValueEnum> Named for T {}

/// Heading of these options in help texts.
const HEADING: &str = "Configuration";

/// Options of every program.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigArgs {
    /// Read knobs from this file, in TOML; the environment (RPCRDMA_MEMORY_RECEIVES=8192) overrides it
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub config: Option<PathBuf>,
    /// Set a knob, such as memory.receives=8192; overrides file and environment
    #[arg(long, value_name = "GROUP.KNOB=VALUE", help_heading = HEADING)]
    pub set: Vec<String>,
    /// Print the configuration in force and the bytes that it costs, in TOML, and exit
    #[arg(long, help_heading = HEADING)]
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
        let mut settings = Settings::default();
        if let Some(path) = &self.config {
            settings.read(path)?;
        }
        let named = |(name, value): (OsString, _)| Some((name.into_string().ok()?, value));
        let mut variables: Vec<_> = variables.filter_map(named).collect();
        variables.sort();
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix(PREFIX).map(str::to_lowercase) else { continue };
            let group = groups().find(|group| rest.starts_with(&format!("{group}_")));
            // Other programs use the prefix, too.
            if let Some(group) = group {
                let knob = format!("{group}.{}", &rest[group.len() + 1..]);
                let text = text.into_string().map_err(|text| SettingError::Value {
                    source_: name.clone(),
                    knob: knob.clone(),
                    value: short(&text.to_string_lossy(), SHOWN),
                    why: "wanted text in UTF-8".to_owned(),
                })?;
                settings.set(&name, &knob, &text);
            }
        }
        for text in &self.set {
            let (knob, value) = text.split_once('=').ok_or_else(|| SettingError::NoValue(short(text, SHOWN)))?;
            let (source, is_argument) = ("--set".to_owned(), true);
            settings.0.push(Setting {
                source,
                is_argument,
                knob: knob.trim().to_owned(),
                values: values(value.trim()),
            });
        }
        Ok(settings)
    }

    /// The same options as arguments, for a child process of role `R`.
    pub fn arguments<R: Role>(&self) -> Vec<String> {
        let config = self.config.iter().map(|path| format!("--config={}", path.display()));
        let set = self.set.iter().filter(|text| !is_of_other_role::<R>(text));
        config.chain(set.map(|text| format!("--set={text}"))).collect()
    }
}

/// The knobs of the given options. `options`: each with its knob.
pub fn given<'a>(matches: &clap::ArgMatches, options: &[(&str, &'a str)]) -> Vec<&'a str> {
    let is_given = |option| matches.value_source(option) == Some(clap::parser::ValueSource::CommandLine);
    options.iter().filter(|(option, _)| is_given(option)).map(|&(_, knob)| knob).collect()
}
