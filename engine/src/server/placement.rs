//! Placement of shards: which shard serves which address of a server.

use std::fs;
use std::path::Path;

use super::ServerConfig;
use crate::address::Address;
use crate::start_error::StartError;

/// Directory in which the kernel describes processors.
const CPUS: &str = "/sys/devices/system/cpu";

impl ServerConfig {
    /// Index of each shard's address, by [`ServerConfig::serves`] or else by NUMA node.
    ///
    /// # Errors
    /// `serves` has no entry for a shard, names an unknown address, or omits one.
    pub(super) fn placement(&self, addresses: &[Address]) -> Result<Vec<usize>, StartError> {
        if let Some(serves) = &self.serves {
            let is_valid = serves.len() == self.shards
                && serves.iter().all(|&address| address < addresses.len())
                && (0..addresses.len()).all(|address| serves.contains(&address));
            let (count, shards) = (addresses.len(), self.shards);
            return is_valid.then(|| serves.clone()).ok_or_else(|| {
                StartError::conflict(format_args!(
                    "invalid `ServerConfig::serves` {serves:?} for {shards} shards and {count} addresses: expected the \
                     index of an address, from 0, for each shard, with each address at least once; or `None`"
                ))
            });
        }
        let cores = self.cores.as_deref().unwrap_or_default();
        if addresses.len() == 1 || cores.is_empty() {
            return Ok(by_node(&vec![None; addresses.len()], &vec![None; self.shards]));
        }
        let devices: Vec<_> = addresses.iter().map(|address| address.node(&self.shard)).collect();
        let cores: Vec<_> = cores.iter().map(|&core| node_of(Path::new(CPUS), core)).collect();
        let serves = by_node(&devices, &cores);
        log_placement(addresses, &devices, &cores, &serves);
        Ok(serves)
    }
}

/// Assigns an address to each shard, by the known nodes of devices and shards.
///
/// A shard gets an address of its own node, or else the address with the fewest shards. An address without shards takes
/// one from the address with the most. There are at most as many addresses as shards.
fn by_node(addresses: &[Option<u32>], shards: &[Option<u32>]) -> Vec<usize> {
    let mut counts = vec![0; addresses.len()];
    let mut serves = vec![None; shards.len()];
    for (place, node) in serves.iter_mut().zip(shards).filter(|(_, node)| node.is_some()) {
        *place = find_least_served(&counts, |address| addresses[address] == *node);
        place.iter().for_each(|&address: &usize| counts[address] += 1);
    }
    for place in serves.iter_mut().filter(|place| place.is_none()) {
        *place = find_least_served(&counts, |_| true);
        place.iter().for_each(|&address| counts[address] += 1);
    }
    while let Some(unserved) = counts.iter().position(|&count| count == 0) {
        let fullest = (0..counts.len()).max_by_key(|&address| counts[address]);
        let Some(fullest) = fullest.filter(|&address| counts[address] > 1) else { break };
        let last = serves.iter().rposition(|&address| address == Some(fullest));
        last.into_iter().for_each(|shard| serves[shard] = Some(unserved));
        counts[fullest] -= 1;
        counts[unserved] += 1;
    }
    serves.into_iter().map(Option::unwrap_or_default).collect()
}

/// The first suitable address with the fewest shards.
fn find_least_served(counts: &[usize], is_suitable: impl Fn(usize) -> bool) -> Option<usize> {
    (0..counts.len()).filter(|&address| is_suitable(address)).min_by_key(|&address| counts[address])
}

/// Addresses that no shard on the node of their device serves.
fn without_near_shard(addresses: &[Option<u32>], shards: &[Option<u32>], serves: &[usize]) -> Vec<usize> {
    let is_near = |address: usize| {
        addresses[address].is_none()
            || serves.iter().zip(shards).any(|(&serves, node)| serves == address && *node == addresses[address])
    };
    (0..addresses.len()).filter(|&address| !is_near(address)).collect()
}

/// Logs the placement, where the nodes of devices are known.
fn log_placement(addresses: &[Address], devices: &[Option<u32>], cores: &[Option<u32>], serves: &[usize]) {
    for (index, (address, node)) in addresses.iter().zip(devices).enumerate() {
        let Some(node) = node else { continue };
        let shards: Vec<_> = (0..serves.len()).filter(|&shard| serves[shard] == index).collect();
        log::info!("{address}: its device is on NUMA node {node}, and shards {shards:?} serve it");
    }
    for index in without_near_shard(devices, cores, serves) {
        let (address, node) = (&addresses[index], devices[index].unwrap_or_default());
        log::warn!(
            "{address}: its device is on NUMA node {node}, but no shard on that node serves it: add cores of that node \
             to `ServerConfig::cores`"
        );
    }
}

/// NUMA node of a core, if the kernel's description of processors has it.
fn node_of(cpus: &Path, core: usize) -> Option<u32> {
    let entries = fs::read_dir(cpus.join(format!("cpu{core}"))).ok()?;
    entries.flatten().find_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: Option<u32> = None;

    #[test]
    fn without_nodes_shards_serve_the_addresses_in_turn() {
        assert_eq!(by_node(&[UNKNOWN; 3], &[UNKNOWN; 5]), [0, 1, 2, 0, 1]);
        // Knowing only the nodes of the devices, or only those of the shards, changes nothing.
        assert_eq!(by_node(&[Some(0), Some(1)], &[UNKNOWN; 3]), [0, 1, 0]);
        assert_eq!(by_node(&[UNKNOWN; 2], &[Some(0), Some(1), Some(1)]), [0, 1, 0]);
        assert_eq!(by_node(&[UNKNOWN], &[Some(0), Some(1)]), [0, 0]);
        assert!(without_near_shard(&[UNKNOWN; 2], &[Some(0), Some(1)], &[0, 1]).is_empty());
    }

    #[test]
    fn an_address_is_served_on_the_node_of_its_device() {
        let (devices, cores) = ([Some(1), Some(0)], [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(by_node(&devices, &cores), [1, 1, 0, 0]);
        assert!(without_near_shard(&devices, &cores, &[1, 1, 0, 0]).is_empty());
        // Two devices of one node share its shards. A device of unknown node gets a shard of another node.
        let devices = [Some(0), Some(0), UNKNOWN];
        assert_eq!(by_node(&devices, &[Some(0), Some(1), Some(0), Some(1)]), [0, 2, 1, 0]);
    }

    #[test]
    fn a_node_without_cores_has_its_address_served_by_others() {
        // A shard without an address on its own node serves the address.
        let (devices, cores) = ([Some(0), Some(1)], [Some(0), Some(2), Some(0)]);
        assert_eq!(by_node(&devices, &cores), [0, 1, 0]);
        assert_eq!(without_near_shard(&devices, &cores, &[0, 1, 0]), [1]);
        // A shard that is taken from the address with most shards serves the address.
        let cores = [Some(0); 3];
        assert_eq!(by_node(&devices, &cores), [0, 0, 1]);
        assert_eq!(without_near_shard(&devices, &cores, &[0, 0, 1]), [1]);
    }

    #[test]
    fn each_address_is_served_even_by_the_minimum_number_of_shards() {
        for nodes in [[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 2, 2]] {
            let cores = nodes.map(Some);
            let serves = by_node(&[Some(0), Some(1), UNKNOWN], &cores);
            assert!((0..3).all(|address| serves.contains(&address)), "{nodes:?}: {serves:?}");
        }
    }

    #[test]
    fn node_of_a_core_is_read_from_the_kernel() {
        let root = tempfile::tempdir().expect("a directory");
        for name in ["cpu3/topology", "cpu3/node1", "cpu4/topology"] {
            fs::create_dir_all(root.path().join(name)).expect("a directory");
        }
        assert_eq!([3, 4, 5].map(|core| node_of(root.path(), core)), [Some(1), None, None]);
    }

    #[test]
    fn a_configured_placement_is_used_if_valid_and_refused_otherwise() {
        let addresses: Vec<Address> =
            ["soft:a", "soft:b"].iter().map(|text| text.parse().expect("an address")).collect();
        let placed = |serves: &[usize]| {
            let config = ServerConfig { shards: 3, serves: Some(serves.to_vec()), ..ServerConfig::default() };
            config.placement(&addresses)
        };
        assert_eq!(placed(&[1, 1, 0]).expect("each address has a shard"), [1, 1, 0]);
        for wrong in [&[0, 1][..], &[0, 1, 2], &[0, 0, 0]] {
            let error = placed(wrong).expect_err("the placement is invalid").to_string();
            assert!(error.contains("`ServerConfig::serves`") && error.contains(&format!("{wrong:?}")), "{error}");
        }
        let config = ServerConfig { shards: 3, ..ServerConfig::default() };
        assert_eq!(config.placement(&addresses).expect("in turn"), [0, 1, 0]);
    }
}
