//! Performance of an RDMA device.

use super::device::{driven, ports};
use crate::check::{Status, Verdict};
use crate::devices::NET;
use crate::scene::Scene;
use crate::tree::{Unseen, if_there};

/// Settings of the connection manager.
const RDMA_CM: &str = "/sys/kernel/config/rdma_cm";
/// One lost, reordered or unexpected packet per so many is tolerated.
const PACKETS_PER_FAULT: u64 = 10_000;
/// Fault counters of all drivers, below `counters` and `hw_counters`.
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
        wanted "connections are made by RoCE version 2",
        why "version 1 has no IP header: no router passes it, and no switch tells its flows apart";
    "pcie", Devices on Verbs: pcie,
        wanted "the device's PCIe link has all its lanes, at full speed",
        why "half the lanes are half the bandwidth; a card in the wrong slot, or one that is not seated well, has fewer";
    "rdma-counters", Devices on Verbs: counters,
        wanted "the device has counted nothing that went wrong, or less than one in 10000 packets",
        why "lost and reordered packets are sent again, and peers that meet no Receive wait: both take milliseconds";
    "congestion", Devices on Verbs: congestion,
        wanted "ECN on some priority, as far as sysfs tells; the switches' side, and PFC, are not to be seen from here",
        why "RoCE that meets a full queue loses packets, unless senders slow down (ECN) or are stopped (PFC)";
}

fn roce_mode(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut old) = (Vec::new(), Vec::new());
    let mut unseen = None;
    for port in ports(scene)?.into_iter().filter(|port| port.is_ethernet(scene.tree())) {
        let (device, number) = port.name.split_once('/').unwrap_or((&port.name, "1"));
        let file = format!("{RDMA_CM}/{device}/ports/{number}/default_roce_mode");
        match scene.tree().line(&file) {
            Ok(mode) => {
                if mode != "RoCE v2" {
                    old.push(scene.write("RoCE v2", &[file]));
                }
                told.push(format!("{}: {mode}", port.name));
            }
            Err(error) => unseen = Some((error, scene.as_root(&format!("mkdir {RDMA_CM}/{device}")))),
        }
    }
    match (told.is_empty(), unseen) {
        (true, Some((error, show))) => {
            Ok(Verdict::unknown(error.to_string(), show + "   # shows it, and changes nothing"))
        }
        (true, None) => Ok(Verdict::ok("no Ethernet port")),
        (false, Some((error, _))) if old.is_empty() => Err(error),
        _ if old.is_empty() => Ok(Verdict::ok(told.join(", "))),
        _ => Ok(Verdict::fault(Status::Warning, told.join(", "), old.join("\n"))),
    }
}

fn pcie(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut told, mut less) = (Vec::new(), Vec::new());
    let mut unseen =
        Unseen::new("/sys/class/infiniband/*/device/current_link_width", "no device of the address is on PCIe");
    for device in driven(scene)? {
        // `16.0 GT/s PCIe`; for a virtual function `Unknown`, and no lanes.
        let value = |name: &str| {
            let path = format!("{}/device/{name}", device.path);
            let line = scene.tree().line(&path)?;
            let number = line.split(' ').next().and_then(|number| number.parse::<f64>().ok());
            number.filter(|number| *number > 0.0).ok_or_else(|| Unseen::new(path, format!("{line:?}")))
        };
        let link = |which: &str| Ok((value(&format!("{which}_link_width"))?, value(&format!("{which}_link_speed"))?));
        match (link("current"), link("max")) {
            (Ok((lanes, speed)), Ok((most_lanes, most_speed))) => {
                told.push(format!("{}: {lanes} lanes of {most_lanes} at {speed} GT/s of {most_speed}", device.name));
                if lanes < most_lanes || speed < most_speed {
                    let bus = scene.tree().link(&format!("{}/device", device.path)).unwrap_or_default();
                    less.push(format!(
                        "{}   # LnkCap and LnkSta; then: another slot, a riser with all lanes, the BIOS",
                        scene.as_root(&format!("lspci -vv -s {bus}"))
                    ));
                }
            }
            (Err(error), _) | (_, Err(error)) => unseen = error,
        }
    }
    if told.is_empty() {
        return Err(unseen);
    }
    Ok(Verdict::if_good(less.is_empty(), told.join("; "), Status::Warning, less.join("\n")))
}

fn counters(scene: &Scene) -> Result<Verdict, Unseen> {
    let (mut seen, mut unseen, mut status, mut told, mut show) = (false, None, Status::Ok, Vec::new(), Vec::new());
    let ports = ports(scene)?;
    for port in &ports {
        let mut number = |file: &str| {
            let read = if_there(scene.tree().number::<u64>(&format!("{}/{file}", port.path)));
            read.unwrap_or_else(|error| {
                unseen = Some(error);
                None
            })
        };
        let packets = PACKETS.iter().filter_map(|file| number(file)).max().unwrap_or(0);
        for name in FAULTS {
            let count = number(&format!("hw_counters/{name}")).or_else(|| number(&format!("counters/{name}")));
            seen |= count.is_some();
            if let Some(count) = count.filter(|count| *count > 0) {
                told.push(format!("{} {name} {count}", port.name));
                show.push(format!("rdma statistic show link {}", port.name));
                let many = count > packets / PACKETS_PER_FAULT && packets > PACKETS_PER_FAULT;
                status = status.max(if many { Status::Warning } else { Status::Note });
            }
        }
    }
    if !seen {
        return Err(Unseen::new(format!("{}/hw_counters", ports[0].path), "tells of no counter"));
    }
    if told.is_empty() {
        if let Some(unseen) = unseen {
            return Err(unseen);
        }
        return Ok(Verdict::ok("none"));
    }
    show.dedup();
    let lines = show
        .iter()
        .map(|line| format!("{line}   # twice: what grows under load matters; they count since the driver was loaded"));
    Ok(Verdict::fault(status, told.join(", "), lines.collect::<Vec<_>>().join("\n")))
}

fn congestion(scene: &Scene) -> Result<Verdict, Unseen> {
    let interfaces: Vec<String> = driven(scene)?.iter().flat_map(|device| device.interfaces(scene.tree())).collect();
    let (mut told, mut off) = (Vec::new(), Vec::new());
    for interface in &interfaces {
        let mut files = Vec::new();
        for side in ["roce_np", "roce_rp"] {
            let folder = format!("{NET}/{interface}/ecn/{side}/enable");
            let priorities = scene.tree().numbered(&folder, "").unwrap_or_default();
            files.extend(priorities.into_iter().map(|priority| format!("{folder}/{priority}")));
        }
        let values: Vec<String> = files.iter().filter_map(|file| scene.tree().line(file).ok()).collect();
        if values.is_empty() {
            continue;
        }
        let on = values.iter().filter(|value| *value == "1").count();
        told.push(format!("{interface}: ECN on {on} of {} priorities of senders and receivers", values.len()));
        if on == 0 {
            off.push(scene.write("1", &files));
        }
    }
    if told.is_empty() {
        let show = interfaces.iter().map(|name| format!("dcb pfc show dev {name}; dcb app show dev {name}"));
        let observed = format!("sysfs says nothing of it for {}", interfaces.join(", "));
        return Ok(Verdict::unknown(observed, show.collect::<Vec<_>>().join("\n")));
    }
    Ok(Verdict::if_good(off.is_empty(), told.join("; "), Status::Warning, off.join("\n")))
}
