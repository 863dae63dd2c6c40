//! The 22 procedures, their threads, and chunks.
#![forbid(unsafe_code)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use nfs3_types::xdr_codec::Pack;
use rpcrdma::rpc::AuthSys;
use rpcrdma::service::DeferredCall;
use rpcrdma::service::duplicate_requests::{Client, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::xdr::padded;
use rpcrdma::{Procedure, Refusal, ServerCall, Services};
use rpcrdma_proto::binding::nfs3::{self, PATH_MAX, Sizes};

use crate::codec::{self, Args};
use crate::export::Export;
use crate::identity::Identity;
use crate::pool::Pool;
use crate::{attributes, create, dirs, links, read_write, remove};

/// Limit of one READ or WRITE, in bytes.
pub(crate) const TRANSFER: u32 = 1 << 20;
/// Limit of one READDIR or READDIRPLUS, in bytes.
pub(crate) const DIRECTORY: u32 = 64 << 10;
/// Inline bytes of a READ without a Write chunk: what fits a 4096-byte message of version 1. Shorter messages return
/// less, and the client asks for the rest.
pub(crate) const INLINE_READ: usize = 3940;

const SETATTR: u32 = 2;
const READLINK: u32 = 5;
const READ: u32 = 6;
const WRITE: u32 = 7;
const SYMLINK: u32 = 10;
const LINK: u32 = 15;

/// Handler of a whole call, for procedures with chunks.
pub(crate) type Whole = fn(&Export, &Identity, &mut ServerCall) -> Result<(), Refusal>;

/// Services of an export. All procedures may wait for a disk: the pool runs them, or else the shards, which then block.
pub(crate) fn services(export: &Arc<Export>, pool: Option<&Arc<Pool>>) -> Services {
    let sizes = Sizes { transfer: TRANSFER as usize, directory: DIRECTORY as usize };
    let replies = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let mut services = Services::new();
    let mut add = |number, whole: Whole| {
        let Some(mut binding) = nfs3::binding(number, &sizes) else { return };
        match number {
            READ => binding.max_reply += INLINE_READ,
            // Paths travel inline or in chunks.
            READLINK => binding.max_reply += padded(PATH_MAX),
            _ => {}
        }
        let procedure = match pool.cloned() {
            Some(pool) => Procedure::deferred(move |call: DeferredCall| pool.submit(call, whole)),
            None => {
                let export = Arc::clone(export);
                Procedure::new(move |call| run(&export, whole, call))
            }
        };
        let procedure = procedure.with_binding(binding);
        let procedure = if runs_once(number) { procedure.cached(Arc::clone(&replies), host) } else { procedure };
        services.add(nfs3::PROGRAM, nfs3::VERSION, number, procedure);
    };
    add(1, |export, who, call| inline(export, who, call, attributes::getattr));
    add(SETATTR, |export, who, call| inline(export, who, call, attributes::setattr));
    add(3, |export, who, call| inline(export, who, call, dirs::lookup));
    add(4, |export, who, call| inline(export, who, call, attributes::access));
    add(READLINK, links::readlink);
    add(READ, read_write::read);
    add(WRITE, read_write::write);
    add(8, |export, who, call| inline(export, who, call, create::create));
    add(9, |export, who, call| inline(export, who, call, create::mkdir));
    add(SYMLINK, links::symlink);
    add(11, |export, who, call| inline(export, who, call, create::mknod));
    add(12, |export, who, call| inline(export, who, call, remove::remove));
    add(13, |export, who, call| inline(export, who, call, remove::rmdir));
    add(14, |export, who, call| inline(export, who, call, remove::rename));
    add(LINK, |export, who, call| inline(export, who, call, links::link));
    add(16, |export, who, call| inline(export, who, call, dirs::readdir));
    add(17, |export, who, call| inline(export, who, call, dirs::readdirplus));
    add(18, |export, who, call| inline(export, who, call, attributes::fsstat));
    add(19, |export, who, call| inline(export, who, call, attributes::fsinfo));
    add(20, |export, who, call| inline(export, who, call, attributes::pathconf));
    add(21, |export, who, call| inline(export, who, call, read_write::commit));
    services
}

/// A changing procedure must not run again for a retransmitted call. A repeated WRITE alone is harmless, but not after
/// a later WRITE of the client.
pub(crate) fn runs_once(procedure: u32) -> bool {
    matches!(procedure, SETATTR | WRITE..=LINK)
}

/// Answers a call as its credential's user.
pub(crate) fn run(export: &Export, whole: Whole, call: &mut ServerCall) -> Result<(), Refusal> {
    let who = export.options.policy.of(call)?;
    whole(export, &who, call)
}

/// Owner of a call: the host by address and credential. It stays the same across reconnects from other ports. Hosts
/// with equal names differ by address.
pub(crate) fn host(call: &ServerCall) -> Option<Client> {
    let (flavor, body) = call.credential();
    let sys = (flavor == AuthSys::FLAVOR).then(|| AuthSys::parse(body).ok()).flatten()?;
    let mut hasher = DefaultHasher::new();
    (sys.machine, call.peer_host()).hash(&mut hasher);
    Some(Client::number(hasher.finish()))
}

/// Runs a procedure without chunks.
fn inline<T: Pack>(
    export: &Export,
    who: &Identity,
    call: &mut ServerCall,
    run: impl FnOnce(&Export, &Identity, Args<'_>) -> Result<T, Refusal>,
) -> Result<(), Refusal> {
    let results = run(export, who, Args::new(call.args()))?;
    codec::reply(call, &results)
}
