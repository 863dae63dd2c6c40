//! Performance of an RDMA device.

use super::device::{ports, verbs_devices};
use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::devices::NET;
use crate::tree::{ReadError, if_exists};

/// Settings of the connection manager in configfs.
const RDMA_CM: &str = "/sys/kernel/config/rdma_cm";
/// Number of received packets for which one error event is tolerated.
const PACKETS_PER_FAULT: u64 = 10_000;
/// Error counters of all drivers, below `counters` and `hw_counters`.
const FAULTS: &[&str] = &[
    "out_of_sequence",
    "out_of_buffer",
    "packet_seq_err",
    "rnr_nak_retry_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "roce_adp_retrans",
    "req_transport_retries_exceeded",
    "out_of_seq_request",
    "rcvd_seq_err",
    "rcvd_rnr_err",
    "send_rnr_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "symbol_error",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
];
/// Counters of received packets.
const PACKETS: &[&str] = &["counters/port_rcv_packets", "hw_counters/rcvd_pkts", "hw_counters/rx_pkts"];

checks! {
    "roce-mode", Devices on Verbs: roce_mode,
        wanted "connections use RoCE version 2",
        why "version 1 has no IP header, so routers drop it and switches cannot distinguish its flows";
    "pcie", Devices on Verbs: pcie,
        wanted "the device's PCIe link uses all lanes at full speed",
        why "half the lanes mean half the bandwidth; a card in a wrong slot, or badly seated, uses fewer lanes";
    "rdma-counters", Devices on Verbs: counters,
        wanted "no error events of the device, or fewer than one per 10000 packets",
        why "lost and reordered packets are retransmitted, and Sends without a posted Receive are retried (RNR)";
    "congestion", Devices on Verbs: congestion,
        wanted "ECN is enabled on at least one priority; PFC and the settings of switches are not visible in sysfs",
        why "RoCE loses packets at a full queue, unless senders slow down (ECN) or are paused (PFC)";
}

fn roce_mode(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut modes, mut fixes) = (Vec::new(), Vec::new());
    let mut unreadable = None;
    for port in ports(context)?.into_iter().filter(|port| port.is_ethernet(context.tree())) {
        let (device, number) = port.name.split_once('/').unwrap_or((&port.name, "1"));
        let file = format!("{RDMA_CM}/{device}/ports/{number}/default_roce_mode");
        match context.tree().read_line(&file) {
            Ok(mode) => {
                if mode != "RoCE v2" {
                    fixes.push(context.write("RoCE v2", &[file]));
                }
                modes.push(format!("{}: {mode}", port.name));
            }
            Err(error) => unreadable = Some((error, context.as_root(&format!("mkdir {RDMA_CM}/{device}")))),
        }
    }
    match (modes.is_empty(), unreadable) {
        (true, Some((error, show))) => {
            Ok(Verdict::unknown(error.to_string(), show + "   # makes the setting visible, and changes nothing"))
        }
        (true, None) => Ok(Verdict::ok("no Ethernet port")),
        (false, Some((error, _))) if fixes.is_empty() => Err(error),
        _ if fixes.is_empty() => Ok(Verdict::ok(modes.join(", "))),
        _ => Ok(Verdict::fault(Status::Warning, modes.join(", "), fixes.join("\n"))),
    }
}

fn pcie(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut links, mut fixes) = (Vec::new(), Vec::new());
    let mut unreadable =
        ReadError::new("/sys/class/infiniband/*/device/current_link_width", "no device of the address is on PCIe");
    for device in verbs_devices(context)? {
        // The speed is `16.0 GT/s PCIe`. A virtual function has the speed `Unknown` and 0 lanes.
        let value = |name: &str| {
            let path = format!("{}/device/{name}", device.path);
            let line = context.tree().read_line(&path)?;
            let number = line.split(' ').next().and_then(|number| number.parse::<f64>().ok());
            number.filter(|number| *number > 0.0).ok_or_else(|| ReadError::new(path, format!("{line:?}")))
        };
        let link = |which: &str| Ok((value(&format!("{which}_link_width"))?, value(&format!("{which}_link_speed"))?));
        match (link("current"), link("max")) {
            (Ok((lanes, speed)), Ok((max_lanes, max_speed))) => {
                links.push(format!("{}: {lanes} of {max_lanes} lanes at {speed} of {max_speed} GT/s", device.name));
                if lanes < max_lanes || speed < max_speed {
                    let bus = context.tree().read_link(&format!("{}/device", device.path)).unwrap_or_default();
                    fixes.push(format!(
                        "{}   # compare LnkCap and LnkSta, then check slot, riser and BIOS",
                        context.as_root(&format!("lspci -vv -s {bus}"))
                    ));
                }
            }
            (Err(error), _) | (_, Err(error)) => unreadable = error,
        }
    }
    if links.is_empty() {
        return Err(unreadable);
    }
    Ok(Verdict::ok_if(fixes.is_empty(), links.join("; "), Status::Warning, fixes.join("\n")))
}

fn counters(context: &CheckContext) -> Result<Verdict, ReadError> {
    let (mut is_counted, mut unreadable, mut status) = (false, None, Status::Ok);
    let (mut counts, mut commands) = (Vec::new(), Vec::new());
    let ports = ports(context)?;
    for port in &ports {
        let mut number = |file: &str| {
            let read = if_exists(context.tree().read_number::<u64>(&format!("{}/{file}", port.path)));
            read.unwrap_or_else(|error| {
                unreadable = Some(error);
                None
            })
        };
        let packets = PACKETS.iter().filter_map(|file| number(file)).max().unwrap_or(0);
        for name in FAULTS {
            let count = number(&format!("hw_counters/{name}")).or_else(|| number(&format!("counters/{name}")));
            is_counted |= count.is_some();
            if let Some(count) = count.filter(|count| *count > 0) {
                counts.push(format!("{} {name} {count}", port.name));
                commands.push(format!("rdma statistic show link {}", port.name));
                let is_frequent = count > packets / PACKETS_PER_FAULT && packets > PACKETS_PER_FAULT;
                status = status.max(if is_frequent { Status::Warning } else { Status::Note });
            }
        }
    }
    if !is_counted {
        return Err(ReadError::new(format!("{}/hw_counters", ports[0].path), "has no counters"));
    }
    if counts.is_empty() {
        if let Some(error) = unreadable {
            return Err(error);
        }
        return Ok(Verdict::ok("no error events"));
    }
    commands.dedup();
    let lines = commands.iter().map(|command| {
        format!("{command}   # run it twice: only counts that grow under load matter; counting starts with the driver")
    });
    Ok(Verdict::fault(status, counts.join(", "), lines.collect::<Vec<_>>().join("\n")))
}

fn congestion(context: &CheckContext) -> Result<Verdict, ReadError> {
    let interfaces: Vec<String> =
        verbs_devices(context)?.iter().flat_map(|device| device.interfaces(context.tree())).collect();
    let (mut enabled, mut fixes) = (Vec::new(), Vec::new());
    for interface in &interfaces {
        let mut files = Vec::new();
        for side in ["roce_np", "roce_rp"] {
            let folder = format!("{NET}/{interface}/ecn/{side}/enable");
            let priorities = context.tree().read_numbers(&folder, "").unwrap_or_default();
            files.extend(priorities.into_iter().map(|priority| format!("{folder}/{priority}")));
        }
        let values: Vec<String> = files.iter().filter_map(|file| context.tree().read_line(file).ok()).collect();
        if values.is_empty() {
            continue;
        }
        let on = values.iter().filter(|value| *value == "1").count();
        enabled.push(format!("{interface}: ECN on {on} of {} priorities of senders and receivers", values.len()));
        if on == 0 {
            fixes.push(context.write("1", &files));
        }
    }
    if enabled.is_empty() {
        let show = interfaces.iter().map(|name| format!("dcb pfc show dev {name}; dcb app show dev {name}"));
        let observed = format!("sysfs has no ECN settings for {}", interfaces.join(", "));
        return Ok(Verdict::unknown(observed, show.collect::<Vec<_>>().join("\n")));
    }
    Ok(Verdict::ok_if(fixes.is_empty(), enabled.join("; "), Status::Warning, fixes.join("\n")))
}
