//! A start-up probe of the device with two connected queue pairs.
//!
//! The probe finds out whether a peer's Send invalidates a window, and whether the device checks window bounds. It runs
//! once per device and process, when the device is first opened.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rdma_sys::{ibv_access_flags, ibv_port_attr, ibv_qp_attr_mask as mask, ibv_qp_state as state};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::device::Choice;
use super::quirks::Quirks;
use super::region::MemoryRegions;
use super::sys::{CompletionChannel, CompletionQueue, DeviceContext, ProtectionDomain, QpAttributes};
use super::work_queues::{PostContext, WorkQueues};
use super::wr_id::WrId;
use crate::{
    Access, Completion, ConnectParams, Opcode, Posting, QpId, RemoteMemory, Source, Status, WindowId, WorkRequest, lock,
};

/// Time-out of each completion, after which the probe has failed. Its result is kept for the process.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of a buffer.
const BYTES: usize = 4096;
/// Bytes of the window in a buffer.
const WINDOW: usize = 64;

/// Results of the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProbeResults {
    /// Whether a Send With Invalidate revokes a window, reports its key, and leaves the window free.
    pub(super) remote_invalidate: bool,
    /// Whether the device refuses a Write beyond the end of a window.
    pub(super) checks_window_bounds: bool,
}

/// Probes the device, once per process. `None` if the probe failed to run.
pub(super) fn probe_once(
    context: &Rc<DeviceContext>,
    choice: &Choice,
    port: &ibv_port_attr,
    quirks: &Quirks,
) -> Option<ProbeResults> {
    static RESULTS: Mutex<BTreeMap<String, Option<ProbeResults>>> = Mutex::new(BTreeMap::new());
    let mut results = lock(&RESULTS);
    let probe = || {
        let pair = || ProbePair::new(context, choice, port, quirks);
        let probed = pair().and_then(ProbePair::probe_remote_invalidate).and_then(|remote_invalidate| {
            Ok(ProbeResults { remote_invalidate, checks_window_bounds: pair()?.probe_window_bounds()? })
        });
        match &probed {
            Ok(results) => log::debug!("{}: {results:?}", choice.device),
            Err(error) => log::info!("{}: start-up probe failed: {error}", choice.device),
        }
        probed.ok()
    };
    *results.entry(choice.device.clone()).or_insert_with(probe)
}

/// Two queue pairs and their memory. The first exposes memory to the second.
struct ProbePair {
    ends: [WorkQueues; 2],
    out: Vec<Completion>,
    /// The invalidated key of the last Receive.
    invalidated: Option<u32>,
    /// Completion flags that report a remote invalidation.
    invalidated_mask: u32,
    context: PostContext,
    cq: Rc<CompletionQueue>,
    pool: Pool,
}

/// The identifier of the queue pair of an end.
fn qp(end: usize) -> QpId {
    QpId { slot: end as u32, generation: 0 }
}

impl ProbePair {
    fn new(context: &Rc<DeviceContext>, choice: &Choice, port: &ibv_port_attr, quirks: &Quirks) -> io::Result<Self> {
        let pd = ProtectionDomain::new(context)?;
        let cq = CompletionQueue::new(context, CompletionChannel::new(context)?, 64)?;
        let arena = ArenaConfig { bytes: 0, name: "probe", pages: PagePolicy::Small, ..ArenaConfig::default() };
        let classes = vec![Class { size: BYTES, count: 4 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).map_err(io::Error::other)?;
        let mut regions = MemoryRegions::new(Some(&pd));
        regions.add(pool.arena(), Access::REMOTE).map_err(io::Error::other)?;
        let params =
            ConnectParams { send_queue_depth: 8, own_receive_queue: Some(2), windows: 1, ..ConnectParams::default() };
        let end = |slot| WorkQueues::new(qp(slot), &pd, &cq, None, &params, 0);
        let mut ends = [end(0)?, end(1)?];
        ends[0].windows.add(qp(0)).map_err(io::Error::other)?;
        for (own, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
            for step in state_transitions(peer.number(), choice, port) {
                own.modify(step)?;
            }
        }
        let invalidated_mask = quirks.invalidated_flags;
        let context = PostContext::new(regions);
        Ok(Self { ends, out: Vec::new(), invalidated: None, invalidated_mask, context, cq, pool })
    }

    fn buf(&self, len: usize) -> io::Result<Buf> {
        self.pool.alloc(len).ok_or_else(|| io::Error::other("no buffer left"))
    }

    fn lend_buf(&self) -> io::Result<Lent> {
        self.buf(BYTES)?.lend().map_err(|_| io::Error::other("the pool belongs to another thread"))
    }

    fn post(&mut self, end: usize, wr: WorkRequest) -> io::Result<()> {
        let mut chain = vec![Posting { wr_id: 0, signaled: true, wr }];
        let posted = self.ends[end].post(&mut self.context, &mut chain, usize::MAX);
        posted.map_err(|why| io::Error::other(format!("{why:?}")))
    }

    /// Waits for the next completion of this kind at this end.
    fn wait(&mut self, end: usize, opcode: Opcode) -> io::Result<Status> {
        let start = Instant::now();
        loop {
            if let Some(at) = self.out.iter().position(|done| (done.qp, done.opcode) == (qp(end), opcode)) {
                return Ok(self.out.remove(at).status);
            }
            if start.elapsed() > TIMEOUT {
                return Err(io::Error::other(format!("{opcode:?} did not complete within {TIMEOUT:?}")));
            }
            let Self { ends, out, invalidated, invalidated_mask, cq, .. } = self;
            cq.poll(usize::MAX, |done| {
                let (id, status) = (WrId(done.wr_id), super::completion::status(done.status));
                let slot = id.slot() as usize & 1;
                let queues = &mut ends[slot];
                if id.is_receive() {
                    let len = if status.is_ok() { done.byte_len as usize } else { 0 };
                    let buf = queues.receives.as_mut().and_then(|table| table.complete(done, len));
                    out.push(Completion {
                        wr_id: 0,
                        qp: qp(slot),
                        opcode: Opcode::Recv,
                        status,
                        buf,
                        invalidated: None,
                    });
                    *invalidated = (done.wc_flags & *invalidated_mask != 0).then_some(done.invalidated_rkey());
                } else {
                    queues.retire(done, status, out);
                }
            })?;
        }
    }

    /// Binds the first end's window and returns the peer's view of it.
    fn expose(&mut self, mem: &Lent) -> io::Result<RemoteMemory> {
        let rkey = self.ends[0].windows.next_rkey(0).ok_or_else(|| io::Error::other("no window"))?;
        let window = WindowId { qp: qp(0), index: 0 };
        let (mem, address) = (mem.clone(), mem.address() as u64);
        self.post(0, WorkRequest::Bind { window, mem, offset: 0, len: WINDOW, access: Access::REMOTE_WRITE })?;
        match self.wait(0, Opcode::Bind)? {
            Status::Success => Ok(RemoteMemory { rkey, address }),
            status => Err(io::Error::other(format!("binding a window: {status}"))),
        }
    }

    /// Posts a Write of the peer and returns its status.
    fn write(&mut self, len: usize, remote: RemoteMemory) -> io::Result<Status> {
        let src = Source::Lent(self.lend_buf()?);
        self.post(1, WorkRequest::Write { src, offset: 0, len, remote })?;
        self.wait(1, Opcode::Write)
    }

    fn probe_remote_invalidate(mut self) -> io::Result<bool> {
        let mem = self.lend_buf()?;
        let first = self.expose(&mem)?;
        if !self.write(WINDOW, first)?.is_ok() {
            return Err(io::Error::other("the device refused a Write into a window"));
        }
        let mut receive = vec![self.buf(BYTES)?];
        self.ends[0].post_recv(&self.context.regions, &mut receive, 1);
        let buf = self.buf(1)?;
        self.post(1, WorkRequest::Send { buf, invalidate: Some(first.rkey), fence: false })?;
        if !self.wait(0, Opcode::Recv)?.is_ok() || self.invalidated != Some(first.rkey) {
            return Ok(false);
        }
        // The window must be free now, and its old key invalid.
        self.ends[0].windows.free_invalidated(first.rkey);
        let reused = self.expose(&mem)?;
        Ok(self.write(WINDOW, reused)?.is_ok() && self.write(WINDOW, first)? == Status::RemoteAccess)
    }

    fn probe_window_bounds(mut self) -> io::Result<bool> {
        let mem = self.lend_buf()?;
        let remote = self.expose(&mem)?;
        Ok(self.write(WINDOW + 1, remote)? == Status::RemoteAccess)
    }
}

impl Drop for ProbePair {
    fn drop(&mut self) {
        for end in &mut self.ends {
            // The error state flushes outstanding requests. The windows are destroyed before the queue pairs.
            let _ = end.modify(QpAttributes::state(state::IBV_QPS_ERR));
            end.destroy(&mut Vec::new());
        }
    }
}

/// The state changes that connect a queue pair to its peer on the same port, without a connection manager.
fn state_transitions(peer: u32, choice: &Choice, port: &ibv_port_attr) -> [QpAttributes; 3] {
    let init = QpAttributes::init(choice.port, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    let mut receive = QpAttributes::state(state::IBV_QPS_RTR);
    receive.attr.path_mtu = port.active_mtu;
    receive.attr.dest_qp_num = peer;
    receive.attr.max_dest_rd_atomic = 1;
    receive.attr.min_rnr_timer = 12; // 0.64 ms
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
    send.attr.timeout = 14; // 67 ms
    send.attr.retry_cnt = 6;
    send.attr.rnr_retry = ConnectParams::UNLIMITED_RNR_RETRY;
    send.attr.max_rd_atomic = 1;
    send.mask |= (mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_MAX_QP_RD_ATOMIC)
        .0;
    [init, receive, send]
}
