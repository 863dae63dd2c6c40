use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::auth::{AuthPolicy, PreSharedKey};
use crate::proto::CreditMode;

#[test]
fn the_defaults_are_in_range() {
    assert_eq!(Config::default().validate(), Ok(()));
    assert_eq!(ConnectConfig::default().validate(), Ok(()));
}

#[test]
fn a_pool_accepts_the_maximum_number_of_size_classes() {
    let mut config = Config::default();
    config.memory.bulk_buffers = (1..=29).map(|n| (n * 1000, 1)).collect();
    config.memory.long_buffers = (1..=29).map(|n| (n * 1001, 1)).collect();
    config.debug.optional_operations = true;
    config.validate().expect("the number is allowed");
    config.pool(true).own_arena().expect("the pool takes the classes");
}

fn required() -> AuthPolicy {
    AuthPolicy::Required(Arc::new(PreSharedKey::new("host", &[7; 32]).expect("a key")))
}

/// Sets one knob, or two that contradict each other.
type Change = fn(&mut Config);

#[test]
fn an_invalid_knob_is_refused_by_name_value_and_range() {
    let cases: &[(Change, &str)] = &[
        (|c| c.memory.receives = 10, "invalid memory.receives `10`: expected 256 to 1048576"),
        (|c| c.memory.receives = 2 << 20, "invalid memory.receives `2097152`: expected 256 to 1048576"),
        (|c| c.memory.small_buffers = 15, "invalid memory.small_buffers `15`: expected 16 to 16777216"),
        (|c| c.memory.message_buffers = 0, "invalid memory.message_buffers `0`: expected 1 to 16777216"),
        (
            |c| c.memory.bulk_buffers = vec![(0, 1)],
            "invalid memory.bulk_buffers `1 of 0 bytes`: expected 1 to 1073741824 bytes and",
        ),
        (
            |c| c.memory.long_buffers = vec![(64, 0)],
            "invalid memory.long_buffers `0 of 64 bytes`: expected 1 to 1073741824 bytes and",
        ),
        (
            |c| c.memory.long_buffers = vec![(64, 1); 30],
            "invalid memory.long_buffers `30 size classes`: expected at most 29",
        ),
        (
            |c| c.memory.bulk_buffers = vec![(1 << 30, 1 << 16), (1 << 30, 1 << 24)],
            "invalid memory.bulk_buffers `18084767253659648 bytes in all`: expected at most 140737488355328, the address space",
        ),
        (
            |c| c.memory.long_buffers = vec![(1 << 30, 1 << 24)],
            "invalid memory.long_buffers `18014398509481984 bytes in all`: expected at most 140737488355328, the address space",
        ),
        (
            |c| c.memory = MemoryConfig::within((1 << 47) + 1),
            "invalid memory.budget `140737488355329`: expected 0 to 140737488355328",
        ),
        (|c| c.memory.numa_node = Some(1024), "invalid memory.numa_node `1024`: expected 0 to 1023"),
        (|c| c.poll.core = Some(1024), "invalid poll.core `1024`: expected 0 to 1023"),
        (|c| c.device.gid_index = Some(256), "invalid device.gid_index `256`: expected 0 to 255"),
        (|c| c.memory.chunk_align = 96, "invalid memory.chunk_align `96`: expected a power of two, 64 to 4096 bytes"),
        (|c| c.limits.credits = 3, "invalid limits.credits `3`: expected 4 to 32767"),
        (|c| c.limits.max_credits = 40_000, "invalid limits.max_credits `40000`: expected 4 to 32767"),
        (
            |c| (c.limits.credits, c.limits.max_credits) = (4000, 4096),
            "invalid limits.credits `4000`: expected 4 to 3967, because memory.receives is 4096, with 129 in reserve",
        ),
        (
            |c| (c.limits.credits, c.limits.max_credits) = (64, 32),
            "invalid limits.max_credits `32`: expected at least limits.credits, which is 64",
        ),
        (
            |c| c.limits.max_credits = 4097,
            "invalid limits.max_credits `4097`: expected 4 to 4096, because memory.receives is 4096",
        ),
        (|c| c.debug.reverse_credits = 32768, "invalid debug.reverse_credits `32768`: expected 0 to 32767"),
        (|c| c.limits.max_calls = 0, "invalid limits.max_calls `0`: expected 1 to 65536"),
        (|c| c.limits.max_abandoned = 0, "invalid limits.max_abandoned `0`: expected at least 1"),
        (|c| c.limits.max_deferred = 0, "invalid limits.max_deferred `0`: expected at least 1"),
        (|c| c.limits.max_reads = Some(0), "invalid limits.max_reads `0`: expected at least 1, or unset for no limit"),
        (|c| c.limits.max_read_bytes = Some(0), "invalid limits.max_read_bytes `0`: expected at least 1"),
        (|c| c.limits.max_write_bytes = Some(0), "invalid limits.max_write_bytes `0`: expected at least 1"),
        (|c| c.limits.min_rate = 0, "invalid limits.min_rate `0`: expected at least 1 byte per second"),
        (|c| c.timeouts.progress = Duration::ZERO, "invalid timeouts.progress `0ns`: expected more than 0 s"),
        (
            |c| c.wire.receive_size = 1000,
            "invalid wire.receive_size `1000`: expected 1024 to 1048576 bytes, a multiple of 4",
        ),
        (
            |c| c.wire.receive_size = 4098,
            "invalid wire.receive_size `4098`: expected 1024 to 1048576 bytes, a multiple of 4",
        ),
        (
            |c| c.wire.receive_size = 2048,
            "invalid wire.receive_size `2048`: expected 4096 to 1048576 bytes in version 2",
        ),
        (
            |c| c.debug.max_receive_size = 2 << 20,
            "invalid debug.max_receive_size `2097152`: expected 0 to 1048576 bytes, a multiple of 4",
        ),
        (
            |c| c.debug.max_receive_size = 4092,
            "invalid debug.max_receive_size `4092`: expected 0, or at least wire.receive_size, which is 4096",
        ),
        (
            |c| (c.wire.credit_mode, c.wire.version_1) = (CreditMode::V1, false),
            "invalid wire.credit_mode `v1`: expected a mode of version 2, or wire.version_1 true, which is false",
        ),
        (
            |c| (c.wire.credit_mode, c.wire.host_auth) = (CreditMode::V1, required()),
            "invalid wire.credit_mode `v1`: expected a mode of version 2, because wire.host_auth is required",
        ),
        (
            |c| (c.debug.resize_on_request, c.debug.optional_operations) = (true, false),
            "invalid debug.resize_on_request `true`: expected false, or debug.optional_operations true, which is false",
        ),
        (
            |c| (c.debug.resize_on_request, c.wire.credit_mode) = (true, CreditMode::V1),
            "invalid debug.resize_on_request `true`: expected false, because wire.credit_mode is v1",
        ),
        (
            |c| c.wire.reassemble_up_to = 2 << 30,
            "invalid wire.reassemble_up_to `2147483648`: expected at most 1073741824 bytes",
        ),
        (|c| c.device.name = Some(String::new()), "invalid device.name ``: expected the name of a device, or unset"),
        (|c| c.device.service_level = Some(16), "invalid device.service_level `16`: expected 0 to 15"),
        (
            |c| c.device.path_mtu = Some(1500),
            "invalid device.path_mtu `1500`: expected 256, 512, 1024, 2048 or 4096 bytes",
        ),
        (|c| c.debug.read_depth = 0, "invalid debug.read_depth `0`: expected 1 to 16383"),
        (|c| c.debug.max_handshakes = 0, "invalid debug.max_handshakes `0`: expected at least 1"),
        (|c| c.iwarp.send_buffer = Some(0), "invalid iwarp.send_buffer `0`: expected 1 to 2147483647"),
        (
            |c| c.iwarp.receive_buffer = Some(4 << 30),
            "invalid iwarp.receive_buffer `4294967296`: expected 1 to 2147483647",
        ),
        (
            |c| c.iwarp.retry_timeout = Duration::from_micros(1),
            "invalid iwarp.retry_timeout `1µs`: expected 1 ms to 24 h",
        ),
        (|c| c.iwarp.keep_alive = Duration::ZERO, "invalid iwarp.keep_alive `0ns`: expected 1 s to 32767 s"),
        (
            |c| c.debug.handshake_timeout = Duration::ZERO,
            "invalid debug.handshake_timeout `0ns`: expected more than 0 s",
        ),
        (
            |c| c.debug.linger = Duration::MAX,
            "invalid debug.linger `18446744073709551615.999999999s`: expected more than 0 s",
        ),
        (
            |c| c.poll.control_interval = Duration::ZERO,
            "invalid poll.control_interval `0ns`: expected more than 0 s, at most 24 h",
        ),
        (|c| c.debug.signal_every = 0, "invalid debug.signal_every `0`: expected at least 1"),
        (|c| c.debug.sample_latency = 3, "invalid debug.sample_latency `3`: expected 0 or a power of two"),
    ];
    for (change, expected) in cases {
        let mut config = Config::default();
        change(&mut config);
        let error = config.validate().expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}, not {expected}");
    }
}

#[test]
fn a_buffer_size_of_two_knobs_is_attributed_to_bulk_buffers() {
    let config = Config::default();
    let knob = |serves, needed| config.shard_buffers(serves).knob_of(needed).to_string();
    assert_eq!(knob(true, 1 << 20), "`memory.bulk_buffers`", "both knobs have this size");
    assert_eq!(knob(true, 32 << 10), "`memory.long_buffers`");
    assert_eq!(knob(false, 1 << 20), "`memory.long_buffers`", "a client without services has none for bulk data");
}

#[test]
fn reconnect_backoff_must_not_decrease_and_is_at_most_a_day() {
    let validate = |first_ms: u64, longest_ms: u64| {
        let backoff = (Duration::from_millis(first_ms), Duration::from_millis(longest_ms));
        ConnectConfig { reconnect_backoff: backoff, ..ConnectConfig::default() }
            .validate()
            .map_err(|error| error.to_string())
    };
    assert_eq!(validate(5, 5), Ok(()));
    assert_eq!(validate(0, 5), Ok(()));
    let day = 24 * 60 * 60 * 1000;
    assert_eq!(
        validate(1, day + 1),
        Err("invalid connect.reconnect_backoff `1ms and 86400.001s`: expected at most 24 h".into())
    );
    let expected =
        "invalid connect.reconnect_backoff `6ms and 5ms`: expected a first wait that does not exceed the longest";
    assert_eq!(validate(6, 5), Err(expected.into()));
}

#[test]
fn time_outs_of_accept_and_connect_are_checked() {
    let accept = AcceptConfig { setup: Duration::ZERO, ..AcceptConfig::default() };
    let negotiation = ConnectConfig { negotiation: Duration::MAX, ..ConnectConfig::default() };
    let timeout = ConnectConfig { timeout: Duration::ZERO, ..ConnectConfig::default() };
    let refused = |result: Result<(), ConfigError>| result.expect_err("the value is out of range").to_string();
    assert_eq!(refused(accept.validate()), "invalid accept.setup `0ns`: expected more than 0 s, at most 24 h");
    assert_eq!(
        refused(negotiation.validate()),
        "invalid connect.negotiation `18446744073709551615.999999999s`: expected more than 0 s, at most 24 h"
    );
    assert_eq!(refused(timeout.validate()), "invalid connect.timeout `0ns`: expected more than 0 s, at most 24 h");
}

/// A configuration whose numbers of buffers follow from this budget.
fn within(budget: usize) -> Config {
    Config { memory: MemoryConfig::within(budget), ..Config::default() }
}

#[test]
fn a_budget_scales_buffer_counts_like_the_defaults() {
    let defaults = Config::default();
    let sized = within(defaults.memory_bytes()).sized().expect("the budget suffices");
    let numbers = |config: &Config| {
        let memory = &config.memory;
        let classes = memory.bulk_buffers.iter().chain(&memory.long_buffers).map(|class| class.1);
        [memory.receives, memory.small_buffers, memory.message_buffers].into_iter().chain(classes).collect::<Vec<_>>()
    };
    for (number, usual) in numbers(&sized).into_iter().zip(numbers(&defaults)) {
        assert!(number.abs_diff(usual) <= 1 + usual / 100, "{:?}, not {:?}", sized.memory, defaults.memory);
    }
    for budget in [6 << 20, 64 << 20, 1 << 30, 8 << 30] {
        let config = within(budget);
        assert_eq!(config.validate(), Ok(()));
        let sized = config.sized().expect("the budget suffices");
        assert!(sized.memory_bytes() <= budget, "{:?}", sized.memory);
        assert!(sized.memory_bytes() > budget / 2, "{:?}", sized.memory);
        assert_eq!(numbers(&sized.sized().expect("all numbers are set")), numbers(&sized));
    }
}

#[test]
fn a_budget_keeps_set_numbers_and_suffices_for_credits_and_message_sizes() {
    let mut config = within(128 << 20);
    config.memory.bulk_buffers = vec![(16 << 10, 0), (1 << 20, 64)];
    (config.limits.credits, config.limits.max_credits) = (4000, 8000);
    config.wire.reassemble_up_to = 3 << 20;
    let sized = config.sized().expect("the budget suffices");
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(sized.memory.bulk_buffers[1], (1 << 20, 64));
    assert!(sized.memory.bulk_buffers[0].1 > 0 && sized.memory.receives >= 8000, "{:?}", sized.memory);
    assert_eq!(sized.memory.long_buffers.iter().map(|class| class.0).max(), Some(3 << 20));
    assert!(sized.memory_bytes() <= 128 << 20, "{:?}", sized.memory);
    config.memory.bulk_buffers = vec![(1 << 20, 128)];
    let error = config.validate().expect_err("the buffers exceed the budget").to_string();
    assert!(error.starts_with("invalid memory.budget `134217728`: expected at least 1"), "{error}");
}

#[test]
fn buffer_knob_costs_add_up_to_the_budget() {
    let config = Config::default();
    let costs = config.costs();
    let cost = |knob: &str| costs.iter().find(|cost| cost.0 == knob).map_or(0, |cost| cost.1);
    let buffers = ["receives", "small_buffers", "message_buffers", "bulk_buffers", "long_buffers"];
    let sum: usize = buffers.iter().map(|knob| cost(&format!("memory.{knob}"))).sum();
    assert_eq!((cost("memory.budget"), cost("limits.credits")), (sum, 65 * 4096));
    assert!(cost("memory.receives") >= 4096 * 4096 && cost("memory.receives") < 4200 * 4096, "{costs:?}");
}
