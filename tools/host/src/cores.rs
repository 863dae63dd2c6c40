//! Sets of core numbers.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Linux has fewer cores than this (`CONFIG_NR_CPUS`).
const MAX_CORES: usize = 8192;

/// Set of core numbers, in the kernel's notation: `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreList(BTreeSet<usize>);

impl CoreList {
    /// Iterates over the cores in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// Number of cores.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set contains this core.
    pub fn contains(&self, core: usize) -> bool {
        self.0.contains(&core)
    }

    /// The cores in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// The cores of this set that are not in the other.
    pub fn difference(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// The cores in either set.
    pub fn union(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// Parses a hexadecimal mask with a comma between words of 32 bits. Returns `None` if it is malformed.
    pub(crate) fn from_mask(mask: &str) -> Option<Self> {
        let mut cores = BTreeSet::new();
        for (word, digits) in mask.trim().rsplit(',').enumerate() {
            let bits = u32::from_str_radix(digits, 16).ok()?;
            cores.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| word * 32 + bit));
        }
        Some(Self(cores))
    }

    /// Returns the set as a hexadecimal mask, the inverse of [`from_mask`](Self::from_mask).
    pub(crate) fn mask(&self) -> String {
        let words = self.iter().next_back().map_or(1, |last| last / 32 + 1);
        let word = |word: usize| {
            self.iter().filter(|core| core / 32 == word).fold(0_u32, |bits, core| bits | 1 << (core % 32))
        };
        let words: Vec<String> = (0..words).rev().map(|at| format!("{:08x}", word(at))).collect();
        words.join(",")
    }
}

impl FromIterator<usize> for CoreList {
    fn from_iter<I: IntoIterator<Item = usize>>(cores: I) -> Self {
        Self(cores.into_iter().collect())
    }
}

impl FromStr for CoreList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cores = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse().ok().filter(|core: &usize| *core < MAX_CORES);
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => cores.extend(first..=last),
                _ => {
                    return Err(format!(
                        "invalid core `{part}`: expected numbers below {MAX_CORES} and ranges, e.g. 2,4-7"
                    ));
                }
            }
        }
        Ok(Self(cores))
    }
}

impl fmt::Display for CoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<usize> = self.iter().collect();
        for (at, run) in all.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [one] => write!(f, "{comma}{one}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl Serialize for CoreList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_printed_in_the_notation_of_the_kernel() {
        for text in ["", "0", "0-3,8", "1,3,5-6", "0-1,64-65"] {
            assert_eq!(text.parse::<CoreList>().unwrap().to_string(), text);
        }
        for text in ["a", "3-1", "1-", "-1", "0-99999999999", "8192", "1;2"] {
            assert!(text.parse::<CoreList>().unwrap_err().contains("invalid core"), "{text}");
        }
    }

    #[test]
    fn masks_convert_to_lists_and_back() {
        for (mask, list) in [("0000000f", "0-3"), ("00000001,80000000", "31-32"), ("00000000", "")] {
            let cores = CoreList::from_mask(mask).unwrap();
            assert_eq!(cores.to_string(), list);
            assert_eq!(cores.mask(), mask);
        }
        assert_eq!(CoreList::from_mask("3\n").unwrap().to_string(), "0-1");
        assert_eq!(CoreList::from_mask("x"), None);
    }
}
