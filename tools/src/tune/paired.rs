//! Statistics of pairs of runs: the exact sign test.
//!
//! A pair is a run of a candidate and a nearby run of its reference, so that the host's state cancels out of the
//! ratio. The test assumes only that without a difference both signs of the ratio's logarithm are equally likely. A run
//! that the host disturbed counts as one sign, however bad it was. Signed ranks (Wilcoxon) need fewer values on a quiet
//! host, but if two of a dozen runs are disturbed, they miss that one candidate is twice as good as the other.

/// Probability of each side outside of a 95 % interval.
const TAIL: f64 = 0.025;
/// Confidence above which a gain is proven.
pub(super) const PROOF: f64 = 1.0 - TAIL;

/// Statistics of a difference, as a ratio of figures.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(super) struct Difference {
    pub(super) pairs: usize,
    /// Pairs with a gain.
    pub(super) better: usize,
    /// The median ratio, which is the estimate.
    pub(super) ratio: f64,
    /// 95 % of such intervals contain the true median.
    pub(super) interval: [f64; 2],
    /// Confidence in a gain, which is 1 minus the probability of at least as many better pairs by chance. Above
    /// [`PROOF`], the whole interval is a gain.
    pub(super) confidence: f64,
}

impl Difference {
    /// Computes the statistics of gains, which are logarithms of ratios, or with `sign` -1 of their reciprocals.
    /// Returns `None` for fewer than 6 gains, which have no 95 % interval.
    pub(super) fn from_gains(gains: &[f64], sign: f64) -> Option<Self> {
        let pairs = gains.len();
        // `up_to[n]` is the probability of at most `n` positive gains, if both signs are equally likely.
        let up_to = (0..pairs).scan((0.0, 0.5_f64.powi(pairs as i32)), |(sum, chance), above| {
            *sum += *chance;
            *chance *= (pairs - above) as f64 / (above + 1) as f64;
            Some(*sum)
        });
        let up_to: Vec<f64> = up_to.collect();
        // Number of values outside the interval on each side: the largest `n` for which `up_to[n]` is below `TAIL`.
        let outside = up_to.iter().take_while(|chance| **chance < TAIL).count().checked_sub(1)?;
        let mut sorted = gains.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[outside], sorted[pairs - 1 - outside]);
        let [ratio, first_bound, second_bound] = [median(&sorted)?, low, high].map(|gain| (sign * gain).exp());
        // 0 does not count as a gain.
        let better = gains.iter().filter(|gain| **gain > 0.0).count();
        let confidence = better.checked_sub(1).map_or(0.0, |fewer| up_to[fewer]);
        let interval = [first_bound.min(second_bound), first_bound.max(second_bound)];
        Some(Self { pairs, better, ratio, interval, confidence })
    }
}

/// Returns the middle value, or the mean of the two middle values.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = sorted.get(sorted.len() / 2)?;
    Some((sorted[(sorted.len() - 1) / 2] + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R: `binom.test(15, 20, alternative = "greater")` has p = 0.02069, and 14 of 20 have 0.05766.
    #[test]
    fn confidences_are_those_of_the_exact_sign_test() {
        let difference = |better: usize| {
            let values: Vec<f64> = (0..20).map(|n| if n < better { 1.0 + n as f64 } else { -1.0 }).collect();
            Difference::from_gains(&values, 1.0).unwrap()
        };
        let (proven, not) = (difference(15), difference(14));
        assert!((proven.confidence - (1.0 - 0.020_695)).abs() < 1e-5 && proven.interval[0] > 1.0, "{proven:?}");
        assert!((not.confidence - (1.0 - 0.057_659)).abs() < 1e-5 && not.interval[0] <= 1.0, "{not:?}");
        // Six of six gains have a probability of 1/64 by chance.
        let stats = Difference::from_gains(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1.0).unwrap();
        assert_eq!((stats.confidence, stats.ratio), (1.0 - 1.0 / 64.0, 3.5_f64.exp()));
        assert_eq!((stats.better, stats.pairs, stats.interval), (6, 6, [1.0_f64.exp(), 6.0_f64.exp()]));
        // If lower is better, the same gains mean lower figures.
        let less = Difference::from_gains(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], -1.0).unwrap();
        assert_eq!((less.confidence > PROOF, less.interval), (true, [(-6.0_f64).exp(), (-1.0_f64).exp()]));
        assert_eq!(Difference::from_gains(&[1.0; 5], 1.0), None);
        assert!((Difference::from_gains(&[1.0; 200], 1.0).unwrap().confidence - 1.0).abs() < 1e-12);
    }

    #[test]
    fn equal_or_mixed_values_are_not_a_gain() {
        let stats = Difference::from_gains(&[0.0; 12], 1.0).unwrap();
        assert_eq!((stats.interval, stats.confidence), ([1.0; 2], 0.0));
        let both_ways = [0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.05, -0.06];
        let stats = Difference::from_gains(&both_ways, 1.0).unwrap();
        assert!(stats.interval[0] < 1.0 && stats.interval[1] > 1.0 && stats.confidence < 0.7, "{stats:?}");
    }

    #[test]
    fn a_gain_is_proven_exactly_if_the_interval_is_a_gain() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut gains, mut none) = (0, 0);
        for pairs in (6..20).cycle().take(400) {
            let values: Vec<f64> = (0..pairs).map(|_| random.f64() - 0.2).collect();
            let stats = Difference::from_gains(&values, 1.0).unwrap();
            assert_eq!(stats.interval[0] > 1.0, stats.confidence > PROOF, "{values:?} {stats:?}");
            *(if stats.confidence > PROOF { &mut gains } else { &mut none }) += 1;
        }
        assert!(gains > 50 && none > 50);
    }

    #[test]
    fn two_disturbed_runs_do_not_hide_a_gain() {
        let mut values = [0.30, 0.28, 0.33, 0.29, 0.31, 0.32, 0.27, 0.34, 0.26, 0.35, 0.25, 0.24];
        (values[3], values[7]) = (-5.0, -2.0);
        let stats = Difference::from_gains(&values, 1.0).unwrap();
        assert!(stats.confidence > PROOF && (0.2..0.35).contains(&stats.ratio.ln()), "{stats:?}");
    }

    #[test]
    fn medians_are_the_middle_or_the_mean_of_two() {
        assert_eq!((median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (None, Some(2.0), Some(2.5)));
    }
}
