//! A device test with two connected queue pairs.
//!
//! It shows whether a peer's Send invalidates a window, and whether window bounds are checked. It runs once per device
//! and process, at the first opening.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdma_sys::{ibv_qp_attr_mask as mask, ibv_qp_state as state};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::device::Choice;
use super::endpoint::{Endpoint, Parts, Scratch};
use super::quirks::Quirks;
use super::region::Regions;
use super::sys::{
    CompletionChannel, CompletionQueue, Context, PortAttributes, ProtectionDomain, QpAttributes, WorkCompletion,
};
use super::wr_id::WrId;
use crate::{
    Access, Completion, FabricStats, Opcode, Posting, QpId, RemoteMemory, Source, Status, WindowId, WorkRequest,
};

/// Time-out of the test, which is never repeated.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of a buffer.
const BYTES: usize = 4096;
/// Bytes of the window in it.
const WINDOW: usize = 64;

/// Results of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProbeResults {
    /// Send With Invalidate revokes a window, reports it, and leaves the window free.
    pub(super) remote_invalidate: bool,
    /// The device refuses a Write beyond the end of a window.
    pub(super) checks_window_bounds: bool,
}

/// Tests the device, once per process. `None` if the test failed to run.
pub(super) fn findings(
    context: &Rc<Context>,
    choice: &Choice,
    port: &PortAttributes,
    quirks: &Quirks,
) -> Option<ProbeResults> {
    static KNOWN: Mutex<Option<HashMap<String, Option<ProbeResults>>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_with(HashMap::new);
    if let Some(findings) = known.get(&choice.device) {
        return *findings;
    }
    let found = ask(context, choice, port, quirks);
    match &found {
        Ok(findings) => log::debug!("{}: {findings:?}", choice.device),
        Err(error) => log::info!("{} cannot be asked what it does: {error}", choice.device),
    }
    let found = found.ok();
    known.insert(choice.device.clone(), found);
    found
}

fn ask(context: &Rc<Context>, choice: &Choice, port: &PortAttributes, quirks: &Quirks) -> io::Result<ProbeResults> {
    Ok(ProbeResults {
        remote_invalidate: Pair::new(context, choice, port, quirks)?.invalidates()?,
        checks_window_bounds: Pair::new(context, choice, port, quirks)?.keeps_bounds()?,
    })
}

/// Two queue pairs and their memory. The first exposes memory to the second.
struct Pair {
    ends: [Endpoint; 2],
    out: Vec<Completion>,
    /// The invalidated key of the last Receive.
    invalidated: Option<u32>,
    flags: u32,
    regions: Regions,
    scratch: Scratch,
    stats: FabricStats,
    cq: Rc<CompletionQueue>,
    pool: Pool,
}

fn other(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(why)
}

impl Pair {
    fn new(context: &Rc<Context>, choice: &Choice, port: &PortAttributes, quirks: &Quirks) -> io::Result<Self> {
        let pd = ProtectionDomain::new(context)?;
        let cq = CompletionQueue::new(context, &CompletionChannel::new(context)?, 64)?;
        let arena = ArenaConfig { bytes: 0, name: "probe", pages: PagePolicy::Small, ..ArenaConfig::default() };
        let classes = vec![Class { size: BYTES, count: 4 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).map_err(other)?;
        let mut regions = Regions::new(&pd);
        regions.add(pool.arena(), Access::REMOTE).map_err(other)?;
        let end = |slot| {
            let id = QpId { slot, generation: 0 };
            let (send_depth, own_receives) = (8, Some(2));
            Endpoint::new(&Parts {
                id,
                pd: &pd,
                cq: &cq,
                srq: None,
                send_depth,
                own_receives,
                max_inline_data: 0,
                windows: 1,
            })
        };
        let ends = [end(0)?, end(1)?];
        for (own, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
            for step in steps(peer.number(), choice, port) {
                own.modify(step)?;
            }
        }
        let (scratch, stats) = (Scratch::default(), FabricStats::default());
        let flags = quirks.invalidated_flags;
        Ok(Self { ends, out: Vec::new(), invalidated: None, flags, regions, scratch, stats, cq, pool })
    }

    fn buf(&self, len: usize) -> io::Result<Buf> {
        self.pool.alloc(len).ok_or_else(|| other("no buffer is left"))
    }

    fn lent(&self) -> io::Result<Lent> {
        self.buf(BYTES)?.lend().map_err(|_| other("a pool lends on its own thread only"))
    }

    fn post(&mut self, end: usize, wr: WorkRequest) -> io::Result<()> {
        let mut chain = vec![Posting { wr_id: 0, signalled: true, wr }];
        let posted = self.ends[end].post(&mut self.scratch, &self.regions, &mut self.stats, &mut chain, usize::MAX);
        posted.map_err(|why| other(format!("{why:?}")))
    }

    /// Waits for the next completion of this kind at this end.
    fn wait(&mut self, end: usize, opcode: Opcode) -> io::Result<Status> {
        let start = Instant::now();
        loop {
            let qp = QpId { slot: end as u32, generation: 0 };
            if let Some(at) = self.out.iter().position(|done| (done.qp, done.opcode) == (qp, opcode)) {
                return Ok(self.out.remove(at).status);
            }
            if start.elapsed() > PATIENCE {
                return Err(other(format!("{opcode:?} does not end")));
            }
            let Self { ends, out, invalidated, flags, cq, .. } = self;
            cq.poll(usize::MAX, |done| {
                let end = &mut ends[WrId(done.wr_id()).slot() as usize & 1];
                let status = super::complete::status(done.status);
                if WrId(done.wr_id()).is_receive() {
                    received(end, &done, status, out);
                    *invalidated = (done.flags & *flags != 0).then_some(done.extra);
                } else {
                    end.retire(&done, status, out);
                }
            })?;
        }
    }

    /// Binds the first end's window and returns the peer's view of it.
    fn expose(&mut self, mem: &Lent) -> io::Result<RemoteMemory> {
        let rkey = self.ends[0].windows.next_rkey(0).ok_or_else(|| other("no window"))?;
        let window = WindowId { qp: QpId { slot: 0, generation: 0 }, index: 0 };
        let (mem, address) = (mem.clone(), mem.address() as u64);
        self.post(0, WorkRequest::Bind { window, mem, offset: 0, len: WINDOW, access: Access::REMOTE_WRITE })?;
        match self.wait(0, Opcode::Bind)? {
            Status::Success => Ok(RemoteMemory { rkey, address }),
            status => Err(other(format!("a window is not bound: {status:?}"))),
        }
    }

    fn add_window(&mut self) -> io::Result<()> {
        self.ends[0].windows.add(QpId { slot: 0, generation: 0 }).map(drop).map_err(other)
    }

    /// Posts a Write of the peer and returns its status.
    fn write(&mut self, len: usize, remote: RemoteMemory) -> io::Result<Status> {
        let src = Source::Lent(self.lent()?);
        self.post(1, WorkRequest::Write { src, offset: 0, len, remote })?;
        self.wait(1, Opcode::Write)
    }

    fn invalidates(mut self) -> io::Result<bool> {
        self.add_window()?;
        let mem = self.lent()?;
        let first = self.expose(&mem)?;
        if !self.write(WINDOW, first)?.is_ok() {
            return Err(other("a Write into a window is refused"));
        }
        let mut receive = vec![self.buf(BYTES)?];
        self.ends[0].post_recv(&self.regions, &mut receive, 1);
        let buf = self.buf(1)?;
        self.post(1, WorkRequest::Send { buf, invalidate: Some(first.rkey), fence: false })?;
        if !self.wait(0, Opcode::Recv)?.is_ok() || self.invalidated != Some(first.rkey) {
            return Ok(false);
        }
        // The window must be free now, and its old key invalid.
        self.ends[0].windows.revoked_by_peer(first.rkey);
        let again = self.expose(&mem)?;
        Ok(self.write(WINDOW, again)?.is_ok() && self.write(WINDOW, first)? == Status::RemoteAccess)
    }

    fn keeps_bounds(mut self) -> io::Result<bool> {
        self.add_window()?;
        let mem = self.lent()?;
        let remote = self.expose(&mem)?;
        Ok(self.write(WINDOW + 1, remote)? == Status::RemoteAccess)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for end in &mut self.ends {
            // Outstanding requests are flushed. The windows go before the queue pairs.
            let _ = end.modify(QpAttributes::state(state::IBV_QPS_ERR));
            end.destroy(&mut Vec::new());
        }
    }
}

fn received(end: &mut Endpoint, done: &WorkCompletion, status: Status, out: &mut Vec<Completion>) {
    let received = if status.is_ok() { done.byte_len as usize } else { 0 };
    let qp = QpId { slot: WrId(done.wr_id()).slot(), generation: 0 };
    let buf = end.received(done, received);
    out.push(Completion { wr_id: 0, qp, opcode: Opcode::Recv, status, buf, invalidated: None });
}

/// Connects a queue pair to its peer on the same port, without a connection manager.
fn steps(peer: u32, choice: &Choice, port: &PortAttributes) -> [QpAttributes; 3] {
    let mut init = QpAttributes::state(state::IBV_QPS_INIT);
    init.attr.port_num = choice.port;
    init.attr.qp_access_flags = rdma_sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
    init.mask |= (mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS).0;
    let mut receive = QpAttributes::state(state::IBV_QPS_RTR);
    receive.attr.path_mtu = port.mtu_code;
    receive.attr.dest_qp_num = peer;
    receive.attr.max_dest_rd_atomic = 1;
    receive.attr.min_rnr_timer = 12;
    let to = &mut receive.attr.ah_attr;
    to.port_num = choice.port;
    to.dlid = port.lid;
    if let Some(gid) = &choice.gid {
        to.is_global = 1;
        to.grh.dgid.raw = gid.value.octets();
        to.grh.sgid_index = gid.index as u8;
        to.grh.hop_limit = 1;
    }
    receive.mask |= (mask::IBV_QP_AV
        | mask::IBV_QP_PATH_MTU
        | mask::IBV_QP_DEST_QPN
        | mask::IBV_QP_RQ_PSN
        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | mask::IBV_QP_MIN_RNR_TIMER)
        .0;
    let mut send = QpAttributes::state(state::IBV_QPS_RTS);
    send.attr.timeout = 14;
    send.attr.retry_cnt = 6;
    send.attr.rnr_retry = 7;
    send.attr.max_rd_atomic = 1;
    send.mask |= (mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_MAX_QP_RD_ATOMIC)
        .0;
    [init, receive, send]
}
