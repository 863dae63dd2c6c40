//! The declared search space, without senseless settings.

use std::collections::BTreeMap;

use super::TuneError;
use super::aim::Aim;
use super::knob::Knob;
use super::settings::{Settings, setting};

/// Values of each knob, and constraints.
#[derive(Clone, Debug)]
pub(super) struct Space {
    start: Settings,
    values: BTreeMap<Knob, Vec<String>>,
    /// Cores for the client, shards and workers; `None`: not given.
    cores: Option<usize>,
    /// The server is remote and cannot be changed.
    remote: bool,
}

/// Candidates, and excluded ones with the reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Candidates {
    /// By the changed knob.
    pub(super) of_knob: Vec<Vec<Settings>>,
    pub(super) left_out: Vec<(Settings, String)>,
}

/// What is tried where nothing is declared. A knob's usual value is among them where a start may have another.
fn usual(aim: Aim) -> impl Iterator<Item = (Knob, &'static [&'static str])> {
    const ALWAYS: [(Knob, &[&str]); 7] = [
        (Knob::Credits, &["16", "64", "256"]),
        (Knob::Batch, &["on", "off"]),
        (Knob::SignalEvery, &["1", "16", "64"]),
        (Knob::Idle, &["poll", "adaptive", "event"]),
        (Knob::MessageBuffers, &["256", "2048"]),
        (Knob::Shards, &["1", "2"]),
        (Knob::Workers, &["0", "1", "2"]),
    ];
    const CALLS: [(Knob, &[&str]); 2] =
        [(Knob::ReceiveSize, &["4096", "8192"]), (Knob::SmallBuffers, &["512", "4096"])];
    const BYTES: [(Knob, &[&str]); 2] =
        [(Knob::ReceiveSize, &["4096", "16384"]), (Knob::BulkBuffers, &["64K:16+1M:4", "64K:64+1M:16"])];
    let of_aim = match aim {
        Aim::Bytes => BYTES,
        Aim::Calls | Aim::P99 | Aim::Cpu => CALLS,
    };
    ALWAYS.into_iter().chain(of_aim)
}

impl Space {
    /// The space around `start`: the declared values, each `NAME=VALUE,VALUE…`, or the defaults of the aim.
    ///
    /// # Errors
    /// An unknown knob or value, or a knob that is declared twice or cannot be changed here.
    pub(super) fn new(
        aim: Aim,
        start: &[String],
        declared: &[String],
        cores: Option<usize>,
        remote: bool,
    ) -> Result<Self, TuneError> {
        let mut space = Self { start: Settings::default(), values: BTreeMap::new(), cores, remote };
        let turns = |knob: Knob| match remote && knob.row().wants_server {
            true => Err(TuneError::Usage(format!(
                "{knob}: with --remote the server is as it is, and this is its, or both ends', to turn"
            ))),
            false => Ok(knob),
        };
        let mut started = Vec::new();
        for text in start {
            let (knob, value) = setting(text)?;
            turns(knob)?;
            if started.contains(&knob) {
                return Err(TuneError::Usage(format!("--start {knob}: it is given twice")));
            }
            started.push(knob);
            space.start = space.start.with(knob, &value);
        }
        for text in declared {
            let (name, list) = text.split_once('=').ok_or_else(|| {
                TuneError::Usage(format!("{text:?}: wanted NAME=VALUE,VALUE…, e.g. credits=16,64,256"))
            })?;
            let knob = turns(name.parse()?)?;
            let values = list.split(',').map(|value| knob.value(value)).collect::<Result<Vec<_>, _>>()?;
            if space.values.insert(knob, values).is_some() {
                return Err(TuneError::Usage(format!("--knob {knob}: it is given twice")));
            }
        }
        if declared.is_empty() {
            let usual = usual(aim).filter(|&(knob, _)| turns(knob).is_ok());
            space.values.extend(usual.map(|(knob, values)| (knob, values.iter().map(ToString::to_string).collect())));
        }
        Ok(space)
    }

    /// Start of the search, and reference of its result.
    pub(super) fn start(&self) -> &Settings {
        &self.start
    }

    /// Each knob alone with each of its values, from these settings.
    pub(super) fn around(&self, from: &Settings) -> Candidates {
        let mut all = Candidates::default();
        for (&knob, values) in &self.values {
            let mut of_knob: Vec<Settings> = Vec::new();
            for settings in values.iter().map(|value| from.with(knob, value)) {
                if settings == *from || of_knob.contains(&settings) {
                    continue;
                }
                match self.objection(&settings) {
                    None => of_knob.push(settings),
                    Some(why) => all.left_out.push((settings, why)),
                }
            }
            if !of_knob.is_empty() {
                all.of_knob.push(of_knob);
            }
        }
        all
    }

    /// Every combination of these, each of which is `from` with one knob changed.
    pub(super) fn together(&self, from: &Settings, turned: &[Settings]) -> Candidates {
        let mut all = Candidates::default();
        let mut together = Vec::new();
        for choice in 1..1_u32 << turned.len() {
            let chosen =
                turned.iter().enumerate().filter(|(at, _)| choice >> at & 1 == 1).map(|(_, settings)| settings);
            let settings = chosen.fold(from.clone(), |all, one| {
                let knobs = one.turned(from);
                knobs
                    .into_iter()
                    .fold(all, |all, knob| one.get(knob).map_or(all.clone(), |value| all.with(knob, value)))
            });
            match self.objection(&settings) {
                None => together.push(settings),
                Some(why) => all.left_out.push((settings, why)),
            }
        }
        all.of_knob.push(together);
        all
    }

    /// Whether these settings make sense here.
    pub(super) fn allows(&self, settings: &Settings) -> bool {
        self.objection(settings).is_none()
    }

    /// The reason to exclude these settings: more polling threads than cores. Two are always allowed, for both ends,
    /// and as many as the start has.
    fn objection(&self, settings: &Settings) -> Option<String> {
        let polling = |settings: &Settings| match settings.get(Knob::Idle) {
            Some("poll") => 1 + settings.number(Knob::Shards) + settings.number(Knob::Workers),
            _ => 0,
        };
        let (cores, threads) = (self.cores.filter(|_| !self.remote)?, polling(settings));
        (threads > cores.max(2).max(polling(&self.start))).then(|| {
            format!("{threads} threads would poll, on {cores} cores: give more by --cores, or --start idle=event")
        })
    }

    /// The declaration, for the head of a state file.
    pub(super) fn declared(&self) -> BTreeMap<&'static str, Vec<String>> {
        self.values.iter().map(|(knob, values)| (knob.name(), values.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(start: &[&str], declared: &[&str], cores: usize) -> Result<Space, TuneError> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Space::new(Aim::Calls, &owned(start), &owned(declared), Some(cores), false)
    }

    fn texts(candidates: &Candidates) -> Vec<Vec<String>> {
        let texts = |all: &Vec<Settings>| all.iter().map(ToString::to_string).collect();
        candidates.of_knob.iter().map(texts).collect()
    }

    #[test]
    fn one_knob_at_a_time() {
        let space = space(&["batch=off"], &["credits=16,64,16", "batch=on,off", "idle=poll"], 2).unwrap();
        let all = space.around(space.start());
        assert_eq!(texts(&all), [vec!["credits=16 batch=off", "credits=64 batch=off"], vec!["default"]]);
        assert!(all.left_out.is_empty());
    }

    #[test]
    fn winners_are_taken_together() {
        let space = space(&[], &["credits=16", "batch=off", "workers=1"], 2).unwrap();
        let from = space.start().clone();
        let turned = ["credits=16", "batch=off", "workers=1"].map(|text| text.parse().unwrap());
        let all = space.together(&from, &turned);
        assert_eq!(texts(&all), [["credits=16", "batch=off", "credits=16 batch=off"]]);
        assert_eq!(all.left_out.len(), 4);
        assert!(all.left_out[0].1.contains("3 threads would poll, on 2 cores"), "{all:?}");
    }

    #[test]
    fn threads_that_sleep_may_share_cores() {
        let polling = space(&[], &["shards=2", "workers=1"], 2).unwrap();
        assert_eq!(polling.around(polling.start()).left_out.len(), 2);
        let sleeping = space(&["idle=event"], &["shards=2", "workers=1"], 2).unwrap();
        assert_eq!(sleeping.around(sleeping.start()).left_out, []);
        let asked_for = space(&["workers=1"], &["credits=16", "workers=0,2"], 2).unwrap();
        let all = asked_for.around(asked_for.start());
        assert_eq!(texts(&all), [["credits=16 workers=1"], ["default"]]);
        assert!(all.left_out[0].1.contains("4 threads would poll"), "{all:?}");
        let alone = space(&[], &["credits=16", "shards=2"], 1).unwrap();
        assert_eq!(alone.around(alone.start()).left_out.len(), 1);
        let roomy = space(&[], &["shards=2", "workers=1"], 3).unwrap();
        assert_eq!(roomy.around(roomy.start()).left_out, []);
    }

    #[test]
    fn the_usual_values_are_values() {
        for aim in [Aim::Calls, Aim::Bytes, Aim::P99, Aim::Cpu] {
            for (knob, values) in usual(aim) {
                for value in values {
                    assert_eq!(knob.value(value).unwrap(), *value);
                }
            }
            let space = Space::new(aim, &[], &[], Some(8), false).unwrap();
            let there = Space::new(aim, &[], &[], Some(8), true).unwrap();
            assert!(space.around(space.start()).of_knob.len() > there.around(there.start()).of_knob.len());
        }
    }

    #[test]
    fn wrong_declarations_are_named() {
        for (start, declared, words) in [
            (&["credits"][..], &[][..], "NAME=VALUE"),
            (&["credits=64", "credits=16"], &[], "--start credits: it is given twice"),
            (&[], &["credits"], "e.g. credits=16,64,256"),
            (&[], &["credits=16", "credits=64"], "--knob credits: it is given twice"),
            (&[], &["credits=1"], "credits=1: wanted a number from 4 to 32767"),
            (&[], &["colour=red"], "is no knob: there are credits,"),
        ] {
            let error = space(start, declared, 2).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let there = |start: &str, declared: &str| {
            let list = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            Space::new(Aim::Calls, &list(start), &list(declared), None, true)
        };
        assert!(there("workers=1", "").unwrap_err().to_string().contains("workers: with --remote"));
        assert!(there("", "inline=8192").unwrap_err().to_string().contains("receive_size: with --remote"));
        assert!(there("credits=128", "batch=on,off").is_ok());
    }
}
