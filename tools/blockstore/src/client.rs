//! The client: concurrent calls in reused buffers.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use nfs3_types::xdr_codec::{Pack, Unpack, Void};
use rpcrdma::Buf;
use rpcrdma::auth::AuthPolicy;
use rpcrdma::client::{ClientCall, ClientConfig};
use rpcrdma::{Address, CallError, FailedCall, LocalClient, Reply};
use rpcrdma_proto::wire::ErrorBody;

use crate::codec::{self, Info, ReadArgs, ReadData, WriteArgs, Written};

/// Time limit of a call. FLUSH may have much to write.
const PATIENCE: Duration = Duration::from_secs(30);
const FLUSH_PATIENCE: Duration = Duration::from_secs(600);
/// Tries of a block that the server had no buffer for.
const MAX_TRIES: u32 = 1000;

/// Part of the file and of the store, at equal offsets.
#[derive(Clone, Copy, Debug)]
struct Block {
    offset: u64,
    len: usize,
    tries: u32,
}

impl Block {
    /// The n-th block of a file.
    fn nth(n: u32, block: usize, size: u64) -> Self {
        let offset = u64::from(n) * block as u64;
        Self { offset, len: (size - offset).min(block as u64) as usize, tries: 0 }
    }
}

/// Result of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    pub(crate) bytes: u64,
    pub(crate) time: Duration,
    /// Repeated calls, for lack of a buffer at the server.
    pub(crate) retried: u64,
}

impl Figures {
    /// 10^6 bytes per second.
    pub(crate) fn megabytes_per_second(&self) -> f64 {
        self.bytes as f64 / 1e6 / self.time.as_secs_f64()
    }
}

/// A connection to a block store.
pub(crate) struct BlockClient {
    client: LocalClient,
    info: Info,
    block: usize,
    depth: usize,
    /// Unused exposed memory.
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
        let mut config = ClientConfig::new(codec::PROGRAM, codec::VERSION);
        config.shard.memory.bulk_buffers = vec![(block, depth)];
        config.shard.limits.max_calls = depth;
        let hint = if matches!(host_auth, AuthPolicy::Off) { "; the server may require --host-key" } else { "" };
        config.shard.wire.host_auth = host_auth;
        let client = LocalClient::connect(address, config)?;
        let info = Info { size: 0, block_max: 0, writable: false };
        let mut this = Self { client, info, block, depth, buffers: Vec::new() };
        this.info = this.simple(codec::INFO, PATIENCE).with_context(|| format!("call of procedure INFO{hint}"))?;
        let most = this.info.block_max;
        ensure!(block <= most as usize, "blocks of {block} bytes: the store takes no more than {most}");
        Ok(this)
    }

    /// Description of the store.
    pub(crate) fn info(&self) -> Info {
        self.info
    }

    /// A call without arguments.
    fn simple<T: Unpack>(&mut self, procedure: u32, patience: Duration) -> anyhow::Result<T> {
        let call = self.client.prepare(procedure, 0)?.timeout(patience);
        let reply = self.client.call(call).map_err(|failed| explain(failed.error))?;
        Ok(codec::decode_result(reply.results())??)
    }

    /// Makes earlier writes stable.
    pub(crate) fn flush(&mut self) -> anyhow::Result<Duration> {
        let start = now();
        let Void = self.simple(codec::FLUSH, FLUSH_PATIENCE).context("FLUSH")?;
        Ok(start.elapsed())
    }

    /// Writes a file to the start of the store. It is stable only after [`flush`](Self::flush).
    pub(crate) fn copy(&mut self, source: &File, size: u64) -> anyhow::Result<Figures> {
        let room = self.info.size;
        ensure!(size <= room, "the source has {size} bytes, and the store holds {room}");
        let order: Vec<u32> = (0..self.blocks(size)?).collect();
        let prepare = |client: &mut LocalClient, block: Block, mut data: Buf| {
            // The only copy at this side: from the file to exposed memory.
            source.read_exact_at(&mut data, block.offset).context("the source")?;
            let args = WriteArgs { offset: block.offset, count: block.len as u32 };
            Ok(prepare(client, codec::WRITE, &args)?.read_chunk(WriteArgs::DATA_AT, data))
        };
        let finish = |block: Block, reply: &mut Reply| {
            let Written { count, stable: _ } = codec::decode_result(reply.results())??;
            ensure!(count as usize == block.len, "{count} bytes of {} were written", block.len);
            reply.take_sent().next().context("its buffer did not come back")
        };
        self.transfer("WRITE", &order, size, prepare, finish)
    }

    /// Reads the blocks in an order given by `seed`, and compares their checksums with the file's. Also returns the
    /// checksum (CRC-32) of all.
    pub(crate) fn verify(&mut self, source: &File, size: u64, seed: u64) -> anyhow::Result<(Figures, u32)> {
        let block = self.block;
        let mut order: Vec<u32> = (0..self.blocks(size)?).collect();
        let (sums, whole) = checksums(source, size, block, order.len())?;
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        let prepare = |client: &mut LocalClient, block: Block, room: Buf| {
            let args = ReadArgs { offset: block.offset, count: block.len as u32 };
            Ok(prepare(client, codec::READ, &args)?.write_chunk_into(room))
        };
        let finish = |at: Block, reply: &mut Reply| {
            let ReadData { count, eof: _ } = codec::decode_result(reply.results())??;
            let data = reply.take_chunks().next().context("its buffer did not come back")?;
            ensure!(count as usize == at.len && data.len() == at.len, "{count} bytes of {} came", at.len);
            let (is, should) = (crc32fast::hash(&data), sums[(at.offset / block as u64) as usize]);
            ensure!(is == should, "its checksum is {is:08x}, that of the source {should:08x}");
            Ok(data)
        };
        Ok((self.transfer("READ", &order, size, prepare, finish)?, whole))
    }

    /// Reads or writes whole blocks of the first `size` bytes for a time, in order or at random. Returns their number,
    /// and the time.
    pub(crate) fn measure(
        &mut self,
        write: bool,
        random: bool,
        size: u64,
        time: Duration,
    ) -> anyhow::Result<(u64, Duration)> {
        let (start, block, count) = (now(), self.block, size / self.block as u64);
        ensure!(count > 0, "{size} bytes are no block");
        let (mut rng, mut next) = (fastrand::Rng::new(), 0);
        let blocks = std::iter::from_fn(|| {
            let n = if random { rng.u64(..count) } else { next % count };
            next += 1;
            (start.elapsed() < time).then_some(Block { offset: n * block as u64, len: block, tries: 0 })
        });
        let prepare_block = |client: &mut LocalClient, block: Block, memory: Buf| {
            let Block { offset, len, .. } = block;
            let count = len as u32;
            Ok(match write {
                true => {
                    prepare(client, codec::WRITE, &WriteArgs { offset, count })?.read_chunk(WriteArgs::DATA_AT, memory)
                }
                false => prepare(client, codec::READ, &ReadArgs { offset, count })?.write_chunk_into(memory),
            })
        };
        let finish = |block: Block, reply: &mut Reply| {
            let count = match write {
                true => codec::decode_result::<Written>(reply.results())??.count,
                false => codec::decode_result::<ReadData>(reply.results())??.count,
            };
            ensure!(count as usize == block.len, "{count} bytes of {} were moved", block.len);
            let buffer = if write { reply.take_sent().next() } else { reply.take_chunks().next() };
            buffer.context("its buffer did not come back")
        };
        let (mut ended, mut retried) = (0, 0);
        self.pipeline(blocks, prepare_block, finish, (&mut ended, &mut retried))?;
        Ok((ended, start.elapsed()))
    }

    fn blocks(&self, size: u64) -> anyhow::Result<u32> {
        let blocks = size.div_ceil(self.block as u64);
        u32::try_from(blocks).with_context(|| format!("{blocks} blocks are too many: choose larger ones"))
    }

    /// Moves the blocks of a file in this order, with `depth` outstanding calls.
    fn transfer(
        &mut self,
        what: &str,
        order: &[u32],
        size: u64,
        prepare: impl FnMut(&mut LocalClient, Block, Buf) -> anyhow::Result<ClientCall>,
        finish: impl FnMut(Block, &mut Reply) -> anyhow::Result<Buf>,
    ) -> anyhow::Result<Figures> {
        let start = now();
        let (mut ended, mut retried, block) = (0, 0, self.block);
        let blocks = order.iter().map(|&n| Block::nth(n, block, size));
        self.pipeline(blocks, prepare, finish, (&mut ended, &mut retried))
            .with_context(|| format!("{what} stopped after {ended} of {} blocks", order.len()))?;
        Ok(Figures { bytes: size, time: start.elapsed(), retried })
    }

    /// The loop of every transfer: starts calls while there are buffers, polls, completes.
    fn pipeline(
        &mut self,
        mut blocks: impl Iterator<Item = Block>,
        mut prepare: impl FnMut(&mut LocalClient, Block, Buf) -> anyhow::Result<ClientCall>,
        mut finish: impl FnMut(Block, &mut Reply) -> anyhow::Result<Buf>,
        (ended, retried): (&mut u64, &mut u64),
    ) -> anyhow::Result<()> {
        let connection = self.client.first();
        // Outstanding calls by token.
        let mut under_way: Vec<Option<Block>> = vec![None; self.depth];
        let mut free: Vec<usize> = (0..self.depth).rev().collect();
        let mut again: Vec<Block> = Vec::new();
        let mut done = Vec::with_capacity(self.depth);
        loop {
            while let Some(&token) = free.last() {
                let Some(block) = again.pop().or_else(|| blocks.next()) else { break };
                let mut buffer = match self.buffers.pop() {
                    Some(buffer) => buffer,
                    None => self.client.alloc(connection, self.block)?,
                };
                buffer.set_window(0, block.len);
                let at = || format!("at {}", block.offset);
                let call = prepare(&mut self.client, block, buffer).with_context(at)?;
                under_way[token] = Some(block);
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
                    under_way.get_mut(token).and_then(Option::take).context("a call ended that was not made")?;
                free.push(token);
                let at = || format!("{} bytes at {}", block.len, block.offset);
                match end.result {
                    Ok(mut reply) => {
                        self.buffers.push(finish(block, &mut reply).with_context(at)?);
                        *ended += 1;
                    }
                    // No buffer at the server. Both procedures are idempotent.
                    Err(FailedCall { error: CallError::Transport(ErrorBody::System), .. })
                        if block.tries < MAX_TRIES =>
                    {
                        again.push(Block { tries: block.tries + 1, ..block });
                        *retried += 1;
                    }
                    Err(failed) => return Err(explain(failed.error)).with_context(at),
                }
            }
        }
    }
}

fn now() -> Instant {
    Instant::now()
}

/// A call with its arguments in place.
fn prepare(client: &mut LocalClient, procedure: u32, args: &impl Pack) -> anyhow::Result<ClientCall> {
    let mut call = client.prepare(procedure, args.packed_size())?;
    args.pack(&mut call.args_mut())?;
    Ok(call.timeout(PATIENCE))
}

/// Explains a failure.
fn explain(error: CallError) -> anyhow::Error {
    match error {
        CallError::ConnectionLost { .. } => {
            anyhow!("{error}: the server has ended, or has ended the connection")
        }
        error => error.into(),
    }
}

/// The checksum of each block of a file, and of all of it.
fn checksums(source: &File, size: u64, block: usize, blocks: usize) -> anyhow::Result<(Vec<u32>, u32)> {
    let mut sums = Vec::with_capacity(blocks);
    let mut whole = crc32fast::Hasher::new();
    let mut buffer = vec![0; block];
    for n in 0..blocks as u32 {
        let Block { offset, len, .. } = Block::nth(n, block, size);
        let data = &mut buffer[..len];
        if let Err(error) = source.read_exact_at(data, offset) {
            bail!("the source, at {offset}: {error}");
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(data);
        whole.combine(&sum);
        sums.push(sum.finalize());
    }
    Ok((sums, whole.finalize()))
}
