//! The client: concurrent calls in reused buffers.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use rpcrdma::Buf;
use rpcrdma::auth::AuthPolicy;
use rpcrdma::client::{ClientCall, ClientConfig, Connection};
use rpcrdma::typed::{self, CallOptions, Response, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma::{Address, CallError, FailedCall, LocalClient, Reply};
use rpcrdma_config::{BUDGET, memory_line, print_error};
use rpcrdma_proto::wire::ErrorBody;

use crate::protocol::blockstore_v1::{self, Flush, Read, Write};
use crate::protocol::{Info, ReadArgs, ReadData, Status, WriteArgs, Written};

/// Time limit of a call other than FLUSH.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a FLUSH, which may have to write much data.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(600);
/// Limit of the retries of a block for which the server has no buffer.
const MAX_RETRIES: u32 = 1000;

/// Part of the file and of the store, at the same offset in both.
#[derive(Clone, Copy, Debug)]
struct Block {
    offset: u64,
    len: usize,
    retries: u32,
}

impl Block {
    /// The n-th block of a file.
    fn nth(n: u32, block: usize, size: u64) -> Self {
        let offset = u64::from(n) * block as u64;
        Self { offset, len: (size - offset).min(block as u64) as usize, retries: 0 }
    }
}

/// Result of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferStats {
    pub(crate) bytes: u64,
    pub(crate) time: Duration,
    /// Number of retries because the server had no free buffer.
    pub(crate) retried: u64,
}

/// A connection to a block store.
pub(crate) struct BlockClient {
    client: LocalClient,
    info: Info,
    block: usize,
    depth: usize,
    /// Idle chunk memory.
    buffers: Vec<Buf>,
}

impl BlockClient {
    /// Connects, and gets the description of the store.
    pub(crate) fn connect(
        address: &Address,
        block: usize,
        depth: usize,
        host_auth: AuthPolicy,
    ) -> anyhow::Result<Self> {
        let mut config = ClientConfig::new(blockstore_v1::PROGRAM, blockstore_v1::VERSION);
        (config.shard.memory.budget, config.shard.memory.bulk_buffers) = (BUDGET, vec![(block, depth)]);
        config.shard.limits.max_calls = depth;
        config.shard.wire.host_auth = host_auth;
        print_error!("{}", memory_line(&config.shard, 1, 1));
        let client = LocalClient::connect(address, config)?;
        let mut this = Self { client, info: Info::default(), block, depth, buffers: Vec::new() };
        let reply = this.call_without_args::<blockstore_v1::Info>(CALL_TIMEOUT);
        let reply = reply.context("call of procedure INFO")?;
        this.info = reply.results()?.into_result()?;
        let max = this.info.block_max;
        ensure!(block <= max as usize, "blocks of {block} bytes exceed the store's limit of {max} (--block)");
        Ok(this)
    }

    /// Description of the store.
    pub(crate) fn info(&self) -> Info {
        self.info
    }

    /// Calls a procedure without arguments.
    fn call_without_args<P: for<'a> Signature<Args<'a> = ()>>(
        &mut self,
        timeout: Duration,
    ) -> anyhow::Result<Response<P>> {
        let connection = self.client.first();
        typed::call(&mut (&mut self.client, connection), CallOptions::new().timeout(timeout), &()).map_err(explain)
    }

    /// Makes earlier writes stable.
    pub(crate) fn flush(&mut self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        match self.call_without_args::<Flush>(FLUSH_TIMEOUT).context("FLUSH")?.results()? {
            Status::Ok => Ok(start.elapsed()),
            status => Err(status).context("FLUSH"),
        }
    }

    /// Writes a file to the start of the store. It is stable only after [`flush`](Self::flush).
    pub(crate) fn copy(&mut self, source: &File, size: u64) -> anyhow::Result<TransferStats> {
        let room = self.info.size;
        ensure!(size <= room, "the source has {size} bytes, but the store only {room}");
        let order: Vec<u32> = (0..self.count_blocks(size)?).collect();
        let prepare = |target: &mut Target<'_>, block: Block, mut data: Buf| {
            // This is the only copy at the client: from the file to chunk memory.
            source.read_exact_at(&mut data, block.offset).context("cannot read the source")?;
            prepare_write(target, block, data)
        };
        self.transfer("WRITE", &order, size, prepare, finish_write)
    }

    /// Reads the blocks in an order given by `seed`, and compares their checksums with those of the file.
    ///
    /// Also returns the checksum (CRC-32) of the whole file.
    pub(crate) fn verify(&mut self, source: &File, size: u64, seed: u64) -> anyhow::Result<(TransferStats, u32)> {
        let block = self.block;
        let mut order: Vec<u32> = (0..self.count_blocks(size)?).collect();
        let (sums, whole) = checksums(source, size, block, order.len())?;
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        let finish = |at: Block, reply| {
            let data = finish_read(at, reply)?;
            let (actual, expected) = (crc32fast::hash(&data), sums[(at.offset / block as u64) as usize]);
            ensure!(actual == expected, "the checksum is {actual:08x}, but that of the source is {expected:08x}");
            Ok(data)
        };
        Ok((self.transfer("READ", &order, size, prepare_read, finish)?, whole))
    }

    /// Reads or writes whole blocks of the first `size` bytes for a time, in order or at random.
    ///
    /// Returns the number of blocks, and the time that they took.
    pub(crate) fn measure(
        &mut self,
        is_write: bool,
        is_random: bool,
        size: u64,
        time: Duration,
    ) -> anyhow::Result<(u64, Duration)> {
        let (start, block, count) = (Instant::now(), self.block, size / self.block as u64);
        ensure!(count > 0, "{size} bytes are less than a block of {block}");
        let (mut rng, mut next) = (fastrand::Rng::new(), 0);
        let blocks = std::iter::from_fn(|| {
            let n = if is_random { rng.u64(..count) } else { next % count };
            next += 1;
            (start.elapsed() < time).then_some(Block { offset: n * block as u64, len: block, retries: 0 })
        });
        let (prepare, finish): (Prepare, Finish) =
            if is_write { (prepare_write, finish_write) } else { (prepare_read, finish_read) };
        let (mut ended, mut retried) = (0, 0);
        self.run_pipeline(blocks, prepare, finish, (&mut ended, &mut retried))?;
        Ok((ended, start.elapsed()))
    }

    fn count_blocks(&self, size: u64) -> anyhow::Result<u32> {
        let blocks = size.div_ceil(self.block as u64);
        u32::try_from(blocks).with_context(|| format!("{blocks} blocks exceed {}: choose a larger --block", u32::MAX))
    }

    /// Transfers the blocks of a file in the given order, with `depth` outstanding calls.
    fn transfer(
        &mut self,
        what: &str,
        order: &[u32],
        size: u64,
        prepare: impl FnMut(&mut Target<'_>, Block, Buf) -> anyhow::Result<ClientCall>,
        finish: impl FnMut(Block, Reply) -> anyhow::Result<Buf>,
    ) -> anyhow::Result<TransferStats> {
        let start = Instant::now();
        let (mut ended, mut retried, block) = (0, 0, self.block);
        let blocks = order.iter().map(|&n| Block::nth(n, block, size));
        self.run_pipeline(blocks, prepare, finish, (&mut ended, &mut retried))
            .with_context(|| format!("{what} stopped after {ended} of {} blocks", order.len()))?;
        Ok(TransferStats { bytes: size, time: start.elapsed(), retried })
    }

    /// Runs a transfer: starts calls while there are free tokens, polls, and completes calls.
    fn run_pipeline(
        &mut self,
        mut blocks: impl Iterator<Item = Block>,
        mut prepare: impl FnMut(&mut Target<'_>, Block, Buf) -> anyhow::Result<ClientCall>,
        mut finish: impl FnMut(Block, Reply) -> anyhow::Result<Buf>,
        (ended, retried): (&mut u64, &mut u64),
    ) -> anyhow::Result<()> {
        let connection = self.client.first();
        // Outstanding calls by token.
        let mut outstanding: Vec<Option<Block>> = vec![None; self.depth];
        let mut free: Vec<usize> = (0..self.depth).rev().collect();
        let mut retries: Vec<Block> = Vec::new();
        let mut done = Vec::with_capacity(self.depth);
        loop {
            while let Some(&token) = free.last() {
                let Some(block) = retries.pop().or_else(|| blocks.next()) else { break };
                let mut buffer = match self.buffers.pop() {
                    Some(buffer) => buffer,
                    None => self.client.alloc(connection, self.block)?,
                };
                buffer.set_window(0, block.len);
                let at = || format!("at {}", block.offset);
                let call = prepare(&mut (&mut self.client, connection), block, buffer).with_context(at)?;
                outstanding[token] = Some(block);
                free.pop();
                self.client.start(connection, call, token as u64);
            }
            if free.len() == self.depth {
                return Ok(());
            }
            if !self.client.poll(|end| done.push(end)) {
                std::thread::yield_now();
            }
            for end in done.drain(..) {
                let token = end.token as usize;
                let block =
                    outstanding.get_mut(token).and_then(Option::take).context("completion of an unknown call")?;
                free.push(token);
                let at = || format!("{} bytes at {}", block.len, block.offset);
                match end.result {
                    Ok(reply) => {
                        self.buffers.push(finish(block, reply).with_context(at)?);
                        *ended += 1;
                    }
                    // The server has no free buffer. READ and WRITE are idempotent, so they can be retried.
                    Err(FailedCall { error: CallError::Transport(ErrorBody::System), .. })
                        if block.retries < MAX_RETRIES =>
                    {
                        retries.push(Block { retries: block.retries + 1, ..block });
                        *retried += 1;
                    }
                    Err(failed) => return Err(explain(failed.into())).with_context(at),
                }
            }
        }
    }
}

/// Client and connection for a call.
type Target<'a> = (&'a mut LocalClient, Connection);
type Prepare = fn(&mut Target<'_>, Block, Buf) -> anyhow::Result<ClientCall>;
type Finish = fn(Block, Reply) -> anyhow::Result<Buf>;

/// Prepares the call that writes a block.
fn prepare_write(target: &mut Target<'_>, Block { offset, len, .. }: Block, data: Buf) -> anyhow::Result<ClientCall> {
    let args = WriteArgs { offset, data: Bulk::placed(len) };
    Ok(CallOptions::<Write>::new().lend(data).timeout(CALL_TIMEOUT).into_call(target, &args)?)
}

/// Checks the reply to a WRITE, and returns the buffer.
fn finish_write(block: Block, reply: Reply) -> anyhow::Result<Buf> {
    let response = Response::<Write>::from_reply(reply);
    let Written { count, stable: _ } = response.results()?.into_result()?;
    ensure!(count as usize == block.len, "WRITE of {} bytes wrote {count}", block.len);
    response.into_reply().take_sent().next().context("the reply to WRITE lacks the buffer")
}

/// Prepares the call that reads a block.
fn prepare_read(target: &mut Target<'_>, Block { offset, len, .. }: Block, room: Buf) -> anyhow::Result<ClientCall> {
    let args = ReadArgs { offset, count: len as u32 };
    Ok(CallOptions::<Read>::new().write_chunk_into(room).timeout(CALL_TIMEOUT).into_call(target, &args)?)
}

/// Checks the reply to a READ, and returns the data.
fn finish_read(block: Block, reply: Reply) -> anyhow::Result<Buf> {
    let response = Response::<Read>::from_reply(reply);
    let ReadData { data, eof: _ } = response.results()?.into_result()?;
    ensure!(data.len() == block.len, "READ of {} bytes returned {}", block.len, data.len());
    response.into_reply().take_chunks().next().context("the reply to READ lacks the chunk")
}

/// Adds an explanation to an error of a call.
fn explain(error: typed::Error) -> anyhow::Error {
    match error {
        typed::Error::Call(FailedCall { error: error @ CallError::ConnectionLost { .. }, .. }) => {
            anyhow!("{error}: the server has ended or has closed the connection")
        }
        error => error.into(),
    }
}

/// Checksums of each block of a file, and of the whole file.
fn checksums(source: &File, size: u64, block: usize, blocks: usize) -> anyhow::Result<(Vec<u32>, u32)> {
    let mut sums = Vec::with_capacity(blocks);
    let mut whole = crc32fast::Hasher::new();
    let mut buffer = vec![0; block];
    for n in 0..blocks as u32 {
        let Block { offset, len, .. } = Block::nth(n, block, size);
        let data = &mut buffer[..len];
        if let Err(error) = source.read_exact_at(data, offset) {
            bail!("cannot read the source at {offset}: {error}");
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(data);
        whole.combine(&sum);
        sums.push(sum.finalize());
    }
    Ok((sums, whole.finalize()))
}
