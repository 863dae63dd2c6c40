//! The search: values of single knobs, combinations of the best ones, and a final comparison.
//!
//! The *start* of a sweep is the settings of `--start`, or the best ones of the previous sweep.
//!
//! *One knob at a time.* Each knob alone takes each of its values, while the others keep those of the start. The number
//! of candidates is the sum of the numbers of values, while a grid would have their product. This suffices because the
//! knobs of this engine affect different costs and mostly do not interact. The values of a knob form a group, so that a
//! knob with five good values does not displace the only good value of another.
//!
//! *Successive halving.* In each round each candidate runs several times, and then the worse half of each group is
//! dropped, until one candidate is left. So candidates that are hard to distinguish get the most runs.
//!
//! *Interleaved.* A pass runs each candidate once, in random order, and the start once for every [`BLOCK`] candidates.
//! The gain of a candidate is relative to the median of the start's runs in its block and the two adjacent blocks, so
//! that slow changes of the host affect both. The median of all gains counts, so a single disturbed run of
//! the candidate or of the start does not decide.
//!
//! *Together.* The winners with a gain, at most `--combine`, are tried in every combination, again by halving, with new
//! runs. Pairs of knobs that help only together are missed, but another sweep from the result finds some of them.
//!
//! *The simplest.* Among combinations with at least [`SHARE`] of the best gain, the one with the fewest changes wins,
//! so that knobs without a gain keep their values.
//!
//! *The final comparison.* The best of many candidates also had luck in its runs, so its final figures come only from
//! later runs, in pairs: each pass runs the candidate and the settings of `--start` once, and compares the two runs.

use serde_json::Value;

use super::Args;
use super::knobs::{self, Change, Settings};
use super::paired::{Difference, median};
use crate::command::CommandError;

/// Candidates per run of the start.
const BLOCK: usize = 3;
/// Share of the best combination's gain that a simpler one must have.
const SHARE: f64 = 0.85;

/// The figure of a run with its conditions (`test_info`), or a failure due to the candidate. The figure has single
/// precision, so that JSON preserves its value.
pub(super) type Outcome = Result<(f32, Value), String>;
/// Runs a candidate. An error ends the tuning.
type Runner<'a> = &'a mut dyn FnMut(&Settings) -> Result<Outcome, CommandError>;

/// A candidate or the start, with its results.
#[derive(Clone, Debug, Default)]
pub(super) struct Trial {
    pub(super) settings: Settings,
    /// The number of the sweep that tried it, from 1.
    pub(super) sweep: u16,
    pub(super) stage: &'static str,
    pub(super) figures: Vec<f64>,
    /// The gain of each run over the settings from which its sweep started.
    pub(super) gains: Vec<f64>,
    /// The conditions of its last run.
    pub(super) info: Value,
    pub(super) failed: Option<String>,
    /// Whether all rounds kept it.
    pub(super) kept: bool,
}

impl Trial {
    /// Returns the median gain.
    pub(super) fn gain(&self) -> f64 {
        median(&self.gains).filter(|_| self.failed.is_none()).unwrap_or(f64::NEG_INFINITY)
    }
}

/// Result of a search.
#[derive(Debug)]
pub(super) struct SearchResult {
    /// The start, then the candidates.
    pub(super) trials: Vec<Trial>,
    pub(super) left_out: Vec<(Settings, String)>,
    /// The best candidate with its runs in the comparison, or the start if nothing was better.
    pub(super) best: Trial,
    /// Result of the comparison; `None` if the best is the start, or has failed.
    pub(super) comparison: Option<Difference>,
}

/// Searches the values of `--knob`, or the usual ones, on `allowed` cores unless `--cores` names them.
///
/// # Errors
/// Runs of the start failed, or the tuning cannot continue.
pub(super) fn search(args: &Args, allowed: usize, runner: Runner<'_>) -> Result<SearchResult, CommandError> {
    let cores = if args.cores.is_empty() { allowed } else { args.cores().len() };
    // The limit allows one thread for each end, and as many as the start has.
    let max_threads = if args.remote { usize::MAX } else { cores.max(2).max(polling_threads(&args.start())) };
    let trials = vec![Trial { settings: args.start(), ..Trial::default() }];
    let (random, references, left_out) = (fastrand::Rng::with_seed(args.seed), Vec::new(), Vec::new());
    let mut search = Search { args, max_threads, runner, random, sweep: 0, from: 0, references, trials, left_out };
    for sweep in 1..=args.sweeps {
        (search.sweep, search.references) = (sweep, Vec::new());
        let best = search.sweep()?;
        if best == search.from {
            break;
        }
        search.from = best;
    }
    search.compare()
}

/// Returns the number of polling threads of these settings.
fn polling_threads(settings: &Settings) -> usize {
    let [shards, workers] = ["shards", "workers"].map(|name| settings.get(name).parse::<u16>().map_or(0, usize::from));
    if settings.get("idle") == "poll" { 1 + shards + workers } else { 0 }
}

/// The state of a search.
struct Search<'a> {
    args: &'a Args,
    /// Maximum polling threads of a candidate.
    max_threads: usize,
    runner: Runner<'a>,
    random: fastrand::Rng,
    sweep: u16,
    /// Index of the trial with which candidates are compared.
    from: usize,
    /// Figures of that trial's runs in this sweep, one per block.
    references: Vec<f64>,
    trials: Vec<Trial>,
    left_out: Vec<(Settings, String)>,
}

impl Search<'_> {
    /// Searches around the current settings. Returns the index of the best trial.
    fn sweep(&mut self) -> Result<usize, CommandError> {
        let (from, mut groups) = (self.trials[self.from].settings.clone(), Vec::new());
        for choice in knobs::choices(self.args) {
            let alone = choice.iter().map(|change| from.clone().with(change));
            groups.push(alone.filter_map(|settings| self.add_candidate("one knob at a time", settings)).collect());
        }
        let mut winners = self.halve(groups, self.args.repeats)?;
        winners.truncate(self.args.combine.into());
        if winners.len() < 2 {
            return Ok(winners.pop().unwrap_or(self.from));
        }
        let won: Vec<Change> = winners.iter().flat_map(|&at| self.trials[at].settings.changes(&from)).collect();
        let combinations = (1..1_u32 << won.len()).filter_map(|bits| {
            let chosen = won.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, change)| change);
            self.add_candidate("winners together", chosen.fold(from.clone(), Settings::with))
        });
        let combinations: Vec<usize> = combinations.collect();
        // Combinations differ less than single knobs do, so each round has more runs.
        let winners = self.halve(vec![combinations.clone()], 2 * self.args.repeats)?;
        let Some(&best) = winners.first() else { return Ok(self.from) };
        let is_good_enough = |at: &usize| self.trials[*at].gain() >= SHARE * self.trials[best].gain();
        let good_enough = combinations.iter().copied().filter(is_good_enough);
        let simplest = good_enough.min_by_key(|&at| self.trials[at].settings.changes(&from).len()).unwrap_or(best);
        combinations.iter().for_each(|&at| self.trials[at].kept = at == simplest);
        Ok(simplest)
    }

    /// Adds a candidate, unless it equals the current settings or has too many polling threads.
    fn add_candidate(&mut self, stage: &'static str, settings: Settings) -> Option<usize> {
        let (threads, limit) = (polling_threads(&settings), self.max_threads);
        if threads > limit {
            let advice = "give more cores (--cores), or use --start idle=event";
            self.left_out.push((settings, format!("{threads} polling threads exceed limit {limit}: {advice}")));
        } else if settings != self.trials[self.from].settings {
            self.trials.push(Trial { settings, sweep: self.sweep, stage, kept: true, ..Trial::default() });
            return Some(self.trials.len() - 1);
        }
        None
    }

    /// Runs the groups until one candidate of each is left. Returns those with a gain, the best first.
    fn halve(&mut self, mut groups: Vec<Vec<usize>>, passes: u16) -> Result<Vec<usize>, CommandError> {
        let mut remaining = groups.concat();
        while !remaining.is_empty() {
            for _ in 0..passes {
                self.pass(&remaining, 1)?;
            }
            for group in &mut groups {
                *group = self.above(f64::NEG_INFINITY, group);
                let half = group.len().div_ceil(2);
                group.drain(half..).for_each(|at| self.trials[at].kept = false);
            }
            remaining = groups.iter().filter(|group| group.len() > 1).flatten().copied().collect();
        }
        Ok(self.above(0.0, &groups.concat()))
    }

    /// Returns the candidates with more than this gain, the best first.
    fn above(&self, gain: f64, candidates: &[usize]) -> Vec<usize> {
        let gain_of = |at: usize| self.trials[at].gain();
        let mut above: Vec<usize> = candidates.iter().copied().filter(|&at| gain_of(at) > gain).collect();
        // The sort is stable, so among equal candidates the one declared first wins.
        above.sort_by(|&first, &second| gain_of(second).total_cmp(&gain_of(first)));
        above
    }

    /// Runs each of these candidates once, unless it has failed, with a reference run in each block of them. A
    /// candidate is compared with the reference runs of its block and of `beside` blocks on both sides.
    fn pass(&mut self, candidates: &[usize], beside: usize) -> Result<(), CommandError> {
        let mut order: Vec<usize> = candidates.iter().copied().filter(|&at| self.trials[at].failed.is_none()).collect();
        self.random.shuffle(&mut order);
        let mut runs = Vec::new();
        for block in order.chunks(BLOCK) {
            let (place, mut block) = (self.references.len(), block.to_vec());
            block.insert(self.random.usize(0..=block.len()), self.from);
            for at in block {
                let settings = self.trials[at].settings.clone();
                let outcome = (self.runner)(&settings)?;
                // A failed run is repeated once, because the host may have stalled.
                let outcome = if outcome.is_ok() { outcome } else { (self.runner)(&settings)? };
                match outcome {
                    Ok((figure, info)) => {
                        let figure = f64::from(figure);
                        self.trials[at].figures.push(figure);
                        self.trials[at].info = info;
                        self.references.extend((at == self.from).then_some(figure));
                        runs.extend((at != self.from).then_some((at, place, figure)));
                    }
                    Err(why) if at == self.from => {
                        return Err(CommandError::Failed(format!("the start does not run ({settings}): {why}")));
                    }
                    Err(why) => self.trials[at].failed = Some(why),
                }
            }
        }
        let (sign, width) = (self.args.aim.description().sign, 2 * beside + 1);
        for (at, place, figure) in runs {
            let end = (place + beside + 1).max(width).min(self.references.len());
            let reference = median(&self.references[end.saturating_sub(width)..end]).unwrap_or(figure);
            self.trials[at].gains.push(sign * (figure / reference).ln());
        }
        Ok(())
    }

    /// Compares the best trial with the start in pairs of runs, in random order. A candidate that fails in these
    /// runs is not recommended.
    fn compare(mut self) -> Result<SearchResult, CommandError> {
        let mut best = Trial { settings: self.trials[self.from].settings.clone(), ..Trial::default() };
        let mut comparison = None;
        if self.from > 0 {
            (self.from, self.references) = (0, Vec::new());
            self.trials.push(best);
            for _ in 0..self.args.pairs {
                self.pass(&[self.trials.len() - 1], 0)?;
            }
            best = self.trials.pop().unwrap_or_default();
            let same_settings = self.trials.iter_mut().filter(|trial| trial.settings == best.settings);
            same_settings.for_each(|trial| trial.failed.clone_from(&best.failed));
            let sign = self.args.aim.description().sign;
            comparison = Difference::from_gains(&best.gains, sign).filter(|_| best.failed.is_none());
        }
        Ok(SearchResult { trials: self.trials, left_out: self.left_out, best, comparison })
    }
}
