//! Loss and reopening of a device.
//!
//! First the shard ends all connections. Then the fabric frees all objects of the device, which a driver may wait for
//! before it removes the device. After that, the fabric looks for the device once a second, by its configured address
//! or name. It opens a present device, registers memory with it, and binds its address again if that was lost. The
//! shard posts the Receives that came back from the old queue.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::complete::CompletionState;
use super::opened::OpenedDevice;
use super::receives::SharedReceives;
use super::{VerbsFabric, device};
use crate::{Capabilities, Completion, ControlEvent, DeviceEvent, Disconnect, FabricError, QpId, Status};

/// Interval between checks for the device.
pub(super) const RECOVERY_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Lost {
    /// The kind of loss.
    event: DeviceEvent,
    /// Time of the next check.
    look: Instant,
    /// Whether the device was watched. The next must also be watched, because a device in removal can still be opened.
    was_watched: bool,
}

impl VerbsFabric {
    /// Reports the loss of the device once, and ends all its connections. Each identifier and queue may report a loss.
    pub(super) fn device_lost(&mut self, event: DeviceEvent) {
        let (Some(opened), None) = (&self.device, &self.lost) else { return };
        let was_watched = opened.watch.is_some();
        let CompletionState { table, attention, stats, .. } = &mut self.completion;
        let name = &self.choice.device;
        table.iter_mut().for_each(|qp| qp.fail(attention, Disconnect::Device, || format!("{name}: {event}")));
        stats.device_failures += 1;
        // The next device has its own counter.
        stats.receiver_not_ready +=
            device::receiver_not_ready(name, self.choice.port).saturating_sub(self.not_ready_before);
        self.not_ready_before = u64::MAX;
        self.events.push(ControlEvent::Device(event));
        if let Some(listening) = &mut self.listener {
            // Other fabrics may use another device.
            listening.leave(&self.sleeper);
            if event == DeviceEvent::Removed {
                listening.device_removed(name);
            }
        }
        self.lost = Some(Lost { event, look: Instant::now() + RECOVERY_INTERVAL, was_watched });
    }

    /// Refuses new work while the device is absent.
    pub(super) fn check_present(&self) -> Result<(), FabricError> {
        if self.lost.is_none() { Ok(()) } else { Err(self.absent()) }
    }

    pub(super) fn absent(&self) -> FabricError {
        let why = self.lost.as_ref().map_or(DeviceEvent::Failed, |lost| lost.event);
        FabricError::system(
            format!("using {}", self.choice.device),
            format!("{why}, and is not there again (`rdma link`); it is looked for once a second"),
        )
    }

    /// Frees a lost device, or looks for it.
    pub(super) fn tend_lost(&mut self) {
        if self.device.is_some() {
            self.let_go();
        }
        let now = Instant::now();
        let Some(lost) = self.lost.as_mut().filter(|lost| self.device.is_none() && lost.look <= now) else { return };
        lost.look = now + RECOVERY_INTERVAL;
        match self.open_again() {
            Ok(()) => {
                self.lost = None;
                self.events.push(ControlEvent::Device(DeviceEvent::Returned));
            }
            Err(error) => {
                let line = format_args!("{} is not served: {error}", self.choice.device);
                self.scratch.log.warn("devices that are not there again", line);
            }
        }
    }

    /// Frees all objects of the device, if its connections have ended.
    fn let_go(&mut self) {
        if self.completion.table.iter().next().is_some() {
            return;
        }
        let Some(opened) = self.device.take() else { return };
        self.requests.drain(..).for_each(super::connect::Request::dispose);
        let posted = self.completion.shared.close();
        let flushed = |buf| Completion::failed_receive(QpId::NONE, Status::Flushed, buf);
        self.completion.ready.extend(posted.into_iter().map(flushed));
        self.regions.close();
        opened.close(&self.sleeper, self.lost.as_ref().is_some_and(|lost| lost.event == DeviceEvent::Removed));
        log::info!("{} is let go of, and looked for once a second", self.choice.device);
    }

    /// Opens the device and restores this fabric's state on it.
    fn open_again(&mut self) -> Result<(), FabricError> {
        let mut config = (*self.config).clone();
        if config.address.is_none() {
            // Without a name, another device could be the first present one.
            config.device.get_or_insert_with(|| self.choice.device.clone());
        }
        let found = OpenedDevice::open(&config, Some(&self.channel))?;
        let opened = self.install(found);
        opened.inspect_err(|_| {
            // Reverts the opening.
            if let Some(opened) = self.device.take() {
                self.completion.shared.close();
                self.regions.close();
                opened.close(&self.sleeper, false);
            }
        })
    }

    fn install(&mut self, found: OpenedDevice) -> Result<(), FabricError> {
        let is_watched = found.opened.watch.is_some();
        let fits = is_same(&self.capabilities, &found.capabilities);
        let OpenedDevice { opened, srq, choice, is_infiniband, quirks, capabilities, room, not_ready, .. } = found;
        let (opened, sleeper) = (self.device.insert(opened), &self.sleeper);
        let refused = |detail: &str| {
            let call = format!("opening {} again", choice.device);
            Err(FabricError::system(call, detail))
        };
        if !fits {
            return refused("it can do other things than the one before: start the program again");
        }
        if self.lost.as_ref().is_some_and(|lost| lost.was_watched && !is_watched) {
            return refused("the connection manager does not know it");
        }
        opened.wake(sleeper)?;
        self.regions.open(&opened.pd)?;
        self.completion.resume(SharedReceives::new(srq, self.config.shared_receives), room, &quirks);
        if let Some(listening) = &mut self.listener {
            listening.bind_again()?;
            listening.join(sleeper)?;
        }
        (self.choice, self.is_infiniband, self.quirks, self.capabilities) =
            (choice, is_infiniband, quirks, capabilities);
        self.not_ready_before = not_ready;
        Ok(())
    }
}

/// Whether the new device fits the promises to peers and the memory layout.
fn is_same(before: &Capabilities, now: &Capabilities) -> bool {
    let relied_on =
        |can: &Capabilities| (can.remote_invalidate, can.exposure_needs_own_arena, can.checks_window_bounds);
    relied_on(before) == relied_on(now)
}
