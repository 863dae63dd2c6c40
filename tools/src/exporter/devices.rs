//! Counters of RDMA devices, as the kernel tells them: the driver's own in `DEVICE/ports/PORT/hw_counters/NAME`, and
//! those that InfiniBand defines for each port in `DEVICE/ports/PORT/counters/NAME`.

use std::fs;
use std::path::Path;

/// Whose counter it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The driver's: each has its own.
    Driver,
    /// InfiniBand's PortCounters, of bytes in units of four.
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

/// One counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceCounter {
    pub(super) origin: Origin,
    pub(super) device: String,
    pub(super) port: String,
    pub(super) name: String,
    pub(super) value: u64,
}

/// Those of all devices. What cannot be read is not there: devices come and go.
pub(super) fn read(class: &Path) -> Vec<DeviceCounter> {
    let mut all = Vec::new();
    for device in names(class) {
        let ports = class.join(&device).join("ports");
        for port in names(&ports) {
            for origin in Origin::ALL {
                let counters = ports.join(&port).join(origin.directory());
                for name in names(&counters) {
                    // How long the kernel keeps them before it asks the device again.
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

/// What is in a directory, in order.
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
    fn counters_are_read_from_whatever_there_is() {
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
