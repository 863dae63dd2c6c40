//! A session with a back channel (RFC 8881 §2.10), and its operations.

use anyhow::{Context, bail, ensure};
use rpcrdma::LocalClient;
use rpcrdma::wire::xdr::{BadXdr, Reader};

use crate::callback;
use crate::codec::{Encoder, OK, Read, SessionId, Stateid};

/// NFS.
pub(crate) const PROGRAM: u32 = 100_003;
/// Version 4. Each compound states the minor version.
pub(crate) const VERSION: u32 = 4;
/// Outstanding calls of the server.
pub(crate) const BACK_SLOTS: u32 = 4;

const COMPOUND: u32 = 1;
const MINOR: u32 = 1;

const CLOSE: u32 = 4;
const DELEGRETURN: u32 = 8;
const GETFH: u32 = 10;
const OPEN: u32 = 18;
const LOOKUP: u32 = 15;
const PUTFH: u32 = 22;
const PUTROOTFH: u32 = 24;
const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const DESTROY_SESSION: u32 = 44;
const SEQUENCE: u32 = 53;
const DESTROY_CLIENTID: u32 = 57;
const RECLAIM_COMPLETE: u32 = 58;

/// Binds the session to the connection in both directions.
const CONN_BACK_CHAN: u32 = 2;
const AUTH_SYS: u32 = 1;
/// Read access, and the request for a delegation.
const READ_WANT_DELEGATION: u32 = 0x0101;
const OPEN_DELEGATE_READ: u32 = 1;
/// Longest request or reply, in bytes: they travel inline.
const LONGEST: u32 = 2048;
/// Longest callback, in bytes.
const LONGEST_BACK: u32 = 1024;

/// A client with one session of one slot.
pub(crate) struct Session {
    client: LocalClient,
    client_id: u64,
    id: SessionId,
    /// Sequence of the slot's last call.
    sequence: u32,
}

/// An open file.
pub(crate) struct File {
    pub(crate) handle: Vec<u8>,
    stateid: Stateid,
    /// State of a read delegation.
    pub(crate) delegation: Option<Stateid>,
}

/// A compound under construction.
#[derive(Default)]
struct Compound {
    operations: Encoder,
    names: Vec<(u32, &'static str)>,
}

impl Compound {
    /// Adds an operation; the caller appends its arguments.
    fn add(&mut self, operation: u32, name: &'static str) -> &mut Encoder {
        self.names.push((operation, name));
        self.operations.u32(operation)
    }
}

/// Calls; `read` gets the results of each successful operation with its index.
fn call(
    client: &mut LocalClient,
    compound: Compound,
    mut read: impl FnMut(usize, &mut Reader<'_>) -> Result<(), BadXdr>,
) -> anyhow::Result<()> {
    let mut args = Encoder::default();
    args.opaque(b"").u32(MINOR).u32(compound.names.len() as u32).fixed(&compound.operations.0);
    let mut call = client.prepare(COMPOUND, args.0.len())?;
    call.args_mut().copy_from_slice(&args.0);
    call = call.expect_reply(LONGEST as usize);
    let reply = client.call(call)?;
    let mut results = Reader::new(reply.results());
    let status = results.u32("status")?;
    results.text()?;
    let count = results.u32("operations")? as usize;
    for (place, &(operation, name)) in compound.names.iter().enumerate().take(count) {
        ensure!(results.u32("operation")? == operation, "the results are not those of {name}");
        let status = results.u32("status")?;
        ensure!(status == OK, "{name}: status {status}");
        read(place, &mut results).with_context(|| format!("results of {name}"))?;
    }
    ensure!(status == OK && count == compound.names.len(), "status {status} after {count} operations");
    Ok(())
}

impl Session {
    /// Registers the client as a user, and creates the session.
    pub(crate) fn create(mut client: LocalClient, uid: u32, gid: u32) -> anyhow::Result<Self> {
        let mut introduction = Compound::default();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let owner = format!("nfs41c of process {}", std::process::id());
        introduction
            .add(EXCHANGE_ID, "EXCHANGE_ID")
            .u64(now.as_nanos() as u64)
            .opaque(owner.as_bytes())
            // No flags, no state protection, no implementation.
            .words(&[0, 0, 0]);
        let (mut client_id, mut sequence) = (0, 0);
        call(&mut client, introduction, |_, results| {
            client_id = results.u64()?;
            sequence = results.u32("sequence")?;
            // Flags, state protection, server's owner and scope, implementation.
            results.skip_words(2)?;
            results.u64()?;
            results.text()?;
            results.text()?;
            if results.u32("implementations")? > 0 {
                results.text()?;
                results.text()?;
                results.skip_words(3)?;
            }
            Ok(())
        })?;

        let mut creation = Compound::default();
        creation
            .add(CREATE_SESSION, "CREATE_SESSION")
            .u64(client_id)
            .words(&[sequence, CONN_BACK_CHAN])
            // Per channel: header padding, longest request, reply, cached reply; operations, requests, no separate
            // RDMA.
            .words(&[0, LONGEST, LONGEST, LONGEST, 8, 1, 0])
            .words(&[0, LONGEST_BACK, LONGEST_BACK, 0, 8, BACK_SLOTS, 0])
            .words(&[callback::PROGRAM, 1, AUTH_SYS, 0])
            .opaque(b"nfs41c")
            .words(&[uid, gid, 0]);
        let (mut id, mut flags) = ([0; 16], 0);
        call(&mut client, creation, |_, results| {
            id = results.id()?;
            results.u32("sequence")?;
            flags = results.u32("flags")?;
            for _channel in 0..2 {
                results.skip_words(6)?;
                let count = results.u32("ird")? as usize;
                results.skip_words(count)?;
            }
            Ok(())
        })?;
        ensure!(flags & CONN_BACK_CHAN != 0, "the server makes no back channel of this connection");
        let mut session = Self { client, client_id, id, sequence: 0 };
        let mut complete = session.compound();
        complete.add(RECLAIM_COMPLETE, "RECLAIM_COMPLETE").u32(0);
        session.call(complete, |_, _| Ok(()))?;
        Ok(session)
    }

    /// A compound of this session.
    fn compound(&mut self) -> Compound {
        self.sequence += 1;
        let mut compound = Compound::default();
        compound.add(SEQUENCE, "SEQUENCE").fixed(&self.id).words(&[self.sequence, 0, 0, 0]);
        compound
    }

    /// Calls; `read` gets the results of the operations after SEQUENCE, counted from 1.
    fn call(
        &mut self,
        compound: Compound,
        mut read: impl FnMut(usize, &mut Reader<'_>) -> Result<(), BadXdr>,
    ) -> anyhow::Result<()> {
        call(&mut self.client, compound, |place, results| match place {
            // Session, sequence, slot, highest slot, its target, flags.
            0 => results.skip_words(4 + 5),
            _ => read(place, results),
        })
    }

    /// Opens a file for reading, by its path from the root.
    pub(crate) fn open(&mut self, path: &str) -> anyhow::Result<File> {
        let mut names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
        let Some(last) = names.pop() else { bail!("a path without a name") };
        let client_id = self.client_id;
        let mut compound = self.compound();
        compound.add(PUTROOTFH, "PUTROOTFH");
        for name in &names {
            compound.add(LOOKUP, "LOOKUP").opaque(name.as_bytes());
        }
        compound
            .add(OPEN, "OPEN")
            // Owner's sequence number of version 4.0; access; no denied access.
            .words(&[0, READ_WANT_DELEGATION, 0])
            .u64(client_id)
            .opaque(b"nfs41c")
            // No creation; by name.
            .words(&[0, 0])
            .opaque(last.as_bytes());
        compound.add(GETFH, "GETFH");
        let open = 2 + names.len();
        let mut file = File { handle: Vec::new(), stateid: Stateid([0; 16]), delegation: None };
        self.call(compound, |place, results| {
            if place == open {
                file.stateid = Stateid(results.id()?);
                // Change information of the directory, flags.
                results.skip_words(1 + 4 + 1)?;
                let words = results.u32("bitmap")? as usize;
                results.skip_words(words)?;
                match results.u32("delegation type")? {
                    0 => {}
                    OPEN_DELEGATE_READ => {
                        file.delegation = Some(Stateid(results.id()?));
                        // Recall flag; type, flags, access mask and principal of the ACE.
                        results.skip_words(4)?;
                        results.text()?;
                    }
                    // Cause of its absence. Contention and resources have one more word.
                    _ => {
                        if matches!(results.u32("why")?, 1 | 2) {
                            results.skip_words(1)?;
                        }
                    }
                }
            } else if place == open + 1 {
                file.handle = results.text()?.to_vec();
            }
            Ok(())
        })?;
        Ok(file)
    }

    /// Returns a delegation.
    pub(crate) fn give_back(&mut self, handle: &[u8], delegation: &Stateid) -> anyhow::Result<()> {
        let mut compound = self.compound();
        compound.add(PUTFH, "PUTFH").opaque(handle);
        compound.add(DELEGRETURN, "DELEGRETURN").fixed(&delegation.0);
        self.call(compound, |_, _| Ok(()))
    }

    pub(crate) fn close(&mut self, file: &File) -> anyhow::Result<()> {
        let mut compound = self.compound();
        compound.add(PUTFH, "PUTFH").opaque(&file.handle);
        compound.add(CLOSE, "CLOSE").u32(0).fixed(&file.stateid.0);
        self.call(compound, |place, results| if place == 2 { results.id().map(|_| ()) } else { Ok(()) })
    }

    /// Polls the client, which runs the server's callbacks.
    pub(crate) fn poll(&mut self) {
        if !self.client.poll(|_| ()) {
            std::thread::yield_now();
        }
    }

    /// The negotiated protocol version.
    pub(crate) fn rdma_version(&self) -> u32 {
        self.client.terms(self.client.first()).map_or(0, |terms| terms.version())
    }

    /// Destroys the session and the client ID. Returns the number of calls made and served, and of malformed messages.
    pub(crate) fn end(mut self) -> anyhow::Result<(u64, u64)> {
        let mut end = Compound::default();
        end.add(DESTROY_SESSION, "DESTROY_SESSION").fixed(&self.id);
        call(&mut self.client, end, |_, _| Ok(()))?;
        let mut forget = Compound::default();
        forget.add(DESTROY_CLIENTID, "DESTROY_CLIENTID").u64(self.client_id);
        call(&mut self.client, forget, |_, _| Ok(()))?;
        let stats = self.client.stats();
        Ok((stats.calls, stats.messages.rejected()))
    }
}
