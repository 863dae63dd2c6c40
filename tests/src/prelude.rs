//! What most integration tests name.

pub use std::sync::mpsc::{Receiver, Sender, channel};
pub use std::sync::{Arc, Mutex};
pub use std::time::{Duration, Instant};

pub use rpcrdma::client::{Client, ClientCall, ClientConfig, Connection, LocalClient};
pub use rpcrdma::fabric::{Access, RemoteMemory};
pub use rpcrdma::proto::Defect;
pub use rpcrdma::server::{ServerConfig, WorkerConfig};
pub use rpcrdma::service::{DeferredCall, MAX_CHUNKS};
pub use rpcrdma::wire::properties::{Builder, Properties, Property};
pub use rpcrdma::wire::rpc::{AcceptStat, OpaqueAuth, ReplyBody, ReplyHeader};
pub use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
pub use rpcrdma::{
    Address, Buf, CallError, CallResult, CloseReason, Config, CreditMode, FailedCall, IdlePolicy, Knob, Procedure,
    Refusal, Server, ServerCall, Services,
};

pub use crate::*;

/// All credit modes.
pub const SCHEMES: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
/// The credit modes of version 2.
pub const SCHEMES_2: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V2Incremental];
