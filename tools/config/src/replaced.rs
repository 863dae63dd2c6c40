//! Knobs that were renamed or removed.

/// Knobs that moved to the group `debug`, by their former group.
const DEBUG: [(&str, &[&str]); 5] = [
    ("poll", &["batch", "coalesce_grants", "decode_by_layout", "sample_latency", "signal_every"]),
    (
        "wire",
        &[
            "continue_up_to",
            "max_receive_size",
            "optional_operations",
            "remote_invalidate",
            "resize_on_request",
            "reverse",
            "revision",
        ],
    ),
    ("limits", &["reverse_credits"]),
    ("memory", &["prefault"]),
    ("iwarp", &["fpdu_size", "handshake_timeout", "linger", "max_handshakes", "read_depth"]),
];
/// Knobs that were removed, and the knob that determines their value.
const REMOVED: [(&str, &str); 3] = [
    ("iwarp.max_message", "wire.receive_size"),
    ("iwarp.shared_receives", "memory.receives"),
    ("iwarp.tos", "device.tos"),
];

/// Returns how a knob of an earlier version was renamed or removed.
pub(crate) fn replacement(knob: &str) -> Option<String> {
    let removed = REMOVED.iter().find(|removed| removed.0 == knob);
    let (group, name) = knob.split_once('.')?;
    let moved = DEBUG.iter().any(|(old, names)| *old == group && names.contains(&name));
    removed
        .map(|(_, by)| format!("was removed, because {by} determines its value"))
        .or_else(|| moved.then(|| format!("was renamed to debug.{name}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs_named;

    #[test]
    fn new_names_exist_and_old_ones_do_not() {
        for (group, names) in DEBUG {
            for name in names {
                assert!(replacement(&format!("{group}.{name}")).is_some());
                assert!(knobs_named(name).contains(&format!("debug.{name}")), "{name}");
                assert!(!knobs_named(name).contains(&format!("{group}.{name}")), "{name}");
            }
        }
        for (old, by) in REMOVED {
            let (group, name) = by.split_once('.').expect("a group");
            assert!(knobs_named(name).contains(&format!("{group}.{name}")), "{by}");
            assert!(replacement(old).is_some_and(|text| text.contains(by)), "{old}");
        }
        assert_eq!(replacement("poll.idle"), None);
    }
}
