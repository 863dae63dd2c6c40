//! The state that all parts of a fabric share.

use std::collections::VecDeque;

use super::config::SoftwareConfig;
use super::region::{PeerMemory, Regions};
use crate::connection_manager::Control;
use crate::receives::Receives;
use crate::{Completion, FabricStats};

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
pub(crate) struct Common {
    pub(super) config: SoftwareConfig,
    /// The shared receive queue.
    pub(super) receives: Receives,
    /// Completions that are due already, such as flushed ones.
    pub(super) ready: VecDeque<Completion>,
    pub(super) control: Control,
    pub(super) stats: FabricStats,
    pub(super) regions: Regions,
    pub(super) peer_memory: PeerMemory,
    /// A bell rang since `arm`.
    pub(super) rung: bool,
}
