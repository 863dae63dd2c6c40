//! Helpers of tests that run once for each row of a table.

use std::fmt::{Debug, Display};

use rpcrdma::{CreditMode, Services};

use crate::raw::RawPeer;
use crate::services::standard_services;
use crate::world::World;

/// Guard that prints a row's name if the test fails before the drop.
pub struct Row(String);

/// Begins a row of a table. The drop of the guard ends the row.
pub fn row(name: impl Debug) -> Row {
    Row(format!("{name:?}"))
}

impl Drop for Row {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in row {}", self.0);
        }
    }
}

/// Runs a test for each row of a table. A failure names the row.
pub fn for_each<T: Debug>(rows: impl IntoIterator<Item = T>, mut test: impl FnMut(T)) {
    for item in rows {
        let _row = row(&item);
        test(item);
    }
}

/// Runs a test in each credit mode, with a raw client of a new server of the standard services.
///
/// Checks before the test that the connection is alive, and again after the test unless the test has ended it.
pub fn with_raw(name: &'static str, modes: impl IntoIterator<Item = CreditMode>, test: impl FnMut(&mut RawPeer)) {
    with_raw_of(name, modes, &standard_services(), test);
}

/// Runs a test like [`with_raw`], with a server of these services.
pub fn with_raw_of(
    name: &'static str,
    modes: impl IntoIterator<Item = CreditMode>,
    services: &Services,
    mut test: impl FnMut(&mut RawPeer),
) {
    for_each(modes, |mode| {
        let (_world, mut client) = World::raw_with(name, mode, services.clone());
        client.ping();
        test(&mut client);
        if !client.is_over() {
            client.ping();
        }
    });
}

/// Pairs each item of `first` with each item of `second`.
pub fn pairs<A: Clone, B: Clone>(
    first: impl IntoIterator<Item = A>,
    second: impl IntoIterator<Item = B>,
) -> Vec<(A, B)> {
    let second: Vec<B> = second.into_iter().collect();
    first.into_iter().flat_map(|a| second.iter().map(move |b| (a.clone(), b.clone()))).collect()
}

/// Checks that a text contains each of these parts.
#[track_caller]
pub fn assert_contains(text: impl Display, parts: &[&str]) {
    let text = text.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} must contain {part:?}");
    }
}

/// Formats an error with all its sources, as programs print it.
pub fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Checks that a value matches a pattern.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat) => {
        match $value {
            $pattern => {}
            other => panic!("{other:?}, expected {}", stringify!($pattern)),
        }
    };
}
