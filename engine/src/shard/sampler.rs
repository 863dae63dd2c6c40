//! Sampling of calls, at irregular distances to cover patterns of calls.

#[derive(Debug)]
pub(super) struct Sampler {
    /// Calls until the next sample.
    until: u64,
    /// Average distance; 0 for no samples.
    every: u64,
    /// State of a xorshift generator; the same in each run.
    state: u64,
}

impl Sampler {
    /// Samples one of `every` calls on average: 1 for all, 0 for none.
    pub(super) fn new(every: u32) -> Self {
        let mut sampler = Self { until: 0, every: every.into(), state: 0x9E37_79B9_7F4A_7C15 };
        sampler.draw();
        sampler
    }

    /// Whether the next call is timed.
    #[inline(always)]
    pub(super) fn takes(&mut self) -> bool {
        self.until -= 1;
        self.until == 0 && self.draw()
    }

    /// Draws the next distance: 1 to twice the average less one. True if sampling is on.
    #[inline(never)]
    fn draw(&mut self) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // Without sampling, the count never reaches 0.
        self.until = (2 * self.every).checked_sub(1).map_or(u64::MAX, |most| self.state % most + 1);
        self.every > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_so_many_is_taken_in_the_mean_and_none_by_its_place() {
        let mut sampler = Sampler::new(64);
        let taken: Vec<u32> = (0..64_000).filter(|_| sampler.takes()).collect();
        assert!((900..1100).contains(&taken.len()), "{}", taken.len());
        for pattern in [2, 3, 64] {
            let of_first = taken.iter().filter(|&&call| call % pattern == 0).count();
            let share = taken.len() / pattern as usize;
            assert!((share / 2..2 * share + 2).contains(&of_first), "{of_first} of {} in {pattern}", taken.len());
        }
    }

    #[test]
    fn all_or_none() {
        let (mut all, mut none) = (Sampler::new(1), Sampler::new(0));
        assert!((0..1000).all(|_| all.takes()) && !(0..1000).any(|_| none.takes()));
    }
}
