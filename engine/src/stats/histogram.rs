//! Histograms in JSON: the usual quantiles, and all values with a precision of 1 %.
//!
//! Subtracting two snapshots gives the histogram of the time between them.

use hdrhistogram::Histogram;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Significant digits of the written values.
const DIGITS: u8 = 2;

/// JSON form of a histogram; only the buckets are read back.
#[derive(Serialize, Deserialize)]
#[serde(default)]
#[derive(Default)]
struct HistogramJson {
    count: u64,
    min: u64,
    max: u64,
    mean: f64,
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    /// Values with two significant digits, and their counts; smallest value first.
    buckets: Vec<(u64, u64)>,
}

pub(super) fn serialize<S: Serializer>(histogram: &Histogram<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    let buckets = |histogram: &Histogram<u64>| -> Vec<_> {
        histogram.iter_recorded().map(|at| (at.value_iterated_to(), at.count_since_last_iteration())).collect()
    };
    let at = |quantile| histogram.value_at_quantile(quantile);
    let written = HistogramJson {
        count: histogram.len(),
        min: histogram.min(),
        max: histogram.max(),
        mean: histogram.mean(),
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        buckets: if histogram.sigfig() > DIGITS {
            buckets(&from_buckets(&buckets(histogram)))
        } else {
            buckets(histogram)
        },
    };
    written.serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Histogram<u64>, D::Error> {
    Ok(from_buckets(&HistogramJson::deserialize(deserializer)?.buckets))
}

/// Builds the histogram of these values and counts.
fn from_buckets(buckets: &[(u64, u64)]) -> Histogram<u64> {
    let mut histogram = Histogram::new(DIGITS).expect("the number of digits is valid");
    for &(value, count) in buckets {
        // The histogram grows as needed, to 60 KiB at most.
        let _ = histogram.record_n(value, count);
    }
    histogram
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct SerializedHistogram(#[serde(with = "super")] Histogram<u64>);

    fn written(histogram: Histogram<u64>) -> Value {
        serde_json::to_value(SerializedHistogram(histogram)).expect("JSON")
    }

    fn read(value: Value) -> Histogram<u64> {
        serde_json::from_value::<SerializedHistogram>(value).expect("a histogram").0
    }

    #[test]
    fn a_histogram_is_read_back_within_one_percent() {
        let mut histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds");
        (1..=20_000u64).for_each(|n| histogram.record(n * 997).expect("within bounds"));
        let json = written(histogram.clone());
        assert_eq!(json["count"], 20_000);
        assert_eq!(json["p99"], histogram.value_at_quantile(0.99));
        assert!(json["buckets"].as_array().expect("an array").len() < 2000, "values have two digits");
        let back = read(json);
        assert_eq!(back.len(), histogram.len());
        for quantile in [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let (before, after) = (histogram.value_at_quantile(quantile), back.value_at_quantile(quantile));
            assert!(after.abs_diff(before) <= before / 100, "{quantile}: {before} became {after}");
        }
        assert_eq!(
            written(back.clone())["buckets"],
            written(read(written(back)))["buckets"],
            "a second round trip changes nothing"
        );
    }

    #[test]
    fn the_difference_of_two_snapshots_has_the_values_recorded_between_them() {
        let mut earlier = Histogram::new(3).expect("digits");
        earlier.record_n(100, 50).expect("it grows");
        let mut later = earlier.clone();
        later.record_n(9000, 7).expect("it grows");
        let (earlier, mut between) = (read(written(earlier)), read(written(later)));
        between.subtract(&earlier).expect("no count has decreased");
        assert_eq!((between.len(), between.min(), between.max()), (7, 8960, 9023));
    }

    #[test]
    fn histograms_that_are_empty_incomplete_or_saturated_are_read() {
        let empty = written(Histogram::new(3).expect("digits"));
        assert_eq!((&empty["count"], &empty["buckets"]), (&json!(0), &json!([])));
        assert!(read(empty).is_empty());
        assert!(read(json!({"more": 1})).is_empty());
        let saturated = read(json!({"buckets": [[0, 1], [u64::MAX, u64::MAX], [u64::MAX, u64::MAX]]}));
        assert_eq!(saturated.len(), u64::MAX);
    }
}
