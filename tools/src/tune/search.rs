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
//! *Together.* The winners with a gain, at most [`Plan::combine`], are tried in every combination, again by halving,
//! with new runs. That misses pairs of knobs that help only together. Another sweep, from the result, finds some.
//!
//! *One knob less.* In the best combination each knob alone is reset. If that costs no more than the standard error of
//! the difference, it stays reset. So knobs without a gain keep their values.
//!
//! *The duel.* The best of many was also lucky. Its final figures come only from later runs, in pairs with the start.

use clap::builder::RangedU64ValueParser;
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::TuneError;
use super::aim::Aim;
use super::paired::{Difference, FEWEST, median, standard_error};
use super::settings::Settings;
use super::space::{Candidates, Space};

/// Candidates per run of the start.
const BLOCK: usize = 3;
/// Runs of the start that a candidate is compared with.
const REFERENCES: usize = 3;

/// Consecutive failures that exclude a candidate: a host that stalls briefly fails one run.
const TRIES: usize = 2;
/// Consecutive failures of the start that end the tuning.
const TRIES_OF_START: usize = 3;

/// Runs candidates.
pub(super) trait Machine {
    /// One run: its figure, or a failure due to the candidate.
    ///
    /// # Errors
    /// The tuning cannot continue.
    fn run(&mut self, settings: &Settings) -> Result<Result<Measured, String>, TuneError>;

    /// Announces the next phase, and the most runs left including it.
    fn begin(&mut self, _what: &str, _runs_left: usize) {}
}

/// What one run has measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) figure: f64,
    /// The credit limit, which `rpcperf` adjusts to the load.
    pub(super) credits: Option<u32>,
    /// Not of a debug build.
    pub(super) optimized: bool,
}

/// Number of runs.
#[derive(clap::Args, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Runs of each candidate in a round
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = RangedU64ValueParser::<usize>::new().range(1..=100))]
    pub(super) repeats: usize,
    /// Pairs of runs in the final comparison of the best with the start
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = RangedU64ValueParser::<usize>::new().range(FEWEST as u64..=200))]
    pub(super) pairs: usize,
    /// Most knobs changed together
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = RangedU64ValueParser::<usize>::new().range(1..=6))]
    pub(super) combine: usize,
    /// Searches, each from the last one's result, until one finds nothing
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = RangedU64ValueParser::<usize>::new().range(1..=10))]
    pub(super) sweeps: usize,
    /// Seed of the random order of runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
}

/// Phase that a candidate belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// One knob of the start is changed.
    Alone,
    /// Winners are combined.
    Together,
    /// One of these is reset; or none, as the reference.
    Less,
}

impl Stage {
    /// All, in their order.
    pub(super) const ALL: [Self; 3] = [Self::Alone, Self::Together, Self::Less];

    /// Its name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Alone => "one knob at a time",
            Self::Together => "winners together",
            Self::Less => "one knob less",
        }
    }
}

/// A candidate and its results.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Trial {
    pub(super) settings: Settings,
    /// Searches before this one.
    pub(super) sweep: usize,
    pub(super) stage: Stage,
    pub(super) figures: Vec<f64>,
    /// Against the start of its sweep.
    pub(super) gains: Vec<f64>,
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
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) trials: Vec<Trial>,
    pub(super) left_out: Vec<(Settings, String)>,
    /// All runs of the start.
    pub(super) start: Vec<Measured>,
    /// The best candidate, or the start if nothing was better.
    pub(super) best: Settings,
    /// Its runs in the duel.
    pub(super) of_best: Vec<Measured>,
    /// Result of the duel; `None` if the best is the start.
    pub(super) duel: Option<Difference>,
}

impl Found {
    /// The best is proven better than the start.
    pub(super) fn is_proven(&self) -> bool {
        self.duel.is_some_and(|duel| duel.is_gain())
    }

    /// The recommendation: the best if it is proven, or else the start.
    pub(super) fn recommended<'a>(&'a self, start: &'a Settings) -> &'a Settings {
        if self.is_proven() { &self.best } else { start }
    }
}

/// Searches a space.
///
/// # Errors
/// A run of the reference settings failed, or the machine cannot continue.
pub(super) fn search(space: &Space, aim: Aim, plan: Plan, machine: &mut dyn Machine) -> Result<Found, TuneError> {
    let found = Found { best: space.start().clone(), ..Found::default() };
    let mut search = Search {
        space,
        aim,
        plan,
        machine,
        random: Rng::with_seed(plan.seed),
        found,
        sweep: 0,
        references: Vec::new(),
    };
    for sweep in 0..plan.sweeps {
        search.sweep = sweep;
        search.references.clear();
        let from = search.found.best.clone();
        search.found.best = search.sweep(&from)?;
        if search.found.best == from {
            break;
        }
    }
    search.duel()?;
    Ok(search.found)
}

/// The state of a search.
struct Search<'a> {
    space: &'a Space,
    aim: Aim,
    plan: Plan,
    machine: &'a mut dyn Machine,
    random: Rng,
    found: Found,
    sweep: usize,
    /// Figures of this sweep's reference runs, in the order of blocks.
    references: Vec<f64>,
}

impl Search<'_> {
    /// The best around these settings.
    fn sweep(&mut self, from: &Settings) -> Result<Settings, TuneError> {
        let Candidates { of_knob, left_out } = self.space.around(from);
        self.leave_out(left_out);
        let leagues: Vec<Vec<usize>> = of_knob.into_iter().map(|all| self.enter(all, Stage::Alone)).collect();
        let ahead = self.plan.after_leagues(leagues.len());
        let winners = self.halve(from, leagues, Stage::Alone, ahead)?;
        let winners: Vec<Settings> =
            winners.into_iter().take(self.plan.combine).map(|at| self.settings(at).clone()).collect();
        if winners.len() < 2 {
            return Ok(winners.into_iter().next().unwrap_or_else(|| from.clone()));
        }
        let Candidates { of_knob, left_out } = self.space.together(from, &winners);
        self.leave_out(left_out);
        let together = of_knob.into_iter().map(|all| self.enter(all, Stage::Together)).collect();
        let ahead = self.plan.after_combinations(winners.len());
        match self.halve(from, together, Stage::Together, ahead)?.first() {
            Some(&best) => self.simplest(from, best),
            None => Ok(from.clone()),
        }
    }

    /// Resets knobs that are not worth changing, one after another.
    fn simplest(&mut self, from: &Settings, best: usize) -> Result<Settings, TuneError> {
        let mut best = self.settings(best).clone();
        loop {
            let turned = best.turned(from);
            if turned.len() < 2 {
                return Ok(best);
            }
            let less = turned.iter().map(|&knob| best.put_back(knob, from));
            let less = less.filter(|settings| self.space.allows(settings));
            let all = self.enter(std::iter::once(best.clone()).chain(less).collect(), Stage::Less);
            self.machine.begin(Stage::Less.name(), self.plan.after_combinations(turned.len()));
            for _ in 0..2 * self.plan.repeats {
                self.pass(from, &all)?;
            }
            let trials = &mut self.found.trials;
            let whole = all[0];
            let costs_nothing = |at: &usize| {
                let (one, other) = (&trials[whole], &trials[*at]);
                let error = standard_error(&one.gains).hypot(standard_error(&other.gains));
                other.failed.is_none() && one.gain() - other.gain() <= error
            };
            let less = all[1..].iter().copied().filter(costs_nothing);
            let chosen = less.max_by(|&one, &other| trials[one].gain().total_cmp(&trials[other].gain()));
            let kept = chosen.unwrap_or(whole);
            for at in all {
                trials[at].stayed &= at == kept;
            }
            if trials[kept].gain() <= 0.0 {
                return Ok(from.clone());
            }
            best = trials[kept].settings.clone();
            if chosen.is_none() {
                return Ok(best);
            }
        }
    }

    fn settings(&self, at: usize) -> &Settings {
        &self.found.trials[at].settings
    }

    fn enter(&mut self, all: Vec<Settings>, stage: Stage) -> Vec<usize> {
        let first = self.found.trials.len();
        let sweep = self.sweep;
        self.found.trials.extend(all.into_iter().map(|settings| Trial {
            settings,
            sweep,
            stage,
            figures: Vec::new(),
            gains: Vec::new(),
            failed: None,
            stayed: true,
        }));
        (first..self.found.trials.len()).collect()
    }

    fn leave_out(&mut self, more: Vec<(Settings, String)>) {
        for one in more {
            if !self.found.left_out.contains(&one) {
                self.found.left_out.push(one);
            }
        }
    }

    /// Runs leagues until one candidate is left of each. Returns those with a gain, the best first. Later phases take
    /// at most `ahead` runs.
    fn halve(
        &mut self,
        from: &Settings,
        mut leagues: Vec<Vec<usize>>,
        stage: Stage,
        ahead: usize,
    ) -> Result<Vec<usize>, TuneError> {
        let mut all: Vec<usize> = leagues.concat();
        loop {
            let lengths = leagues.iter().map(Vec::len).collect();
            self.machine.begin(stage.name(), self.plan.rounds(lengths, all.len()) + ahead);
            for _ in 0..self.plan.repeats {
                self.pass(from, &all)?;
            }
            let trials = &mut self.found.trials;
            for league in &mut leagues {
                league.retain(|&at| trials[at].failed.is_none());
                // A stable sort: of equal candidates the first declared wins.
                league.sort_by(|&one, &other| trials[other].gain().total_cmp(&trials[one].gain()));
                let half = league.len().div_ceil(2);
                league.drain(half..).for_each(|at| trials[at].stayed = false);
            }
            all = leagues.iter().filter(|league| league.len() > 1).flatten().copied().collect();
            if all.is_empty() {
                let mut winners = leagues.concat();
                winners.retain(|&at| trials[at].gain() > 0.0);
                winners.sort_by(|&one, &other| trials[other].gain().total_cmp(&trials[one].gain()));
                return Ok(winners);
            }
        }
    }

    /// Runs each of these once, unless it has failed, with the start in each block of them.
    fn pass(&mut self, from: &Settings, these: &[usize]) -> Result<(), TuneError> {
        let mut order: Vec<usize> = these.to_vec();
        order.retain(|&at| self.found.trials[at].failed.is_none());
        self.random.shuffle(&mut order);
        let mut figures = Vec::with_capacity(order.len());
        for block in order.chunks(BLOCK) {
            let place = self.random.usize(0..=block.len());
            for turn in 0..=block.len() {
                if turn == place {
                    let figure = self.run_start(from)?;
                    self.references.push(figure);
                }
                let Some(&at) = block.get(turn) else { continue };
                let settings = self.settings(at).clone();
                match self.run(&settings, TRIES)? {
                    // The block's reference is the next run, or was the last.
                    Ok(measured) => {
                        figures.push((at, measured.figure, self.references.len() - usize::from(turn > place)))
                    }
                    Err(why) => {
                        let trial = &mut self.found.trials[at];
                        (trial.failed, trial.stayed) = (Some(why), false);
                    }
                }
            }
        }
        for (at, figure, block) in figures {
            let first = block.saturating_sub(1).min(self.references.len().saturating_sub(REFERENCES));
            let near = &self.references[first..self.references.len().min(first + REFERENCES)];
            let gain = median(near).map_or(0.0, |reference| self.aim.gain(figure, reference));
            let trial = &mut self.found.trials[at];
            trial.figures.push(figure);
            trial.gains.push(gain);
        }
        Ok(())
    }

    /// A successful run, or the last failure of so many tries.
    fn run(&mut self, settings: &Settings, tries: usize) -> Result<Result<Measured, String>, TuneError> {
        let mut outcome = self.machine.run(settings)?;
        for _ in 1..tries {
            if outcome.is_ok() {
                break;
            }
            outcome = self.machine.run(settings)?;
        }
        Ok(outcome)
    }

    /// A run of the reference settings.
    fn run_start(&mut self, from: &Settings) -> Result<f64, TuneError> {
        let measured = self.run(from, TRIES_OF_START)?;
        let measured = measured.map_err(|why| TuneError::Start(format!("({from}): {why}")))?;
        if from == self.space.start() {
            self.found.start.push(measured);
        }
        Ok(measured.figure)
    }

    /// Pairs of the start and the best, in random order.
    fn duel(&mut self) -> Result<(), TuneError> {
        let start = self.space.start().clone();
        let best = self.found.best.clone();
        self.machine.begin("the duel", if best == start { 0 } else { 2 * self.plan.pairs });
        let mut gains = Vec::with_capacity(self.plan.pairs);
        for _ in 0..if best == start { 0 } else { self.plan.pairs } {
            let (before, of_best, after) = if self.random.bool() {
                (Some(self.run_start(&start)?), self.run(&best, TRIES)?, None)
            } else {
                let of_best = self.run(&best, TRIES)?;
                (None, of_best, Some(self.run_start(&start)?))
            };
            match of_best {
                Ok(measured) => {
                    self.found.of_best.push(measured);
                    let figure = before.or(after).unwrap_or(measured.figure);
                    gains.push(self.aim.gain(measured.figure, figure));
                }
                Err(why) => {
                    // A configuration that fails occasionally is not recommended.
                    for trial in self.found.trials.iter_mut().filter(|trial| trial.settings == best) {
                        trial.failed = Some(why.clone());
                    }
                    return Ok(());
                }
            }
        }
        self.found.duel = Difference::of(&gains);
        Ok(())
    }
}

impl Plan {
    /// Runs of one pass of so many candidates.
    fn pass(candidates: usize) -> usize {
        candidates + candidates.div_ceil(BLOCK)
    }

    /// Runs until leagues of these lengths have one candidate each, with a first round of so many candidates.
    fn rounds(&self, mut lengths: Vec<usize>, first: usize) -> usize {
        let mut runs = self.repeats * Self::pass(first);
        loop {
            lengths.iter_mut().for_each(|length| *length = length.div_ceil(2));
            let contested = lengths.iter().filter(|length| **length > 1).sum();
            if contested == 0 {
                return runs;
            }
            runs += self.repeats * Self::pass(contested);
        }
    }

    /// Most runs after the leagues of so many knobs.
    fn after_leagues(&self, knobs: usize) -> usize {
        let winners = knobs.min(self.combine);
        let together = (1 << winners) - 1;
        let combinations = if winners < 2 { 0 } else { self.rounds(vec![together], together) };
        combinations + self.after_combinations(winners)
    }

    /// Most runs after so many winners were combined.
    fn after_combinations(&self, winners: usize) -> usize {
        let less: usize = (2..=winners).map(|turned| 2 * self.repeats * Self::pass(turned + 1)).sum();
        less + 2 * self.pairs
    }
}

#[cfg(test)]
mod tests;
