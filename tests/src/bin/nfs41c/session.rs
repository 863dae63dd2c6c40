//! A session with a back channel (RFC 8881 §2.10), and its operations.

use anyhow::{bail, ensure};
use rpcrdma::LocalClient;
use rpcrdma::typed::Response;
use rpcrdma::xdr::Array;

use crate::protocol::nfs_v4::{self, Compound};
use crate::protocol::*;

/// Maximum outstanding calls of the server.
pub(crate) const BACK_SLOTS: u32 = 4;
/// Maximum length of a request or reply in bytes, so that each travels inline.
const MAX_SIZE: u32 = 2048;
/// Maximum length of a callback, in bytes.
const MAX_CALLBACK_SIZE: u32 = 1024;
/// Name of the owner of opens, and of this machine in credentials.
const OWNER: &[u8] = b"nfs41c";

/// A client with one session of one slot.
pub(crate) struct Session {
    client: LocalClient,
    client_id: u64,
    id: Sessionid4,
    /// Sequence of the slot's last call.
    sequence: u32,
}

/// An open file.
pub(crate) struct File {
    pub(crate) handle: Vec<u8>,
    stateid: Stateid4,
    /// State of a read delegation.
    pub(crate) delegation: Option<Stateid4>,
}

/// Makes a call, all of whose operations must succeed.
fn call(client: &mut LocalClient, operations: &[NfsArgop4<'_>]) -> anyhow::Result<Response<Compound>> {
    let connection = client.first();
    let args = Compound4Args { tag: Default::default(), minorversion: 1, argarray: operations.into() };
    let response = nfs_v4::Client((client, connection)).compound(&args)?;
    let Compound4Res { status, resarray, .. } = response.results()?;
    let count = resarray.len();
    let last = count.checked_sub(1).and_then(|last| operations.get(last));
    ensure!(status == NFS4_OK && count == operations.len(), "status {status} after {count} operations: {last:?}");
    Ok(response)
}

impl Session {
    /// Registers the client as a user, and creates the session.
    pub(crate) fn create(mut client: LocalClient, uid: u32, gid: u32) -> anyhow::Result<Self> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let owner = format!("nfs41c of process {}", std::process::id());
        let exchange = ExchangeId4Args {
            eia_clientowner: ClientOwner4 {
                co_verifier: (now.as_nanos() as u64).to_be_bytes(),
                co_ownerid: owner.as_bytes(),
            },
            eia_flags: 0,
            eia_state_protect: StateProtect4::Sp4None,
            eia_client_impl_id: Array::default(),
        };
        let response = call(&mut client, &[NfsArgop4::ExchangeId(exchange)])?;
        let Some(NfsResop4::ExchangeId(ExchangeId4Res::Nfs4Ok(exchanged))) = response.results()?.resarray.iter().next()
        else {
            bail!("no results of EXCHANGE_ID")
        };

        let channel = |max_size, cached, slots| ChannelAttrs4 {
            ca_maxrequestsize: max_size,
            ca_maxresponsesize: max_size,
            ca_maxresponsesize_cached: cached,
            ca_maxoperations: 8,
            ca_maxrequests: slots,
            ..Default::default()
        };
        let credential = CallbackSecParms4::Sys(AuthSysParms { machinename: OWNER, uid, gid, ..Default::default() });
        let credentials = [credential];
        let creation = CreateSession4Args {
            csa_clientid: exchanged.eir_clientid,
            csa_sequence: exchanged.eir_sequenceid,
            csa_flags: CREATE_SESSION4_FLAG_CONN_BACK_CHAN,
            csa_fore_chan_attrs: channel(MAX_SIZE, MAX_SIZE, 1),
            csa_back_chan_attrs: channel(MAX_CALLBACK_SIZE, 0, BACK_SLOTS),
            csa_cb_program: nfs_cb::PROGRAM,
            csa_sec_parms: credentials[..].into(),
        };
        let response = call(&mut client, &[NfsArgop4::CreateSession(creation)])?;
        let Some(NfsResop4::CreateSession(CreateSession4Res::Nfs4Ok(created))) =
            response.results()?.resarray.iter().next()
        else {
            bail!("no results of CREATE_SESSION")
        };
        ensure!(
            created.csr_flags & CREATE_SESSION4_FLAG_CONN_BACK_CHAN != 0,
            "the server does not use this connection as a back channel"
        );
        let mut session = Self { client, client_id: exchanged.eir_clientid, id: created.csr_sessionid, sequence: 0 };
        session.call(&[NfsArgop4::ReclaimComplete(false)])?;
        Ok(session)
    }

    /// Makes a call of this session.
    fn call(&mut self, operations: &[NfsArgop4<'_>]) -> anyhow::Result<Response<Compound>> {
        self.sequence += 1;
        let sequence = Sequence4Args { sa_sessionid: self.id, sa_sequenceid: self.sequence, ..Default::default() };
        call(&mut self.client, &[&[NfsArgop4::Sequence(sequence)], operations].concat())
    }

    /// Opens a file for reading, by its path from the root.
    pub(crate) fn open(&mut self, path: &str) -> anyhow::Result<File> {
        let mut names: Vec<&[u8]> = path.split('/').filter(|name| !name.is_empty()).map(str::as_bytes).collect();
        let Some(last) = names.pop() else { bail!("the path `{path}` has no file name") };
        let open = Open4Args {
            seqid: 0,
            share_access: OPEN4_SHARE_ACCESS_READ | OPEN4_SHARE_ACCESS_WANT_READ_DELEG,
            share_deny: 0,
            owner: OpenOwner4 { clientid: self.client_id, owner: OWNER },
            openhow: Openflag4::Open4Nocreate,
            claim: OpenClaim4::ClaimNull(Utf8string(last)),
        };
        let mut operations = vec![NfsArgop4::Putrootfh];
        operations.extend(names.into_iter().map(|name| NfsArgop4::Lookup(Utf8string(name))));
        operations.extend([NfsArgop4::Open(open), NfsArgop4::Getfh]);
        let response = self.call(&operations)?;
        let results: Vec<_> = response.results()?.resarray.iter().collect();
        let [.., NfsResop4::Open(Open4Res::Nfs4Ok(opened)), NfsResop4::Getfh(Getfh4Res::Nfs4Ok(handle))] = &results[..]
        else {
            bail!("no results of OPEN and GETFH")
        };
        let delegation = match opened.delegation {
            OpenDelegation4::Read(delegation) => Some(delegation.stateid),
            OpenDelegation4::None | OpenDelegation4::NoneExt(_) => None,
        };
        Ok(File { handle: handle.0.to_vec(), stateid: opened.stateid, delegation })
    }

    /// Returns a delegation.
    pub(crate) fn return_delegation(&mut self, handle: &[u8], delegation: Stateid4) -> anyhow::Result<()> {
        self.call(&[NfsArgop4::Putfh(NfsFh4(handle)), NfsArgop4::Delegreturn(delegation)]).map(drop)
    }

    /// Closes a file.
    pub(crate) fn close(&mut self, file: &File) -> anyhow::Result<()> {
        let close = Close4Args { seqid: 0, open_stateid: file.stateid };
        self.call(&[NfsArgop4::Putfh(NfsFh4(&file.handle)), NfsArgop4::Close(close)]).map(drop)
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

    /// Destroys the session and the client ID. Returns the numbers of calls made and served, and of rejected messages.
    pub(crate) fn end(mut self) -> anyhow::Result<(u64, u64)> {
        call(&mut self.client, &[NfsArgop4::DestroySession(self.id)])?;
        call(&mut self.client, &[NfsArgop4::DestroyClientid(self.client_id)])?;
        let stats = self.client.stats();
        Ok((stats.calls, stats.messages.rejected()))
    }
}
