//! Counters of a pool, and the holders of its buffers.

/// Counters of a pool; see [`Pool::stats`](crate::Pool::stats).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct PoolStats {
    /// Smallest size first.
    #[cfg_attr(feature = "serde", serde(rename = "pool"))]
    pub classes: Vec<ClassStats>,
    /// Buffers lost because a [`Posted`](crate::Posted) was dropped.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_leaked"))]
    pub leaked: u64,
    /// Requests longer than the largest class.
    #[cfg_attr(feature = "serde", serde(rename = "pool_oversize"))]
    pub oversize: u64,
}

/// Counters of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct ClassStats {
    /// Capacity of its buffers, in bytes.
    pub size: usize,
    /// Number of buffers.
    #[cfg_attr(feature = "serde", serde(rename = "buffers"))]
    pub count: usize,
    /// On the free list.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_free"))]
    pub free: usize,
    /// Not on the free list.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_used"))]
    pub outstanding: usize,
    /// Fewest free since the start or the last [`Pool::reset_low_water`](crate::Pool::reset_low_water).
    #[cfg_attr(feature = "serde", serde(rename = "buffers_lowest"))]
    pub low_water: usize,
    /// Fitting requests that found the class empty. They took a larger class, or failed.
    #[cfg_attr(feature = "serde", serde(rename = "misses"))]
    pub failures: u64,
}

/// Holders of a pool's buffers; see [`Pool::census`](crate::Pool::census).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Smallest size first.
    pub classes: Vec<ClassCensus>,
}

/// Holders of the buffers of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCensus {
    /// Capacity of its buffers, in bytes.
    pub size: usize,
    /// Number of buffers: the sum of all counts below.
    pub count: usize,
    /// On the free list.
    pub free: usize,
    /// In a [`Buf`](crate::Buf).
    pub held: usize,
    /// In a [`Frozen`](crate::Frozen) and its clones.
    pub frozen: usize,
    /// In a [`Lent`](crate::Lent) and its clones.
    pub lent: usize,
    /// In a [`Posted`](crate::Posted).
    pub posted: usize,
    /// In a [`Posted`](crate::Posted) that was dropped.
    pub leaked: usize,
}

impl ClassCensus {
    /// Not on the free list.
    pub fn outstanding(&self) -> usize {
        self.count - self.free
    }
}
