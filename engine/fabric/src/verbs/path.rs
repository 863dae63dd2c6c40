//! Traffic class, service level and path MTU, applied to connections.

#![forbid(unsafe_code)]

use rdma_sys::ibv_qp_attr;

use crate::FabricError;
use crate::path::PathConfig;

/// Code of a path MTU: 1 is 256 bytes, 5 is 4096.
pub(super) fn mtu_code(mtu: u32) -> u32 {
    mtu.max(256).ilog2() - 7
}

/// Path MTU of a code, in bytes. 0 for an unknown code.
pub(super) fn mtu_bytes(code: u32) -> u32 {
    128u32.checked_shl(code).filter(|mtu| (256..=1 << 20).contains(mtu)).unwrap_or(0)
}

/// Checks that the path MTU does not exceed the port's active MTU.
pub(super) fn check_port(path: &PathConfig, device: &str, port: u8, active: u32) -> Result<(), FabricError> {
    match path.path_mtu {
        Some(mtu) if active > 0 && mtu > active => Err(FabricError::misuse(format!(
            "path_mtu = {mtu}: the active MTU of {device} port {port} is {active} (`ibv_devinfo`); on RoCE the MTU of \
             the interface bounds it (`ip link set NETDEV mtu`)"
        ))),
        _ => Ok(()),
    }
}

/// Applies this side's packet options to the connection manager's path.
pub(super) fn apply_options(attr: &mut ibv_qp_attr, path: &PathConfig) {
    let address = &mut attr.ah_attr;
    address.grh.traffic_class = path.tos.unwrap_or(address.grh.traffic_class);
    address.sl = path.service_level.unwrap_or(address.sl);
}

#[cfg(test)]
mod tests {
    use rdma_sys::ibv_qp_state;

    use super::super::sys::QpAttributes;
    use super::*;

    #[test]
    fn path_mtus_convert_to_codes_and_back() {
        for (code, mtu) in (1..).zip([256, 512, 1024, 2048, 4096]) {
            assert_eq!((mtu_code(mtu), mtu_bytes(code)), (code, mtu));
        }
    }

    #[test]
    fn an_mtu_above_the_ports_is_refused_and_both_are_named() {
        let path = PathConfig { path_mtu: Some(2048), ..PathConfig::default() };
        assert_eq!(check_port(&path, "rxe0", 1, 2048), Ok(()));
        assert_eq!(check_port(&PathConfig::default(), "rxe0", 1, 256), Ok(()));
        let error = check_port(&path, "rxe0", 1, 1024).map_err(|error| error.to_string());
        let error = error.expect_err("2048 exceeds 1024");
        assert!(error.contains("path_mtu = 2048") && error.contains("rxe0 port 1 is 1024"), "{error}");
    }

    #[test]
    fn unset_path_options_keep_the_connection_managers_values() {
        let marked = |path: PathConfig| {
            let mut attr = QpAttributes::state(ibv_qp_state::IBV_QPS_RTR).attr;
            (attr.ah_attr.sl, attr.ah_attr.grh.traffic_class) = (3, 8);
            apply_options(&mut attr, &path);
            (attr.ah_attr.sl, attr.ah_attr.grh.traffic_class)
        };
        assert_eq!(marked(PathConfig::default()), (3, 8));
        assert_eq!(marked(PathConfig { tos: Some(104), ..PathConfig::default() }), (3, 104));
        assert_eq!(marked(PathConfig { service_level: Some(0), ..PathConfig::default() }), (0, 8));
    }
}
