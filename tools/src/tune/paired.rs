//! Statistics of pairs of runs: the exact sign test.
//!
//! A pair is a candidate's run and a nearby run of its reference, so that the host's state cancels from their ratio.
//! The test assumes only that without a difference both signs of a ratio's logarithm are equally likely. A run spoiled
//! by the host counts as one sign, however bad it was. Signed ranks (Wilcoxon) get more from the same values on a quiet
//! host. But two spoiled runs of a dozen make them miss that one candidate is twice the other.

/// Half of the probability outside an interval of 95 %.
const TAIL: f64 = 0.025;

/// Statistics of a difference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Difference {
    /// The estimate: the median.
    pub(super) estimate: f64,
    /// Lower bound of the interval. 95 % of such intervals contain the true median.
    pub(super) least: f64,
    /// Upper bound.
    pub(super) most: f64,
    /// Pairs whose difference is above 0.
    pub(super) better: usize,
    /// Pairs.
    pub(super) pairs: usize,
    /// Confidence that the median is above 0: 1 less the probability of so many such pairs by chance.
    pub(super) confidence: f64,
}

/// The fewest pairs for an interval of 95 %.
pub(super) const FEWEST: usize = 6;

impl Difference {
    /// Of these values; `None` for fewer than [`FEWEST`].
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let pairs = values.len();
        if pairs < FEWEST {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let chances = chances(pairs);
        // Values outside the interval at either end: so many or fewer are on one side with a probability below `TAIL`.
        let mut below = 0.0;
        let unlikely = chances.iter().take_while(|&&chance| {
            below += chance;
            below < TAIL
        });
        let out = unlikely.count().saturating_sub(1);
        // A value of 0 does not count as a gain.
        let better = values.iter().filter(|value| **value > 0.0).count();
        let by_chance: f64 = chances[better..].iter().sum();
        Some(Self {
            estimate: median(&sorted)?,
            least: sorted[out],
            most: sorted[pairs - 1 - out],
            better,
            pairs,
            confidence: (1.0 - by_chance).max(0.0),
        })
    }

    /// The whole interval is above 0.
    pub(super) fn is_gain(&self) -> bool {
        self.least > 0.0
    }
}

/// The probability of each number of values above 0, if both signs are equally likely.
fn chances(pairs: usize) -> Vec<f64> {
    let mut chances = vec![0.0; pairs + 1];
    chances[0] = 1.0;
    for _ in 0..pairs {
        for number in (0..=pairs).rev() {
            let before = if number > 0 { chances[number - 1] } else { 0.0 };
            chances[number] = (chances[number] + before) / 2.0;
        }
    }
    chances
}

/// The middle value, or the mean of the two middle ones.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The standard error of a median, by the median distance from it. Infinite for a single value.
pub(super) fn standard_error(values: &[f64]) -> f64 {
    let Some(middle) = median(values).filter(|_| values.len() > 1) else { return f64::INFINITY };
    let distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    // For normal values the standard deviation is 1.4826 such distances, and a median's error 1.2533 times a mean's.
    median(&distances).unwrap_or(0.0) * 1.4826 * 1.2533 / (values.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R: `binom.test(15, 20, alternative = "greater")` has p = 0.02069, and 14 of 20 have 0.05766.
    #[test]
    fn it_is_the_exact_test() {
        let of = |better: usize| {
            let values: Vec<f64> = (0..20).map(|n| if n < better { 1.0 + n as f64 } else { -1.0 }).collect();
            Difference::of(&values).unwrap()
        };
        let (proven, not) = (of(15), of(14));
        assert!((proven.confidence - (1.0 - 0.020_695)).abs() < 1e-5 && proven.is_gain(), "{proven:?}");
        assert!((not.confidence - (1.0 - 0.057_659)).abs() < 1e-5 && !not.is_gain(), "{not:?}");
        // All of six above 0: 1 in 64 by chance.
        let said = Difference::of(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        assert_eq!((said.confidence, said.estimate, said.least, said.most), (1.0 - 1.0 / 64.0, 3.5, 1.0, 6.0));
        assert_eq!(Difference::of(&[1.0; 5]), None);
        assert!((chances(200).iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn no_difference_is_no_gain() {
        let said = Difference::of(&[0.0; 12]).unwrap();
        assert_eq!((said.is_gain(), said.confidence), (false, 0.0));
        let both_ways = [0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.05, -0.06];
        let said = Difference::of(&both_ways).unwrap();
        assert!(!said.is_gain() && said.least < 0.0 && said.most > 0.0 && said.confidence < 0.7, "{said:?}");
    }

    #[test]
    fn the_interval_and_the_test_agree() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut gains, mut none) = (0, 0);
        for pairs in (FEWEST..20).cycle().take(400) {
            let values: Vec<f64> = (0..pairs).map(|_| random.f64() - 0.2).collect();
            let said = Difference::of(&values).unwrap();
            assert_eq!(said.is_gain(), said.confidence > 1.0 - TAIL, "{values:?} {said:?}");
            *(if said.is_gain() { &mut gains } else { &mut none }) += 1;
        }
        assert!(gains > 50 && none > 50);
    }

    #[test]
    fn a_spoiled_run_is_one_sign() {
        let mut values = [0.30, 0.28, 0.33, 0.29, 0.31, 0.32, 0.27, 0.34, 0.26, 0.35, 0.25, 0.24];
        (values[3], values[7]) = (-5.0, -2.0);
        let said = Difference::of(&values).unwrap();
        assert!(said.is_gain() && (0.2..0.35).contains(&said.estimate), "{said:?}");
    }

    #[test]
    fn middles_and_their_errors() {
        assert_eq!((median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (None, Some(2.0), Some(2.5)));
        assert_eq!(standard_error(&[1.0]), f64::INFINITY);
        assert_eq!(standard_error(&[2.0, 2.0, 2.0]), 0.0);
        let of = |count: usize| standard_error(&(0..count).map(|n| (n % 2) as f64).collect::<Vec<_>>());
        assert!(of(100) < of(4));
    }
}
