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
            return Ok(assign_by_node(&vec![None; addresses.len()], &vec![None; self.shards]));
        }
        let devices: Vec<_> = addresses.iter().map(|address| address.node(&self.shard)).collect();
        let cores: Vec<_> = cores.iter().map(|&core| node_of(Path::new(CPUS), core)).collect();
        let address_of_shard = assign_by_node(&devices, &cores);
        log_placement(addresses, &devices, &cores, &address_of_shard);
        Ok(address_of_shard)
    }
}

/// Assigns an address to each shard, by the known nodes of devices and shards.
///
/// A shard gets an address of its own node, or else the address with the fewest shards. An address without shards takes
/// one from the address with the most. There are at most as many addresses as shards.
fn assign_by_node(address_nodes: &[Option<u32>], shard_nodes: &[Option<u32>]) -> Vec<usize> {
    let mut counts = vec![0; address_nodes.len()];
    let mut address_of_shard: Vec<Option<usize>> = vec![None; shard_nodes.len()];
    for (assigned, node) in address_of_shard.iter_mut().zip(shard_nodes).filter(|(_, node)| node.is_some()) {
        *assigned = find_least_served(&counts, |address| address_nodes[address] == *node);
        if let Some(address) = *assigned {
            counts[address] += 1;
        }
    }
    for assigned in address_of_shard.iter_mut().filter(|assigned| assigned.is_none()) {
        *assigned = find_least_served(&counts, |_| true);
        if let Some(address) = *assigned {
            counts[address] += 1;
        }
    }
    while let Some(unserved) = counts.iter().position(|&count| count == 0) {
        let fullest = (0..counts.len()).max_by_key(|&address| counts[address]);
        let Some(fullest) = fullest.filter(|&address| counts[address] > 1) else { break };
        if let Some(last) = address_of_shard.iter().rposition(|&address| address == Some(fullest)) {
            address_of_shard[last] = Some(unserved);
        }
        counts[fullest] -= 1;
        counts[unserved] += 1;
    }
    address_of_shard.into_iter().map(Option::unwrap_or_default).collect()
}

/// The first suitable address with the fewest shards.
fn find_least_served(counts: &[usize], is_suitable: impl Fn(usize) -> bool) -> Option<usize> {
    (0..counts.len()).filter(|&address| is_suitable(address)).min_by_key(|&address| counts[address])
}

/// Addresses without a shard on their device's node.
fn without_near_shard(
    address_nodes: &[Option<u32>],
    shard_nodes: &[Option<u32>],
    address_of_shard: &[usize],
) -> Vec<usize> {
    let is_near = |address: usize| {
        let mut shards = address_of_shard.iter().zip(shard_nodes);
        address_nodes[address].is_none()
            || shards.any(|(&served, node)| served == address && *node == address_nodes[address])
    };
    (0..address_nodes.len()).filter(|&address| !is_near(address)).collect()
}

/// Logs the placement, where the nodes of devices are known.
fn log_placement(addresses: &[Address], devices: &[Option<u32>], cores: &[Option<u32>], address_of_shard: &[usize]) {
    for (index, (address, node)) in addresses.iter().zip(devices).enumerate() {
        let Some(node) = node else { continue };
        let shards: Vec<_> = (0..address_of_shard.len()).filter(|&shard| address_of_shard[shard] == index).collect();
        log::info!("{address}: its device is on NUMA node {node}, and shards {shards:?} serve it");
    }
    for index in without_near_shard(devices, cores, address_of_shard) {
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
        assert_eq!(assign_by_node(&[UNKNOWN; 3], &[UNKNOWN; 5]), [0, 1, 2, 0, 1]);
        // Knowing only the nodes of the devices, or only those of the shards, changes nothing.
        assert_eq!(assign_by_node(&[Some(0), Some(1)], &[UNKNOWN; 3]), [0, 1, 0]);
        assert_eq!(assign_by_node(&[UNKNOWN; 2], &[Some(0), Some(1), Some(1)]), [0, 1, 0]);
        assert_eq!(assign_by_node(&[UNKNOWN], &[Some(0), Some(1)]), [0, 0]);
        assert!(without_near_shard(&[UNKNOWN; 2], &[Some(0), Some(1)], &[0, 1]).is_empty());
    }

    #[test]
    fn an_address_is_served_on_the_node_of_its_device() {
        let (devices, cores) = ([Some(1), Some(0)], [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(assign_by_node(&devices, &cores), [1, 1, 0, 0]);
        assert!(without_near_shard(&devices, &cores, &[1, 1, 0, 0]).is_empty());
        // Two devices of one node share its shards. A device of unknown node gets a shard of another node.
        let devices = [Some(0), Some(0), UNKNOWN];
        assert_eq!(assign_by_node(&devices, &[Some(0), Some(1), Some(0), Some(1)]), [0, 2, 1, 0]);
    }

    #[test]
    fn a_node_without_cores_has_its_address_served_by_others() {
        // A shard without an address on its own node serves the address.
        let (devices, cores) = ([Some(0), Some(1)], [Some(0), Some(2), Some(0)]);
        assert_eq!(assign_by_node(&devices, &cores), [0, 1, 0]);
        assert_eq!(without_near_shard(&devices, &cores, &[0, 1, 0]), [1]);
        // A shard that is taken from the address with most shards serves the address.
        let cores = [Some(0); 3];
        assert_eq!(assign_by_node(&devices, &cores), [0, 0, 1]);
        assert_eq!(without_near_shard(&devices, &cores, &[0, 0, 1]), [1]);
    }

    #[test]
    fn each_address_is_served_even_by_the_minimum_number_of_shards() {
        for nodes in [[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 2, 2]] {
            let cores = nodes.map(Some);
            let address_of_shard = assign_by_node(&[Some(0), Some(1), UNKNOWN], &cores);
            assert!((0..3).all(|address| address_of_shard.contains(&address)), "{nodes:?}: {address_of_shard:?}");
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
