//! A wrapper that logs each request, completion and event of a fabric.
//!
//! ```
//! use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric};
//! use rpcrdma_fabric::Fabric;
//! use rpcrdma_fabric::testing::trace;
//! let inner = SoftwareFabric::new(SoftwareConfig::default())?;
//! let traced = trace::Trace::new(inner, trace::length, |line| println!("{line}"));
//! assert!(traced.capabilities().max_message > 0);
//! # Ok::<(), rpcrdma_fabric::FabricError>(())
//! ```

#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::inner;
use crate::forward::forward;
use crate::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Source, Waker, WindowId, WorkRequest,
};

/// Formats a message as text.
pub type Printer = fn(&[u8]) -> String;

/// A [`Printer`] that prints only the length of a message.
pub fn length(message: &[u8]) -> String {
    format!("{} bytes", message.len())
}

/// Logs the calls of a fabric. Empty polls log nothing.
pub struct Trace<F> {
    inner: F,
    printer: Printer,
    sink: Box<dyn FnMut(&str)>,
}

impl<F: Fabric> Trace<F> {
    /// Wraps a fabric. `sink` gets each line, without the line end.
    pub fn new(inner: F, printer: Printer, sink: impl FnMut(&str) + 'static) -> Self {
        Self { inner, printer, sink: Box::new(sink) }
    }

    /// The inner fabric.
    pub fn inner(&mut self) -> &mut F {
        &mut self.inner
    }

    /// Returns the inner fabric.
    pub fn into_inner(self) -> F {
        self.inner
    }

    fn log(&mut self, text: fmt::Arguments<'_>) {
        (self.sink)(&text.to_string());
    }

    fn format_request(&self, qp: QpId, posting: &Posting) -> String {
        let signaled = if posting.signaled { " signaled" } else { "" };
        let request = match &posting.wr {
            WorkRequest::Send { buf, invalidate, fence } => {
                let invalidate = invalidate.map_or(String::new(), |key| format!(" invalidates {key:#010x}"));
                let fence = if *fence { " fenced" } else { "" };
                format!("Send{invalidate}{fence}: {}", (self.printer)(buf))
            }
            WorkRequest::Write { src, len, remote, .. } => {
                let src = match src {
                    Source::Lent(lent) => format!("{lent:?}"),
                    Source::Frozen(frozen) => format!("{frozen:?}"),
                };
                format!("Write {len} bytes of {src} to {:#010x}+{:#x}", remote.rkey, remote.address)
            }
            WorkRequest::Read { dst, len, remote, .. } => {
                format!("Read {len} bytes of {:#010x}+{:#x} to {dst:?}", remote.rkey, remote.address)
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                format!("Bind window {} to {offset}+{len} of {mem:?} for {access:?}", window.index)
            }
            WorkRequest::LocalInvalidate { window } => format!("LocalInvalidate window {}", window.index),
        };
        format!("{qp:?} > {:#x}{signaled} {request}", posting.wr_id)
    }

    fn format_completion(&self, done: &Completion) -> String {
        let Completion { wr_id, qp, opcode, status, buf, invalidated } = done;
        let invalidated = invalidated.map_or(String::new(), |key| format!(" invalidated {key:#010x}"));
        match buf {
            Some(buf) if status.is_ok() => {
                format!("{qp:?} < {opcode:?}{invalidated}: {}", (self.printer)(buf))
            }
            _ => format!("{qp:?} < {wr_id:#x} {opcode:?} {status:?}{invalidated}"),
        }
    }
}

impl<F: fmt::Debug> fmt::Debug for Trace<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<F: Fabric> Fabric for Trace<F> {
    type Listener = F::Listener;

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        let result = self.inner.register(arena, access);
        self.log(format_args!("register arena {} of {} bytes for {access:?}: {result:?}", arena.id(), arena.len()));
        result
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let result = self.inner.deregister(arena);
        self.log(format_args!("deregister arena {arena}: {result:?}"));
        result
    }

    fn bind(address: &FabricAddress) -> Result<Self::Listener, FabricError> {
        F::bind(address)
    }

    fn listen(&mut self, listener: &Self::Listener) -> Result<(), FabricError> {
        let result = self.inner.listen(listener);
        self.log(format_args!("listen: {result:?}"));
        result
    }

    fn unlisten(&mut self) {
        self.log(format_args!("unlisten"));
        self.inner.unlisten();
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let result = self.inner.connect(address, params);
        self.log(format_args!("connect to {:?} with {params:?}: {result:?}", address.0));
        result
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let result = self.inner.accept(request, params);
        self.log(format_args!("accept {request:?} with {params:?}: {result:?}"));
        result
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        self.log(format_args!("reject {request:?} with {} bytes", private_data.len()));
        self.inner.reject(request, private_data);
    }

    fn disconnect(&mut self, qp: QpId) {
        self.log(format_args!("{qp:?} disconnect"));
        self.inner.disconnect(qp);
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.log(format_args!("{qp:?} destroy"));
        self.inner.destroy_qp(qp);
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let before = events.len();
        self.inner.poll_control(events);
        for event in &events[before..] {
            self.log(format_args!("event {event:?}"));
        }
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let result = self.inner.alloc_window(qp);
        self.log(format_args!("{qp:?} window: {result:?}"));
        result
    }

    fn fence_receives(&mut self) {
        self.log(format_args!("fence shared Receives"));
        self.inner.fence_receives();
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let (wanted, taken) = (bufs.len(), self.inner.post_recv(qp, bufs));
        match qp {
            Some(qp) => self.log(format_args!("{qp:?} Receives: {taken} of {wanted}")),
            None => self.log(format_args!("shared Receives: {taken} of {wanted}")),
        }
        taken
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let lines: Vec<String> = chain.iter().map(|posting| self.format_request(qp, posting)).collect();
        let result = self.inner.post_send(qp, chain);
        let taken = lines.len() - chain.len();
        for line in &lines[..taken] {
            (self.sink)(line);
        }
        if let Err(error) = result {
            self.log(format_args!("{qp:?} post: {error:?}, {} left", chain.len()));
        }
        result
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let n = self.inner.poll_cq(out, max);
        for done in &out[before..] {
            let line = self.format_completion(done);
            (self.sink)(&line);
        }
        n
    }

    fn arm(&mut self) {
        self.log(format_args!("arm"));
        self.inner.arm();
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.log(format_args!("wait {timeout:?}"));
        self.inner.wait(timeout)
    }

    forward! {
        inner(self):
        fn capabilities(&self) -> &Capabilities;
        fn stats(&self) -> FabricStats;
        fn holds_sends(&mut self, qp: QpId) -> bool;
        fn flow(&mut self, qp: QpId) -> Option<Flow>;
        fn round_trip(&mut self, qp: QpId) -> Option<Duration>;
        fn next_rkey(&self, window: WindowId) -> u32;
        fn remote_address(&self, mem: &Lent, offset: usize) -> u64;
        fn waker(&self) -> Waker;
        fn descriptor(&self) -> BorrowedFd<'_>;
        fn longest_wait(&self) -> Option<Duration>;
    }
}
