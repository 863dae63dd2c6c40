//! The procedures and their threads.
#![forbid(unsafe_code)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use rpcrdma::rpc::AuthSys;
use rpcrdma::service::duplicate_requests::{Client, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::typed::{Answer, Cache, CallInfo, Sent, Signature};
use rpcrdma::{Refusal, ServerCall, Services};

use crate::export::Export;
use crate::nfs3::nfs_v3::*;
use crate::nfs3::*;
use crate::pool::Pool;
use crate::{attributes, create, dirs, links, read_write, remove};

/// Limit of one READ or WRITE, in bytes.
pub const TRANSFER: u32 = Read::BINDING.results.max_len as u32;
/// Limit of one READDIR or READDIRPLUS, in bytes.
pub const DIRECTORY: u32 = 64 << 10;

/// Outcome of a handler.
pub(crate) type Answered = Result<Sent, Refusal>;

/// Services of an export. All procedures may wait for a disk: the pool runs them, or else the shards, which then block.
pub fn services(export: &Arc<Export>, pool: Option<&Arc<Pool>>) -> Services {
    let cache = Cache::new(Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default())), host);
    let mut services = Services::new();
    match pool {
        Some(pool) => {
            let pool = Arc::clone(pool);
            add_deferred(&mut services, move |call| pool.submit(call), &cache);
        }
        None => add(&mut services, export, &cache),
    }
    services
}

/// A changing procedure, which must not run again for a retransmitted call.
pub(crate) fn runs_once(procedure: u32) -> bool {
    matches!(procedure, Setattr::NUMBER | Write::NUMBER..=Link::NUMBER)
}

/// Owner of a call: the host by address and credential. It stays the same across reconnects from other ports. Hosts
/// with equal names differ by address.
pub(crate) fn host(call: &ServerCall) -> Option<Client> {
    let (flavor, body) = call.info().credential();
    let sys = (flavor == AuthSys::FLAVOR).then(|| AuthSys::parse(body).ok()).flatten()?;
    let mut hasher = DefaultHasher::new();
    (sys.machine, call.info().peer_host()).hash(&mut hasher);
    Some(Client::number(hasher.finish()))
}

/// Each handler runs as the user of the call's credential. It returns its results, or answers itself.
macro_rules! procedures {
    ($($method:ident: $signature:ident($args:ident) $(-> $results:ident)? => $handler:path;)*) => {
        impl Server for Export {
            $(fn $method(&self, call: CallInfo<'_>, args: $args<'_>, answer: Answer<'_, $signature>) -> Answered {
                let who = self.options.policy.of(&call)?;
                procedures!(@answer answer, $handler, (self, &who, args) $(, $results)?)
            })*
        }
    };
    (@answer $answer:ident, $handler:path, ($($arg:expr),*)) => { $handler($($arg),*, $answer) };
    (@answer $answer:ident, $handler:path, ($($arg:expr),*), Results) => { $answer.send(&$handler($($arg),*).into()) };
}
procedures! {
    getattr: Getattr(Getattr3Args) -> Results => attributes::getattr;
    setattr: Setattr(Setattr3Args) -> Results => attributes::setattr;
    lookup: Lookup(Lookup3Args) => dirs::lookup;
    access: Access(Access3Args) -> Results => attributes::access;
    readlink: Readlink(Readlink3Args) => links::readlink;
    read: Read(Read3Args) => read_write::read;
    write: Write(Write3Args) -> Results => read_write::write;
    create: Create(Create3Args) => create::create;
    mkdir: Mkdir(Mkdir3Args) => create::mkdir;
    symlink: Symlink(Symlink3Args) => links::symlink;
    mknod: Mknod(Mknod3Args) => create::mknod;
    remove: Remove(Remove3Args) -> Results => remove::remove;
    rmdir: Rmdir(Rmdir3Args) -> Results => remove::rmdir;
    rename: Rename(Rename3Args) -> Results => remove::rename;
    link: Link(Link3Args) -> Results => links::link;
    readdir: Readdir(Readdir3Args) => dirs::readdir;
    readdirplus: Readdirplus(Readdirplus3Args) => dirs::readdirplus;
    fsstat: Fsstat(Fsstat3Args) -> Results => attributes::fsstat;
    fsinfo: Fsinfo(Fsinfo3Args) -> Results => attributes::fsinfo;
    pathconf: Pathconf(Pathconf3Args) -> Results => attributes::pathconf;
    commit: Commit(Commit3Args) -> Results => read_write::commit;
}
