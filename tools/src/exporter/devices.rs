//! Counters of RDMA devices, read from sysfs.
//!
//! The driver's counters are in `DEVICE/ports/PORT/hw_counters/NAME`, those of the InfiniBand port in
//! `DEVICE/ports/PORT/counters/NAME`.

use std::fs;
use std::path::Path;

/// Source of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The driver.
    Driver,
    /// PortCounters of InfiniBand, which count bytes in units of 4.
    Port,
}

impl Origin {
    const ALL: [Self; 2] = [Self::Driver, Self::Port];

    fn directory(self) -> &'static str {
        match self {
            Self::Driver => "hw_counters",
            Self::Port => "counters",
        }
    }
}

/// A counter of a device's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceCounter {
    pub(super) origin: Origin,
    pub(super) device: String,
    pub(super) port: String,
    pub(super) name: String,
    pub(super) value: u64,
}

/// Reads the counters of all devices. Unreadable counters are omitted, because devices may disappear at any time.
pub(super) fn read(class: &Path) -> Vec<DeviceCounter> {
    let mut all = Vec::new();
    for device in names(class) {
        let ports = class.join(&device).join("ports");
        for port in names(&ports) {
            for origin in Origin::ALL {
                let counters = ports.join(&port).join(origin.directory());
                for name in names(&counters) {
                    // This file has the time for which the kernel caches counters.
                    if name == "lifespan" {
                        continue;
                    }
                    let text = fs::read_to_string(counters.join(&name)).unwrap_or_default();
                    if let Ok(value) = text.trim().parse() {
                        all.push(DeviceCounter { origin, device: device.clone(), port: port.clone(), name, value });
                    }
                }
            }
        }
    }
    all
}

/// Returns the sorted names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_and_other_files_are_ignored() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        assert_eq!(read(&root.join("none")), []);
        let counters = root.join("mlx5_0/ports/1/hw_counters");
        fs::create_dir_all(&counters).expect("directories");
        fs::create_dir_all(root.join("rxe0/ports/1")).expect("directories");
        for (name, text) in
            [("out_of_buffer", "7\n"), ("np_cnp_sent", "12"), ("lifespan", "10"), ("odd", "N/A (no PMA)")]
        {
            fs::write(counters.join(name), text).expect("a file");
        }
        fs::create_dir(counters.join("gone")).expect("no file");
        let of_port = root.join("mlx5_0/ports/1/counters");
        fs::create_dir_all(&of_port).expect("directories");
        fs::write(of_port.join("link_downed"), "3\n").expect("a file");
        let counter = |origin, name: &str, value| DeviceCounter {
            origin,
            device: "mlx5_0".to_owned(),
            port: "1".to_owned(),
            name: name.to_owned(),
            value,
        };
        let wanted = [
            counter(Origin::Driver, "np_cnp_sent", 12),
            counter(Origin::Driver, "out_of_buffer", 7),
            counter(Origin::Port, "link_downed", 3),
        ];
        assert_eq!(read(root), wanted);
    }
}
