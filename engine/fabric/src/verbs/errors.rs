//! Errors of calls to the device: the failed call, the limit found, and the remedy.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::path::Path;

use rpcrdma_mempool::{MemoryLimits, exceeded_limit};
use rustix::fs::Access;
use rustix::io::Errno;

use super::device;
use crate::FabricError;

/// The device nodes of user space verbs and of the connection manager.
const NODES: &str = "/dev/infiniband";

/// How to provide a device on this host.
pub(super) const NO_DEVICE: &str = "load the driver of the adapter (`sudo modprobe mlx5_ib`), or add a soft-RoCE \
    device (`sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev NETDEV`)";

/// Returns the error for a failed open. The cause is the kernel, a missing module, or permissions.
pub(super) fn open_error(call: impl fmt::Display, error: &io::Error) -> FabricError {
    let why = match Errno::from_io_error(error) {
        Some(Errno::ACCESS | Errno::PERM) => permissions(Path::new(NODES)),
        Some(Errno::NOENT | Errno::NODEV | Errno::NOSYS | Errno::NXIO | Errno::OPNOTSUPP) => {
            // The libraries report inaccessible nodes like missing ones.
            let nodes = Path::new(NODES);
            let remedy = if forbidden(nodes).is_empty() { modules(nodes) } else { permissions(nodes) };
            return FabricError::no_device(call, format!("{error}; {remedy}"));
        }
        Some(Errno::NOMEM | Errno::AGAIN) => memlock(),
        _ => limit_hint(error),
    };
    FabricError::system(call, format!("{error}; {why}")).caused_by(Some(error))
}

/// Returns the error for a failed call that pins memory or creates a device object.
pub(super) fn pin_error(call: impl fmt::Display, error: &io::Error) -> FabricError {
    let why = match Errno::from_io_error(error) {
        Some(Errno::NOMEM | Errno::AGAIN | Errno::PERM) => memlock(),
        Some(Errno::NOSPC) => {
            "all such objects of the device are in use: `rdma resource show` lists their owners".to_owned()
        }
        Some(Errno::INVAL) => "the device does not support this: `ibv_devinfo -v` shows its limits".to_owned(),
        Some(Errno::IO | Errno::NODEV) => {
            "the device was removed or has failed: see `rdma link` and `dmesg`".to_owned()
        }
        _ => limit_hint(error),
    };
    FabricError::system(call, format!("{error}; {why}")).caused_by(Some(error))
}

fn limit_hint(error: &io::Error) -> String {
    exceeded_limit(error).unwrap_or_else(|| "see `dmesg`".to_owned())
}

fn memlock() -> String {
    format!(
        "{}; devices pin memory: raise the limit with `ulimit -l unlimited`, or with LimitMEMLOCK=infinity in the \
         service's unit",
        MemoryLimits::read()
    )
}

/// Device nodes that this process may not access.
fn forbidden(nodes: &Path) -> Vec<String> {
    device::names(nodes)
        .into_iter()
        .map(|name| nodes.join(name))
        .filter(|node| rustix::fs::access(node, Access::READ_OK | Access::WRITE_OK).is_err())
        .map(|node| node.display().to_string())
        .collect()
}

/// Describes the inaccessible nodes and the remedy.
fn permissions(nodes: &Path) -> String {
    let forbidden = forbidden(nodes);
    let which = if forbidden.is_empty() {
        "see `dmesg` and the container's device list".to_owned()
    } else {
        forbidden.join(", ")
    };
    format!(
        "this user may not read and write {which}: `sudo chmod 666 {}/*`, or a udev rule for the group `rdma`",
        nodes.display()
    )
}

/// Describes the missing kernel modules and the remedy.
fn modules(nodes: &Path) -> String {
    let names = device::names(nodes);
    let has = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    let mut missing = Vec::new();
    if !has("uverbs") {
        missing.push(format!("there is no RDMA device (`rdma link` lists none): {NO_DEVICE}"));
    }
    if !has("rdma_cm") {
        missing.push("/dev/infiniband/rdma_cm is missing: `sudo modprobe rdma_ucm`".to_owned());
    }
    if missing.is_empty() {
        missing.push("see `rdma link` and `dmesg`".to_owned());
    }
    missing.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.raw_os_error())
    }

    #[test]
    fn each_failure_has_its_remedy() {
        let text = pin_error("ibv_reg_mr of 4096 bytes", &error(Errno::NOMEM)).to_string();
        assert!(text.starts_with("ibv_reg_mr of 4096 bytes: "), "{text}");
        assert!(text.contains("RLIMIT_MEMLOCK is ") && text.contains("ulimit -l unlimited"), "{text}");
        let text = pin_error("ibv_create_qp", &error(Errno::INVAL)).to_string();
        assert!(text.contains("ibv_devinfo -v"), "{text}");
    }

    #[test]
    fn missing_modules_are_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let both = modules(directory.path());
        assert!(both.contains("modprobe rdma_rxe") && both.contains("modprobe rdma_ucm"), "{both}");
        std::fs::write(directory.path().join("uverbs0"), "").expect("a file");
        let one = modules(directory.path());
        assert!(!one.contains("rdma_rxe") && one.contains("modprobe rdma_ucm"), "{one}");
    }
}
