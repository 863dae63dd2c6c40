//! The knobs of the verbs fabric.

#![forbid(unsafe_code)]

use std::time::Duration;

use crate::host::{self, NamedDevice};
use crate::path::PathConfig;
use crate::{FabricAddress, FabricError, checks};

/// Whether to use a device feature: on, off, or automatic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FeatureMode {
    /// Used if the device's attributes and the start-up probe permit it.
    #[default]
    Auto,
    /// Always used.
    On,
    /// Never used.
    Off,
}

with_defaults! {
    /// Configuration of a [`VerbsFabric`](super::VerbsFabric).
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct VerbsConfig {
        /// The device, such as `mlx5_0`. Default: the device of the route to `address`, else the first with an active
        /// port.
        pub device: Option<String> = None,
        /// Index of the local GID in the port's table. The GID must be routable (RoCE v2). Default: the GID of the
        /// route to the peer.
        pub gid_index: Option<u32> = None,
        /// The address to listen at or connect to, which picks the device. `DEVICE@HOST:PORT` and
        /// `DEVICE/GID@HOST:PORT` name the device and its GID. Default none.
        pub address: Option<FabricAddress> = None,
        /// Traffic class, service level and path MTU of connections.
        ///
        /// A request carries the class to the server, which answers with the same class unless it has its own. The
        /// request also carries the path MTU, which both ends must observe. A server refuses a request whose MTU
        /// exceeds its own. On InfiniBand only the subnet manager chooses the MTU, and a client that sets an MTU does
        /// not connect. Each side has its own service level. A request with a path MTU carries the service level too, 0
        /// unless set.
        pub path: PathConfig = PathConfig::default(),
        /// Capacity of the shared receive queue. Default 4096 Receives.
        pub shared_receives: u32 = 4096,
        /// Maximum outstanding work requests of all queue pairs together. Default 32768. Each work request and each
        /// Receive costs 64 bytes of completion queue. A device with smaller completion queues provides its maximum. A
        /// post that exceeds the limit fails with [`PostError::QueueFull`](crate::PostError::QueueFull).
        pub completions: u32 = 32768,
        /// Longest Send copied into its work request, in bytes. The device must support it. Default 220, the largest
        /// value that most devices support without longer work requests.
        pub max_inline_data: u32 = 220,
        /// Whether peers may invalidate this side's keys by Send With Invalidate. Default auto.
        pub remote_invalidate: FeatureMode = FeatureMode::Auto,
        /// The peer's wait before a retry when no Receive is posted here. InfiniBand code: 1 (10 µs) to 31 (491 ms), 0
        /// for 655 ms. Default 12: 640 µs.
        pub min_rnr_timer: u8 = 12,
        /// Maximum retransmissions of a lost packet, 0 to 7. The connection ends after them. This side requests the
        /// number from its peer, and uses the peer's number if that is lower. Default 6, as in the Linux kernel's NFS.
        /// On soft-RoCE 7 is unlimited, so a dead peer goes unnoticed.
        pub retries: u8 = 6,
        /// Maximum retries of this side's message when the peer has no Receive posted, 0 to 6. This bounds the number
        /// that the peer requests, which may be unlimited. The peer also sets the wait before each retry, at most 655
        /// ms. Default 6, which disconnects a peer without Receives after 4 s.
        pub rnr_retries: u8 = 6,
        /// Longest wait for an acknowledgement before retransmission. InfiniBand code: 4.096 µs times two to the power
        /// of 1 to 31. The actual wait follows from the path and the peer, and may be unlimited. Default 20: 4.3 s.
        pub ack_timeout: u8 = 20,
        /// Time-out of address and route resolution. Default 5 s.
        pub resolve_timeout: Duration = Duration::from_secs(5),
        /// Longest wait of a closing connection for its sent data. Default 1 s.
        pub linger: Duration = Duration::from_secs(1),
        /// Longest wait of a queue pair's destruction for its last completions. Default 1 s. Devices need microseconds.
        /// Later completions count as flushed.
        pub drain: Duration = Duration::from_secs(1),
    }
}

impl VerbsConfig {
    /// Moves the address's device and GID to their own fields.
    ///
    /// # Errors
    /// The address and a field name different devices or GIDs.
    pub(super) fn with_device_of_address(mut self) -> Result<Self, FabricError> {
        let Some(address) = self.address.take() else { return Ok(self) };
        let (named, rest) = host::split_device(&address)?;
        if let Some(NamedDevice { name, gid_index }) = named {
            let contradicts = |knob: &str, named: &str, value: &str| {
                FabricError::address(
                    &address.0,
                    format!("names {named}, but `{knob}` is {value}: set only one of them"),
                )
            };
            if let Some(device) = self.device.as_ref().filter(|device| **device != name) {
                return Err(contradicts("device", &name, device));
            }
            if let (Some(own), Some(index)) = (gid_index, self.gid_index.filter(|index| gid_index != Some(*index))) {
                return Err(contradicts("gid_index", &format!("GID {own} of {name}"), &index.to_string()));
            }
            self.device = Some(name);
            self.gid_index = gid_index.or(self.gid_index);
        }
        self.address = Some(rest);
        Ok(self)
    }

    /// Checks that the fabric uses the device and GID of an address.
    ///
    /// # Errors
    /// The fabric uses another device or GID.
    pub(super) fn check_named(
        &self,
        address: &FabricAddress,
        named: Option<&NamedDevice>,
        device: &str,
    ) -> Result<(), FabricError> {
        let Some(NamedDevice { name, gid_index }) = named else { return Ok(()) };
        if name == device && gid_index.is_none_or(|index| self.gid_index == Some(index)) {
            return Ok(());
        }
        let opened = NamedDevice { name: device.to_owned(), gid_index: self.gid_index };
        let detail = format!("this shard uses only {opened}: open a shard with the address's device");
        Err(FabricError::address(&address.0, detail))
    }

    /// Checks the fields. An error names the field that is out of range.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let check = |ok, field, got: u32, rule| checks::check_field("verbs", ok, field, got as usize, rule);
        self.path.check(super::VerbsFabric::SCHEME)?;
        check(
            (1..=1 << 21).contains(&self.shared_receives),
            "shared_receives",
            self.shared_receives,
            "expected 1 to 2097152",
        )?;
        check((64..=1 << 22).contains(&self.completions), "completions", self.completions, "expected 64 to 4194304")?;
        check(self.max_inline_data <= 4096, "max_inline_data", self.max_inline_data, "expected at most 4096")?;
        check(self.min_rnr_timer < 32, "min_rnr_timer", self.min_rnr_timer.into(), "expected 0 to 31")?;
        check(self.retries < 8, "retries", self.retries.into(), "expected 0 to 7")?;
        check(self.rnr_retries < 7, "rnr_retries", self.rnr_retries.into(), "expected 0 to 6")?;
        check((1..32).contains(&self.ack_timeout), "ack_timeout", self.ack_timeout.into(), "expected 1 to 31")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str, device: Option<&str>, gid_index: Option<u32>) -> VerbsConfig {
        let address = Some(FabricAddress(address.into()));
        VerbsConfig { address, device: device.map(Into::into), gid_index, ..VerbsConfig::default() }
    }

    #[test]
    fn an_address_names_the_device_once() {
        let expected = at("10.0.0.1:7", Some("rxe1"), Some(2));
        assert_eq!(expected.clone().with_device_of_address(), Ok(expected.clone()));
        for (address, device, gid_index) in [
            ("rxe1/2@10.0.0.1:7", None, None),
            ("rxe1/2@10.0.0.1:7", Some("rxe1"), Some(2)),
            ("rxe1@10.0.0.1:7", None, Some(2)),
        ] {
            assert_eq!(at(address, device, gid_index).with_device_of_address(), Ok(expected.clone()), "{address}");
        }
        for (address, device, gid_index, why) in [
            ("rxe1@10.0.0.1", Some("rxe0"), None, "names rxe1, but `device` is rxe0"),
            ("rxe1/2@10.0.0.1", Some("rxe1"), Some(1), "names GID 2 of rxe1, but `gid_index` is 1"),
            ("rxe1/two@10.0.0.1", None, None, "not a number"),
        ] {
            let error = at(address, device, gid_index).with_device_of_address().expect_err(address).to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn an_address_of_another_device_is_refused() {
        let named = |name: &str, gid_index| NamedDevice { name: name.into(), gid_index };
        let opened = at("rxe1/2@10.0.0.1", None, None).with_device_of_address().expect("a device");
        let address = FabricAddress("as given".into());
        let check = |named: Option<NamedDevice>| opened.check_named(&address, named.as_ref(), "rxe1");
        for fits in [None, Some(named("rxe1", None)), Some(named("rxe1", Some(2)))] {
            assert_eq!(check(fits), Ok(()));
        }
        for other in [named("rxe0", None), named("rxe0", Some(2)), named("rxe1", Some(1))] {
            let error = check(Some(other)).expect_err("another device").to_string();
            assert!(error.contains("as given") && error.contains("uses only rxe1/2"), "{error}");
        }
    }
}
