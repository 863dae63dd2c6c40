//! Conversion of names of the specification to Rust names.
//!
//! The rules are documented at [`generate`](super::generate).

use std::collections::HashSet;

use heck::{ToShoutySnakeCase, ToSnakeCase, ToUpperCamelCase};
use proc_macro2::{Ident, Span};

/// Names of one scope.
#[derive(Default)]
pub(super) struct Scope(HashSet<String>);

impl Scope {
    /// Creates a scope with reserved names.
    pub(super) fn with(names: &[&str]) -> Self {
        Self(names.iter().map(ToString::to_string).collect())
    }

    pub(super) fn camel(&mut self, name: &str) -> Ident {
        self.declare(words(name).to_upper_camel_case())
    }

    pub(super) fn snake(&mut self, name: &str) -> Ident {
        self.declare(words(name).to_snake_case())
    }

    pub(super) fn shouty(&mut self, name: &str) -> Ident {
        self.declare(words(name).to_shouty_snake_case())
    }

    /// Adds a name, with as many `_` appended as make it unique and valid.
    pub(super) fn declare(&mut self, mut name: String) -> Ident {
        if matches!(&*name, "self" | "super" | "crate" | "Self") {
            name.push('_');
        }
        while !self.0.insert(name.clone()) {
            name.push('_');
        }
        // `gen` is a keyword since edition 2024, but syn accepts it as an identifier.
        let ident = syn::parse_str(&name).ok().filter(|_| name != "gen");
        ident.unwrap_or_else(|| Ident::new_raw(&name, Span::call_site()))
    }
}

/// Inserts `_` after a digit if the case of letters changes there, so that `args` is a word in `READ3args`.
///
/// The result begins with a letter, apart from underscores.
fn words(name: &str) -> String {
    let mut words = String::new();
    if !is_identifier(name.trim_start_matches('_')) {
        words += "n_";
    }
    let mut upper = None;
    let mut after_digit = false;
    for c in name.chars() {
        if c.is_ascii_alphabetic() {
            if after_digit && upper == Some(true) && c.is_ascii_lowercase() {
                words.push('_');
            }
            upper = Some(c.is_ascii_uppercase());
        }
        after_digit = c.is_ascii_digit();
        words.push(c);
    }
    words
}

/// Length of the prefix that all `names` lose, in bytes.
///
/// It is the longest prefix that ends with `_`, with a digit, or before a `_` of one of the names, and leaves
/// different names that begin with a letter.
pub(super) fn common_prefix(names: &[&str]) -> usize {
    let [first, rest @ ..] = names else { return 0 };
    if rest.is_empty() {
        return 0;
    }
    let common_len = |name: &&str| first.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let longest = rest.iter().map(common_len).min().unwrap_or(0);
    let fits = |len: &usize| {
        let ends = first[..*len].ends_with(|c: char| c == '_' || c.is_ascii_digit())
            || names.iter().any(|name| name[*len..].starts_with('_'));
        let remainders = names.iter().map(|name| name[*len..].to_upper_camel_case());
        let mut seen = HashSet::new();
        ends && remainders.clone().all(|name| is_identifier(&name))
            && remainders.into_iter().all(|name| seen.insert(name))
    };
    (1..=longest).rev().find(fits).unwrap_or(0)
}

fn is_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_of_another_case_after_a_digit_begin_a_word() {
        let mut scope = Scope::default();
        let names = ["READ3args", "nfs_fh3", "NF3REG", "createhow3", "COMPOUND4args", "v4_x2y"]
            .map(|name| scope.camel(name).to_string());
        assert_eq!(names, ["Read3Args", "NfsFh3", "Nf3reg", "Createhow3", "Compound4Args", "V4X2y"]);
        assert_eq!(["_1", "_", "__2a"].map(|name| scope.snake(name).to_string()), ["n_1", "n", "n_2a"]);
    }

    #[test]
    fn common_prefixes_end_at_words() {
        for (names, left) in [
            (&["NFS3_OK", "NFS3ERR_PERM"][..], &["_OK", "ERR_PERM"][..]),
            (&["NFS_OK", "NFSERR_PERM"], &["_OK", "ERR_PERM"]),
            (&["STAT_FAIL", "STAT_FINE"], &["FAIL", "FINE"]),
            (&["RED", "REDDISH"], &["RED", "REDDISH"]),
            (&["V4_1", "V4_2"], &["V4_1", "V4_2"]),
            (&["SET_A", "SET_a"], &["SET_A", "SET_a"]),
            (&["ONLY_ONE"], &["ONLY_ONE"]),
        ] {
            let prefix = common_prefix(names);
            assert_eq!(names.iter().map(|name| &name[prefix..]).collect::<Vec<_>>(), left);
        }
    }
}
