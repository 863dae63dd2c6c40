//! Times and sizes in configuration files: `"10s"`, `"64KiB"`, or a number of bytes.

use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// The text of `Duration::MAX`, which means no limit.
const NEVER: &str = "never";

/// A time as text. An untagged enum, because only there `expecting` replaces serde's error text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a time such as \"10s\" or \"5ms\"")]
enum Time {
    Text(String),
}

impl Time {
    fn duration<E: Error>(self) -> Result<Duration, E> {
        let Self::Text(text) = self;
        match &text[..] {
            NEVER => Ok(Duration::MAX),
            _ => humantime::parse_duration(&text).map_err(|_| E::custom("expected a time such as \"10s\" or \"5ms\"")),
        }
    }
}

fn time_text(time: Duration) -> String {
    if time == Duration::MAX { NEVER.into() } else { humantime::format_duration(time).to_string() }
}

fn size_text(bytes: u64) -> String {
    let unit = [(30, "GiB"), (20, "MiB"), (10, "KiB")].into_iter().find(|(bits, _)| bytes.trailing_zeros() >= *bits);
    match unit.filter(|_| bytes > 0) {
        Some((bits, name)) => format!("{}{name}", bytes >> bits),
        None => format!("{bytes}B"),
    }
}

/// Expected form of a size.
const EXPECTED_SIZE: &str = "expected a size such as \"64KiB\", or a number of bytes";

/// A number of bytes, or a text such as `64KiB`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a size such as \"64KiB\", or a number of bytes")]
enum Size {
    Bytes(u64),
    Text(String),
}

impl Size {
    fn bytes<T: TryFrom<u64>, E: Error>(self) -> Result<T, E> {
        let bytes = match self {
            Self::Bytes(bytes) => bytes,
            Self::Text(text) => {
                let size = text.parse::<bytesize::ByteSize>();
                size.map_err(|_| E::custom(EXPECTED_SIZE))?.as_u64()
            }
        };
        T::try_from(bytes).map_err(|_| E::custom(format_args!("a size of {bytes} bytes is too large")))
    }
}

/// One time.
pub mod duration {
    use super::*;

    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&time_text(*time))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        Time::deserialize(from)?.duration()
    }
}

/// An optional time.
pub mod some_duration {
    use super::*;

    pub fn serialize<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_some(&time.map(time_text))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Option::<Time>::deserialize(from)?.map(Time::duration).transpose()
    }
}

/// A pair of times.
pub mod durations {
    use super::*;

    pub fn serialize<S: Serializer>(times: &(Duration, Duration), to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq([time_text(times.0), time_text(times.1)])
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<(Duration, Duration), D::Error> {
        let (first, second) = <(Time, Time)>::deserialize(from)?;
        Ok((first.duration()?, second.duration()?))
    }
}

/// A number of bytes.
pub mod bytes {
    use super::*;

    pub fn serialize<T: Copy + TryInto<u64>, S: Serializer>(bytes: &T, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&size_text((*bytes).try_into().unwrap_or(u64::MAX)))
    }

    pub fn deserialize<'de, T: TryFrom<u64>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        Size::deserialize(from)?.bytes()
    }
}

/// An optional number of bytes.
pub mod some_bytes {
    use super::*;

    pub fn serialize<S: Serializer>(bytes: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_some(&bytes.map(|bytes| size_text(bytes as u64)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
        Option::<Size>::deserialize(from)?.map(Size::bytes).transpose()
    }
}

/// Classes of buffers: bytes and number of each.
pub mod classes {
    use super::*;

    pub fn serialize<S: Serializer>(classes: &[(usize, usize)], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(classes.iter().map(|&(size, count)| (size_text(size as u64), count)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(usize, usize)>, D::Error> {
        let classes = Vec::<(Size, usize)>::deserialize(from)?;
        classes.into_iter().map(|(size, count)| Ok((size.bytes()?, count))).collect()
    }
}
