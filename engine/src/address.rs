//! Where a server is: which fabric, and the fabric's own address.

use std::fmt;
use std::str::FromStr;

use crate::fabric::FabricAddress;

/// An address with its fabric: `soft:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// The software fabric: processes of one host.
    Soft(FabricAddress),
}

/// A text that is no address: what is wrong with it, and what addresses look like.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no address: {detail}; addresses look like soft:NAME or soft:/path/to/socket")]
pub struct AddressError {
    /// As given.
    pub text: String,
    /// What is wrong.
    pub detail: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |detail| AddressError { text: text.into(), detail };
        let (fabric, rest) = text.split_once(':').ok_or_else(|| error("it names no fabric"))?;
        if rest.is_empty() {
            return Err(error("nothing follows the colon"));
        }
        match fabric {
            "soft" => Ok(Self::Soft(FabricAddress(rest.into()))),
            "verbs" => Err(error("this build has no verbs fabric")),
            _ => Err(error("the fabric is unknown")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Soft(FabricAddress(name)) = self;
        write!(f, "soft:{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were_written() {
        let address: Address = "soft:a/b".parse().unwrap();
        assert_eq!(address, Address::Soft(FabricAddress("a/b".into())));
        assert_eq!(address.to_string(), "soft:a/b");
    }

    #[test]
    fn what_is_no_address_is_explained() {
        for (text, why) in [
            ("", "no fabric"),
            ("soft", "no fabric"),
            ("soft:", "follows"),
            ("tcp:h:1", "unknown"),
            ("verbs:h:1", "no verbs"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("soft:NAME"), "{error}");
        }
    }
}
