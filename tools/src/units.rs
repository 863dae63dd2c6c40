//! Formats numbers for narrow columns, in at most six characters.

use std::time::Duration;

/// Formats a count or a rate with three digits and a unit.
pub(crate) fn format_count(value: f64) -> String {
    scaled(value, &["", "k", "M", "G", "T", "P", "E"], 1000.0)
}

/// Formats a number of bytes, in units of 1024.
pub(crate) fn format_bytes(value: f64) -> String {
    scaled(value, &["", "K", "M", "G", "T", "P", "E"], 1024.0)
}

/// Formats nanoseconds as a time.
pub(crate) fn format_time(nanoseconds: f64) -> String {
    match nanoseconds {
        short if short < 1e9 => scaled(short, &["ns", "µs", "ms"], 1000.0),
        long => format_span(long as u64),
    }
}

/// Formats a long time, given in nanoseconds, in its two largest units.
pub(crate) fn format_span(nanoseconds: u64) -> String {
    let seconds = Duration::from_nanos(nanoseconds).as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        86400..8_640_000 => format!("{}d{:02}h", seconds / 86400, seconds / 3600 % 24),
        _ => format!("{}d", seconds / 86400),
    }
}

/// Formats a fraction as a percentage.
pub(crate) fn format_percent(part: f64) -> String {
    let percent = part * 100.0;
    let digits = usize::from(percent > 0.0 && percent < 9.95);
    format!("{percent:.digits$}%")
}

fn scaled(value: f64, units: &[&str], step: f64) -> String {
    let mut value = value;
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    // A value that would round up to four digits uses the next unit.
    while value >= 999.5
        && let Some(next) = units.next()
    {
        (value, unit) = (value / step, next);
    }
    let digits = match value {
        whole if whole.fract() == 0.0 && unit.is_empty() => 0,
        small if small < 9.995 => 2,
        middle if middle < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_at_most_six_characters() {
        for (value, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (0.25, "0.25"),
            (12.34, "12.3"),
            (999.0, "999"),
            (999.6, "1.00k"),
            (1234.0, "1.23k"),
            (999_499.0, "999k"),
            (999_500.0, "1.00M"),
            (11_300_000.0, "11.3M"),
            (1.8e19, "18.0E"),
        ] {
            assert_eq!(format_count(value), text);
        }
        assert_eq!(
            (format_time(950.0), format_time(1500.0), format_time(2.5e6)),
            ("950ns".into(), "1.50µs".into(), "2.50ms".into())
        );
        assert_eq!(
            (format_time(6e10), format_bytes(65536.0), format_percent(0.456)),
            ("1m00s".into(), "64.0K".into(), "46%".into())
        );
        assert_eq!((format_span(59_999_999_999), format_span(3_720_000_000_000)), ("59s".into(), "1h02m".into()));
        assert_eq!(format_span(200_000_000_000_000), "2d07h");
        let mut value = 0.001;
        while value < 1e20 {
            for text in [format_count(value), format_bytes(value), format_time(value)] {
                assert!(text.chars().count() <= 6 || value > 1e18, "{value}: {text}");
            }
            value *= 1.07;
        }
    }
}
