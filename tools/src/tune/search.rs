//! The search: leagues of values, combinations of winners, a final duel.
//!
//! *One knob at a time.* From the start, each knob alone takes each of its values. A grid has the product of all
//! numbers of values as candidates, this their sum. Knobs of this engine affect different costs and mostly do not
//! interact. The values of one knob form a league of their own. So a knob with five good values does not displace
//! another one's only good value.
//!
//! *Successive halving.* In each round each candidate runs several more times, and then the worse half of each league
//! is dropped, until one is left. Most runs go to candidates that are hard to distinguish.
//!
//! *Interleaved.* A pass runs each candidate once, in random order, with a run of the start in each [`BLOCK`] of them.
//! A candidate's gain is relative to the start's runs in its block and in the adjacent ones, a few runs away. Slower
//! changes of the host affect both. The median of these three counts, and the median of the gains. So no run that the
//! host spoiled decides, whether the candidate's or the start's.
//!
//! *Together.* The winners with a gain, at most `--combine`, are tried in every combination, again by halving, with new
//! runs. That misses pairs of knobs that help only together. Another sweep, from the result, finds some.
//!
//! *The simplest.* The combination with the fewest changes wins that has [`SHARE`] of the best one's gain. So knobs
//! without a gain keep their values.
//!
//! *The duel.* The best of many was also lucky. Its final figures come only from later runs, in pairs with the start:
//! passes of one candidate, with a gain relative to the start's run in the same pass.

use serde_json::Value;

use super::Args;
use super::knobs::{self, Change, Settings};
use super::paired::{Difference, median};
use crate::command::CommandError;

/// Candidates per run of the start.
const BLOCK: usize = 3;
/// Share of the best combination's gain that a simpler one must have.
const SHARE: f64 = 0.85;

/// What one run has measured, and its conditions (`test_info`); or a failure due to the candidate. In JSON, a number of
/// single precision keeps its value.
pub(super) type Outcome = Result<(f32, Value), String>;
/// Runs a candidate. An error ends the tuning.
type Runner<'a> = &'a mut dyn FnMut(&Settings) -> Result<Outcome, CommandError>;

/// A candidate, or the start, and its results.
#[derive(Clone, Debug, Default)]
pub(super) struct Trial {
    pub(super) settings: Settings,
    /// The number of its search, from 1.
    pub(super) sweep: u16,
    pub(super) stage: &'static str,
    pub(super) figures: Vec<f64>,
    /// Of each run against the start of its sweep.
    pub(super) gains: Vec<f64>,
    /// The conditions of its last run.
    pub(super) info: Value,
    pub(super) failed: Option<String>,
    /// It lost no round.
    pub(super) stayed: bool,
}

impl Trial {
    /// Its gain: the median.
    pub(super) fn gain(&self) -> f64 {
        median(&self.gains).filter(|_| self.failed.is_none()).unwrap_or(f64::NEG_INFINITY)
    }
}

/// Result of a search.
#[derive(Debug)]
pub(super) struct Found {
    /// The start, then the candidates.
    pub(super) trials: Vec<Trial>,
    pub(super) left_out: Vec<(Settings, String)>,
    /// The best candidate with its runs in the duel, or the start if nothing was better.
    pub(super) best: Trial,
    /// Result of the duel; `None` if the best is the start, or has failed.
    pub(super) duel: Option<Difference>,
}

/// Searches the values of `--knob` or the usual ones, on so many cores of this process.
///
/// # Errors
/// Runs of the start failed, or the tuning cannot continue.
pub(super) fn search(args: &Args, allowed: usize, runner: Runner<'_>) -> Result<Found, CommandError> {
    let cores = if args.cores.is_empty() { allowed } else { args.cores().len() };
    // Two are always allowed, for both ends, and as many as the start has.
    let threads = if args.remote { usize::MAX } else { cores.max(2).max(polling(&args.start())) };
    let trials = vec![Trial { settings: args.start(), ..Trial::default() }];
    let (random, references, left_out) = (fastrand::Rng::with_seed(args.seed), Vec::new(), Vec::new());
    let mut search = Search { args, threads, runner, random, sweep: 0, from: 0, references, trials, left_out };
    for sweep in 1..=args.sweeps {
        (search.sweep, search.references) = (sweep, Vec::new());
        let best = search.sweep()?;
        if best == search.from {
            break;
        }
        search.from = best;
    }
    search.duel()
}

/// The polling threads of these settings.
fn polling(settings: &Settings) -> usize {
    let [shards, workers] = ["shards", "workers"].map(|name| settings.get(name).parse::<u16>().map_or(0, usize::from));
    if settings.get("idle") == "poll" { 1 + shards + workers } else { 0 }
}

/// The state of a search.
struct Search<'a> {
    args: &'a Args,
    /// Polling threads that a candidate may have.
    threads: usize,
    runner: Runner<'a>,
    random: fastrand::Rng,
    sweep: u16,
    /// The trial that candidates are compared with.
    from: usize,
    /// Figures of its runs in this sweep, one for each block.
    references: Vec<f64>,
    trials: Vec<Trial>,
    left_out: Vec<(Settings, String)>,
}

impl Search<'_> {
    /// The best around the present settings.
    fn sweep(&mut self) -> Result<usize, CommandError> {
        let (from, mut leagues) = (self.trials[self.from].settings.clone(), Vec::new());
        for choice in knobs::tried(self.args) {
            let alone = choice.iter().map(|change| from.clone().with(change));
            leagues.push(alone.filter_map(|settings| self.enter("one knob at a time", settings)).collect());
        }
        let mut winners = self.halve(leagues, self.args.repeats)?;
        winners.truncate(self.args.combine.into());
        if winners.len() < 2 {
            return Ok(winners.pop().unwrap_or(self.from));
        }
        let won: Vec<Change> = winners.iter().flat_map(|&at| self.trials[at].settings.changes(&from)).collect();
        let all = (1..1_u32 << won.len()).filter_map(|bits| {
            let chosen = won.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, change)| change);
            self.enter("winners together", chosen.fold(from.clone(), Settings::with))
        });
        let all: Vec<usize> = all.collect();
        // They differ less than single knobs do, so each round has more runs.
        let winners = self.halve(vec![all.clone()], 2 * self.args.repeats)?;
        let Some(&best) = winners.first() else { return Ok(self.from) };
        let is_as_good = |at: &usize| self.trials[*at].gain() >= SHARE * self.trials[best].gain();
        let good = all.iter().copied().filter(is_as_good);
        let simplest = good.min_by_key(|&at| self.trials[at].settings.changes(&from).len()).unwrap_or(best);
        all.iter().for_each(|&at| self.trials[at].stayed = at == simplest);
        Ok(simplest)
    }

    /// Adds a candidate, unless it is none or has more polling threads than cores.
    fn enter(&mut self, stage: &'static str, settings: Settings) -> Option<usize> {
        let (threads, most) = (polling(&settings), self.threads);
        if threads > most {
            let advice = "give more cores by --cores, or --start idle=event";
            self.left_out.push((settings, format!("{threads} threads would poll, {most} at most may: {advice}")));
        } else if settings != self.trials[self.from].settings {
            self.trials.push(Trial { settings, sweep: self.sweep, stage, stayed: true, ..Trial::default() });
            return Some(self.trials.len() - 1);
        }
        None
    }

    /// Runs leagues until one candidate is left of each. Returns those with a gain, the best first.
    fn halve(&mut self, mut leagues: Vec<Vec<usize>>, passes: u16) -> Result<Vec<usize>, CommandError> {
        let mut all = leagues.concat();
        while !all.is_empty() {
            for _ in 0..passes {
                self.pass(&all, 1)?;
            }
            for league in &mut leagues {
                *league = self.above(f64::NEG_INFINITY, league);
                let half = league.len().div_ceil(2);
                league.drain(half..).for_each(|at| self.trials[at].stayed = false);
            }
            all = leagues.iter().filter(|league| league.len() > 1).flatten().copied().collect();
        }
        Ok(self.above(0.0, &leagues.concat()))
    }

    /// Those of these candidates that have more than this gain, the best first.
    fn above(&self, gain: f64, these: &[usize]) -> Vec<usize> {
        let gain_of = |at: usize| self.trials[at].gain();
        let mut above: Vec<usize> = these.iter().copied().filter(|&at| gain_of(at) > gain).collect();
        // A stable sort: of equal candidates the first declared wins.
        above.sort_by(|&one, &other| gain_of(other).total_cmp(&gain_of(one)));
        above
    }

    /// Runs each of these once, unless it has failed, with a reference run in each block of them. Compares with that of
    /// its block and of so many blocks on both sides.
    fn pass(&mut self, these: &[usize], beside: usize) -> Result<(), CommandError> {
        let mut order: Vec<usize> = these.iter().copied().filter(|&at| self.trials[at].failed.is_none()).collect();
        self.random.shuffle(&mut order);
        let mut runs = Vec::new();
        for block in order.chunks(BLOCK) {
            let (place, mut block) = (self.references.len(), block.to_vec());
            block.insert(self.random.usize(0..=block.len()), self.from);
            for at in block {
                let settings = self.trials[at].settings.clone();
                let outcome = (self.runner)(&settings)?;
                // A host that stalls briefly fails one run.
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
        let ((.., sign), width) = (self.args.aim.row(), 2 * beside + 1);
        for (at, place, figure) in runs {
            let end = (place + beside + 1).max(width).min(self.references.len());
            let near = median(&self.references[end.saturating_sub(width)..end]).unwrap_or(figure);
            self.trials[at].gains.push(sign * (figure / near).ln());
        }
        Ok(())
    }

    /// Pairs of runs of the best and the start, in random order. A candidate that fails in them is not recommended.
    fn duel(mut self) -> Result<Found, CommandError> {
        let mut best = Trial { settings: self.trials[self.from].settings.clone(), ..Trial::default() };
        let mut duel = None;
        if self.from > 0 {
            (self.from, self.references) = (0, Vec::new());
            self.trials.push(best);
            for _ in 0..self.args.pairs {
                self.pass(&[self.trials.len() - 1], 0)?;
            }
            best = self.trials.pop().unwrap_or_default();
            let same = self.trials.iter_mut().filter(|trial| trial.settings == best.settings);
            same.for_each(|trial| trial.failed.clone_from(&best.failed));
            let (.., sign) = self.args.aim.row();
            duel = Difference::of(&best.gains, sign).filter(|_| best.failed.is_none());
        }
        Ok(Found { trials: self.trials, left_out: self.left_out, best, duel })
    }
}
