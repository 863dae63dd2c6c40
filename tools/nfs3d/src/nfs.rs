//! The procedures, and the threads that run them.
#![forbid(unsafe_code)]

use std::net::IpAddr;
use std::sync::Arc;

use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig, by_address};
use rpcrdma::typed::{CallInfo, ProgramCache, ReplySender, ReplySent, Signature};
use rpcrdma::{Refusal, Services};
use rpcrdma_fabric::host::network;

use crate::export::Export;
use crate::identity::Identity;
use crate::nfs3::nfs_v3::*;
use crate::nfs3::*;
use crate::pool::Pool;

/// Limit of one READ or WRITE, in bytes.
pub const TRANSFER: u32 = Read::BINDING.results.max_len as u32;
/// Limit of one READDIR or READDIRPLUS, in bytes.
pub const DIRECTORY: u32 = 64 << 10;

/// Result of a handler.
pub(crate) type HandlerResult = Result<ReplySent, Refusal>;

/// Services of an export.
///
/// All procedures may wait for a disk. Without a pool, the shards run them and are blocked meanwhile.
pub fn services(export: &Arc<Export>, pool: Option<&Arc<Pool>>) -> Services {
    let replies = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let cache = ProgramCache::new(replies, by_address);
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

/// A call, with the handlers as its methods.
pub(crate) struct Call<'a> {
    pub(crate) export: &'a Export,
    /// The user as whom the call runs, which its credential determines.
    pub(crate) user: Identity,
    /// The client's host, by which the cache divides its kept nodes.
    pub(crate) host: Option<IpAddr>,
}

/// Implements the server. A handler marked `-> Results` returns its results; any other sends its own reply.
macro_rules! procedures {
    ($($method:ident: $signature:ident($args:ident) $(-> $results:ident)?;)*) => {
        impl Server for Export {
            $(fn $method(
                &self,
                info: CallInfo<'_>,
                args: $args<'_>,
                answer: ReplySender<'_, $signature>,
            ) -> HandlerResult {
                let call = Call {
                    export: self,
                    user: self.options.policy.identify_caller(&info)?,
                    host: info.peer_host().map(network),
                };
                procedures!(@answer answer, call.$method(args) $(, $results)?)
            })*
        }
    };
    (@answer $answer:ident, $call:ident.$method:ident($args:ident)) => { $call.$method($args, $answer) };
    (@answer $answer:ident, $call:ident.$method:ident($args:ident), Results) => {
        $answer.send(&$call.$method($args).into())
    };
}
procedures! {
    getattr: Getattr(Getattr3Args) -> Results;
    setattr: Setattr(Setattr3Args) -> Results;
    lookup: Lookup(Lookup3Args);
    access: Access(Access3Args) -> Results;
    readlink: Readlink(Readlink3Args);
    read: Read(Read3Args);
    write: Write(Write3Args) -> Results;
    create: Create(Create3Args);
    mkdir: Mkdir(Mkdir3Args);
    symlink: Symlink(Symlink3Args);
    mknod: Mknod(Mknod3Args);
    remove: Remove(Remove3Args) -> Results;
    rmdir: Rmdir(Rmdir3Args) -> Results;
    rename: Rename(Rename3Args) -> Results;
    link: Link(Link3Args) -> Results;
    readdir: Readdir(Readdir3Args);
    readdirplus: Readdirplus(Readdirplus3Args);
    fsstat: Fsstat(Fsstat3Args) -> Results;
    fsinfo: Fsinfo(Fsinfo3Args) -> Results;
    pathconf: Pathconf(Pathconf3Args) -> Results;
    commit: Commit(Commit3Args) -> Results;
}
