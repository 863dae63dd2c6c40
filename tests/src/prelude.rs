//! Names that most integration tests import.

pub use std::cell::{Cell, RefCell};
pub use std::collections::VecDeque;
pub use std::future::poll_fn;
pub use std::net::Ipv4Addr;
pub use std::rc::Rc;
pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
pub use std::sync::mpsc::{Receiver, Sender, channel};
pub use std::sync::{Arc, Mutex};
pub use std::task::{Context, Poll, Waker};
pub use std::thread::JoinHandle;
pub use std::time::{Duration, Instant};

pub use rpcrdma::auth::{AuthPolicy, PreSharedKey};
pub use rpcrdma::client::{
    Client, ClientCall, ClientConfig, ConnectError, Connection, Credential, LocalClient, Pending,
};
pub use rpcrdma::fabric::any::AnyFabric;
pub use rpcrdma::fabric::testing::loopback_address;
pub use rpcrdma::fabric::{Access, RemoteMemory};
pub use rpcrdma::proto::Defect;
pub use rpcrdma::proto::auth::AuthError;
pub use rpcrdma::server::{LocalServer, ServerConfig, WorkerConfig};
pub use rpcrdma::service::{Application, Caller, DeferredCall, LocalServices, MAX_CHUNKS, ShardSetup, ShardTask};
pub use rpcrdma::shard::{CloseCause, Shard, SimulatedTime};
pub use rpcrdma::stats::ShardStats;
pub use rpcrdma::wire::optional::Operation;
pub use rpcrdma::wire::properties::{Builder, Properties, Property, PropertyId, ReverseSupport};
pub use rpcrdma::wire::rpc::{AcceptStat, CallHeader, OpaqueAuth, ReplyBody, ReplyHeader};
pub use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
pub use rpcrdma::{
    Address, Buf, CallError, CallResult, CloseReason, CloseReasonKind, Config, CreditMode, FailedCall, IdlePolicy,
    Knob, Procedure, Refusal, Server, ServerCall, Services,
};
pub use rpcrdma_mempool::{Arena, ArenaConfig, Class, Lent, PagePolicy, Pool, PoolConfig};
pub use rustix::fd::{AsFd, BorrowedFd};

pub use crate::assert_matches;
pub use crate::*;

/// All credit modes.
pub const CREDIT_MODES: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
/// The credit modes of version 2.
pub const V2_CREDIT_MODES: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V2Incremental];
