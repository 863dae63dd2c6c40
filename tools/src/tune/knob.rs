//! Knobs: their field, their option of `rpcperf`, and their values.

use std::fmt;
use std::str::FromStr;

use super::TuneError;

/// A field of `Config`, of `ServerConfig`, or of one of their parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Knob {
    Credits,
    Batch,
    CoalesceGrants,
    SignalEvery,
    ReceiveSize,
    Idle,
    SmallBuffers,
    MessageBuffers,
    BulkBuffers,
    Shards,
    Workers,
}

/// The values of a knob.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Numbers, from the first to the last.
    Numbers(u64, u64),
    /// `on` or `off`; the option means `off`.
    Switch,
    /// One of these.
    Words(&'static [&'static str]),
    /// BYTES:N, joined by `+`.
    Classes,
}

/// Description of a knob.
pub(super) struct Row {
    /// The field.
    name: &'static str,
    /// The option of `rpcperf`.
    pub(super) option: &'static str,
    /// Value in `rpcperf` without the option; `None` if it depends on the load.
    pub(super) default: Option<&'static str>,
    values: Values,
    /// Only a server has it, or both ends must agree: one end alone cannot change it.
    pub(super) wants_server: bool,
}

const ALL: &[(Knob, Row)] = {
    use Values::{Classes, Numbers, Switch, Words};
    const fn row(
        name: &'static str,
        option: &'static str,
        default: Option<&'static str>,
        values: Values,
        wants_server: bool,
    ) -> Row {
        Row { name, option, default, values, wants_server }
    }
    &[
        (Knob::Credits, row("credits", "--credits", None, Numbers(4, 32_767), false)),
        (Knob::Batch, row("batch", "--no-batch", Some("on"), Switch, false)),
        (Knob::CoalesceGrants, row("coalesce_grants", "--no-coalesce", Some("on"), Switch, false)),
        (Knob::SignalEvery, row("signal_every", "--signal-every", Some("16"), Numbers(1, 65_536), false)),
        (Knob::ReceiveSize, row("receive_size", "--inline", Some("4096"), Numbers(1024, 1 << 20), true)),
        (Knob::Idle, row("idle", "--idle", Some("poll"), Words(&["poll", "adaptive", "event"]), false)),
        (Knob::SmallBuffers, row("small_buffers", "--small-buffers", None, Numbers(1, 1 << 20), false)),
        (Knob::MessageBuffers, row("message_buffers", "--message-buffers", None, Numbers(1, 1 << 20), false)),
        (Knob::BulkBuffers, row("bulk_buffers", "--bulk-buffers", None, Classes, true)),
        (Knob::Shards, row("shards", "--shards", Some("1"), Numbers(1, 256), true)),
        (Knob::Workers, row("workers", "--workers", Some("0"), Numbers(0, 256), true)),
    ]
};

impl Knob {
    /// All knobs, in order.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        ALL.iter().map(|(knob, _)| *knob)
    }

    /// Its description.
    pub(super) fn row(self) -> &'static Row {
        &ALL[self as usize].1
    }

    /// The name of the field.
    pub(super) fn name(self) -> &'static str {
        self.row().name
    }

    /// The canonical form of a value.
    ///
    /// # Errors
    /// The knob has no such value.
    pub(super) fn value(self, text: &str) -> Result<String, TuneError> {
        let text = text.trim();
        let (good, wanted) = match self.row().values {
            Values::Numbers(least, most) => {
                let number = text.parse().ok().filter(|number| (least..=most).contains(number));
                (number.map(|number: u64| number.to_string()), format!("a number from {least} to {most}"))
            }
            Values::Switch => (word(text, &["on", "off"]), "on or off".to_owned()),
            Values::Words(words) => (word(text, words), words.join(" or ")),
            Values::Classes => {
                let is_class = |text| class(text).is_some_and(|(size, count)| size > 0 && count > 0);
                let good = text.split('+').all(is_class).then(|| text.to_owned());
                (good, "BYTES:N, with + between several, e.g. 64K:32+1M:8".to_owned())
            }
        };
        good.ok_or_else(|| TuneError::Usage(format!("{}={text}: wanted {wanted}", self.name())))
    }

    /// The arguments of `rpcperf` that set this value.
    pub(super) fn arguments(self, value: &str) -> Vec<String> {
        let option = self.row().option.to_owned();
        match self.row().values {
            Values::Switch if value == "on" => Vec::new(),
            Values::Switch => vec![option],
            Values::Classes => vec![option, value.replace('+', ",")],
            Values::Numbers(..) | Values::Words(_) => vec![option, value.to_owned()],
        }
    }
}

/// Accepts the field's name, with `-` or `_`, and the names in `rpcperf` and in the protocol.
impl FromStr for Knob {
    type Err = TuneError;

    fn from_str(text: &str) -> Result<Self, TuneError> {
        let name = text.trim().replace('-', "_");
        let name = if name == "inline" { "receive_size" } else { &name };
        Self::all().find(|knob| knob.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::all().map(Self::name).collect();
            TuneError::Usage(format!("{text:?} is no knob: there are {}", names.join(", ")))
        })
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn word(text: &str, words: &[&str]) -> Option<String> {
    words.iter().find(|word| **word == text).map(|word| (*word).to_owned())
}

/// Bytes and number of BYTES:N; K and M are 1024 and 1024².
pub(super) fn class(text: &str) -> Option<(usize, usize)> {
    let (size, count) = text.split_once(':')?;
    let (digits, unit) = match size.as_bytes().last()? {
        b'K' | b'k' => (&size[..size.len() - 1], 1 << 10),
        b'M' | b'm' => (&size[..size.len() - 1], 1 << 20),
        _ => (size, 1),
    };
    Some((digits.parse::<usize>().ok()?.checked_mul(unit)?, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_knobs() {
        for (at, (knob, row)) in ALL.iter().enumerate() {
            assert_eq!((*knob as usize, knob.name()), (at, row.name));
            assert_eq!(knob.name().parse::<Knob>().unwrap(), *knob);
            if let Some(default) = row.default {
                assert_eq!(knob.value(default).unwrap(), default);
            }
        }
        assert_eq!("inline".parse::<Knob>().unwrap(), Knob::ReceiveSize);
        assert_eq!("signal-every".parse::<Knob>().unwrap(), Knob::SignalEvery);
        assert!("speed".parse::<Knob>().unwrap_err().to_string().contains("there are credits, batch,"));
    }

    #[test]
    fn values_are_those_that_rpcperf_takes() {
        assert_eq!(Knob::Credits.value(" 0064").unwrap(), "64");
        assert_eq!(Knob::Credits.arguments("64"), ["--credits", "64"]);
        assert_eq!(
            (Knob::Batch.arguments("off"), Knob::Batch.arguments("on")),
            (vec!["--no-batch".to_owned()], vec![])
        );
        assert_eq!(Knob::BulkBuffers.arguments("64K:4+1M:2"), ["--bulk-buffers", "64K:4,1M:2"]);
        assert_eq!((class("64K:4"), class("1M:2"), class("7:1")), (Some((65536, 4)), Some((1 << 20, 2)), Some((7, 1))));
        for (knob, wrong) in [
            (Knob::Credits, "3"),
            (Knob::Credits, "many"),
            (Knob::Batch, "yes"),
            (Knob::Idle, "yield"),
            (Knob::BulkBuffers, "64K"),
            (Knob::BulkBuffers, "64K:0"),
            (Knob::BulkBuffers, "64K:4+"),
            (Knob::Shards, "0"),
        ] {
            let error = knob.value(wrong).unwrap_err().to_string();
            assert!(error.contains(knob.name()) && error.contains("wanted"), "{error}");
        }
    }
}
