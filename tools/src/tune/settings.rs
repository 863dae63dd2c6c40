//! A candidate: the changed knobs and their values.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::TuneError;
use super::knob::Knob;

/// Values of some knobs. All others have the defaults of `rpcperf`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Settings(BTreeMap<Knob, String>);

impl Settings {
    /// These, with this knob changed. Values that are the default of `rpcperf` are not kept, so that equal settings
    /// compare equal.
    pub(super) fn with(&self, knob: Knob, value: &str) -> Self {
        let mut all = self.0.clone();
        if knob.row().default == Some(value) {
            all.remove(&knob);
        } else {
            all.insert(knob, value.to_owned());
        }
        Self(all)
    }

    /// These, with this knob as in `other`.
    pub(super) fn put_back(&self, knob: Knob, other: &Self) -> Self {
        let mut all = self.0.clone();
        all.remove(&knob);
        all.extend(other.0.get(&knob).map(|value| (knob, value.clone())));
        Self(all)
    }

    /// The value of a knob, if it is known without a run.
    pub(super) fn get(&self, knob: Knob) -> Option<&str> {
        self.0.get(&knob).map(String::as_str).or(knob.row().default)
    }

    /// A number that is known without a run; otherwise 0.
    pub(super) fn number(&self, knob: Knob) -> usize {
        self.get(knob).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// The knobs whose values differ from those in `other`.
    pub(super) fn turned(&self, other: &Self) -> Vec<Knob> {
        Knob::all().filter(|&knob| self.get(knob) != other.get(knob)).collect()
    }

    /// The options of `rpcperf`.
    pub(super) fn arguments(&self) -> Vec<String> {
        self.0.iter().flat_map(|(knob, value)| knob.arguments(value)).collect()
    }
}

/// `NAME=VALUE`, separated by blanks; `default` for none.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.pad("default");
        }
        let all: Vec<String> = self.0.iter().map(|(knob, value)| format!("{knob}={value}")).collect();
        f.pad(&all.join(" "))
    }
}

/// Parses one `NAME=VALUE`.
pub(super) fn setting(text: &str) -> Result<(Knob, String), TuneError> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| TuneError::Usage(format!("{text:?}: wanted NAME=VALUE, e.g. credits=64")))?;
    let knob: Knob = name.parse()?;
    Ok((knob, knob.value(value)?))
}

impl FromStr for Settings {
    type Err = TuneError;

    fn from_str(text: &str) -> Result<Self, TuneError> {
        let mut all = Self::default();
        for word in text.split_whitespace().filter(|word| *word != "default") {
            let (knob, value) = setting(word)?;
            all = all.with(knob, &value);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_of_rpcperf_are_no_settings() {
        let start = Settings::default().with(Knob::Batch, "off").with(Knob::Credits, "128");
        assert_eq!(start.to_string(), "credits=128 batch=off");
        assert_eq!(start.arguments(), ["--credits", "128", "--no-batch"]);
        let back = start.with(Knob::Batch, "on");
        assert_eq!((back.to_string(), back.get(Knob::Batch)), ("credits=128".to_owned(), Some("on")));
        assert_eq!(back.turned(&start), [Knob::Batch]);
        assert_eq!(back.put_back(Knob::Batch, &start), start);
        assert_eq!(start.put_back(Knob::Credits, &Settings::default()).to_string(), "batch=off");
        assert_eq!(Settings::default().to_string(), "default");
        assert_eq!((start.number(Knob::Shards), start.number(Knob::Credits)), (1, 128));
    }

    #[test]
    fn settings_come_back_from_text() {
        for text in ["default", "credits=128 batch=off", "bulk_buffers=64K:4+1M:2 workers=1"] {
            assert_eq!(text.parse::<Settings>().unwrap().to_string(), text);
        }
        for wrong in ["credits", "credits=1", "speed=7"] {
            assert!(wrong.parse::<Settings>().is_err(), "{wrong}");
        }
    }
}
