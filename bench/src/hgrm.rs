//! Percentile distributions as text (`.hgrm`), for HdrHistogram plotters.
//!
//! Four columns: value (microseconds), percentile (0 to 1), cumulative samples, 1/(1-percentile). The last row has no
//! fourth column. Plotters skip it, the header, the empty line and the three comment lines.
#![forbid(unsafe_code)]

use std::io::{self, Write};

use crate::samples::{DIGITS, Samples};

/// Rows per halving of the distance to 100 %.
const TICKS_PER_HALF_DISTANCE: u32 = 5;
/// Nanoseconds of the samples per microsecond of the file.
const NS_PER_UNIT: f64 = 1000.0;

/// Writes the distribution of all samples.
pub(crate) fn write(out: &mut dyn Write, samples: &Samples) -> io::Result<()> {
    let histogram = samples.histogram();
    let digits = usize::from(DIGITS);
    writeln!(out, "{:>12} {:>14} {:>10} {:>14}\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)")?;
    let mut total = 0;
    for step in histogram.iter_quantiles(TICKS_PER_HALF_DISTANCE) {
        total += step.count_since_last_iteration();
        let value = step.value_iterated_to().min(samples.max()) as f64 / NS_PER_UNIT;
        let quantile = step.quantile_iterated_to();
        write!(out, "{value:>12.digits$} {quantile:>2.12} {total:>10}")?;
        if quantile < 1.0 {
            writeln!(out, " {:>14.2}", 1.0 / (1.0 - quantile))?;
        } else {
            writeln!(out)?;
        }
    }
    let (mean, deviation) = (samples.mean() / NS_PER_UNIT, histogram.stdev() / NS_PER_UNIT);
    let max = samples.max() as f64 / NS_PER_UNIT;
    let (buckets, sub_buckets) = layout(histogram.high());
    writeln!(out, "#[Mean    = {mean:>12.digits$}, StdDeviation   = {deviation:>12.digits$}]")?;
    writeln!(out, "#[Max     = {max:>12.digits$}, Total count    = {:>12}]", samples.count())?;
    writeln!(out, "#[Buckets = {buckets:>12}, SubBuckets     = {sub_buckets:>12}]")
}

/// Layout of an HDR histogram from 1 to `high`. Each bucket spans twice the previous one. The significant digits
/// determine the number of sub-buckets.
fn layout(high: u64) -> (u32, u64) {
    let sub_buckets = (2 * 10u64.pow(u32::from(DIGITS))).next_power_of_two();
    let mut buckets = 1;
    while (u128::from(sub_buckets) << (buckets - 1)) <= u128::from(high) {
        buckets += 1;
    }
    (buckets, sub_buckets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(values: impl Iterator<Item = u64>) -> String {
        let mut samples = Samples::new();
        values.for_each(|ns| samples.record(ns));
        let mut out = Vec::new();
        write(&mut out, &samples).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_distribution_has_a_header_rows_and_comments() {
        let text = text((1..=10_000).map(|i| i * 10));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "       Value     Percentile TotalCount 1/(1-Percentile)");
        assert_eq!(lines[1], "");
        let (rows, comments) = lines[2..].split_at(lines.len() - 5);
        let (last, rows) = rows.split_last().unwrap();
        assert_eq!(last.split_whitespace().collect::<Vec<_>>(), ["100.000", "1.000000000000", "10000"]);
        let mut before = (0.0, -1.0, 0);
        for row in rows {
            let columns: Vec<f64> = row.split_whitespace().map(|c| c.parse().unwrap()).collect();
            let [value, quantile, total, inverse] = columns[..] else { panic!("{row:?}") };
            assert!(value >= before.0 && quantile > before.1 && total as u64 >= before.2, "{row:?}");
            assert!((inverse - 1.0 / (1.0 - quantile)).abs() < 0.01 + inverse * 1e-6, "{row:?}");
            assert!(total >= quantile * 10_000.0 - 1.0, "{row:?}: at least that share lies below");
            before = (value, quantile, total as u64);
        }
        assert!(rows.len() > 40);
        assert_eq!(comments[0].split_whitespace().nth(2), Some("50.005,"));
        assert_eq!(comments[1], "#[Max     =      100.000, Total count    =        10000]");
        assert_eq!(comments[2], "#[Buckets =           26, SubBuckets     =         2048]");
    }

    #[test]
    fn a_distribution_has_one_row_of_100_percent() {
        for n in [1, 2, 3, 1000] {
            let text = text((1..=n).map(|i| i * 1_000_003));
            assert_eq!(text.matches(" 1.000000000000 ").count(), 1, "{n} samples:\n{text}");
        }
    }
}
