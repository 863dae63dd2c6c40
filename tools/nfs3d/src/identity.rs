//! User and groups of a call, from its AUTH_SYS credential.
#![forbid(unsafe_code)]

use anyhow::{Context, ensure};
use arrayvec::ArrayVec;
use rpcrdma::Refusal;
use rpcrdma::rpc::{AuthStat, AuthSys};
use rpcrdma::typed::CallInfo;
use rpcrdma_proto::wire::rpc::Flavor;
use rustix::fs::{Gid, Uid};
use rustix::io;
use rustix::process::{getegid, geteuid};
use rustix::thread::{capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// User mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Squash {
    /// No mapping.
    None,
    /// Map root to nobody.
    Root,
    /// Map all users to nobody.
    All,
}

/// User and group ID of nobody.
pub(crate) const NOBODY: u32 = 65534;

/// Turns credentials into identities.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    squash: Squash,
    /// The server can switch users. Otherwise all are the server's own user.
    privileged: bool,
    /// User and group of the server.
    uid: u32,
    gid: u32,
}

/// User of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    gid: u32,
    groups: ArrayVec<u32, { AuthSys::MAX_GIDS }>,
    /// The server's own user: nothing to switch.
    own: bool,
}

impl Policy {
    /// For the server's own user.
    pub fn new(squash: Squash) -> Self {
        let (uid, gid) = (geteuid(), getegid());
        Self { squash, privileged: uid.is_root(), uid: uid.as_raw(), gid: gid.as_raw() }
    }

    /// True if credentials are honoured.
    pub fn is_privileged(&self) -> bool {
        self.privileged
    }

    /// Checks that a thread that acts as another user has no capabilities meanwhile. They stay if the process was
    /// started with the bit `SECBIT_NO_SETUID_FIXUP` (capabilities(7)).
    ///
    /// # Errors
    /// They stay, or the switch failed.
    pub(crate) fn check_switch(&self) -> anyhow::Result<()> {
        let nobody = Identity { uid: NOBODY, gid: NOBODY, groups: ArrayVec::new(), own: !self.privileged };
        let left = nobody.act(|| capabilities(None)).context("acting as another user")?.effective;
        ensure!(
            !self.privileged || left.is_empty(),
            "acting as another user keeps the capabilities of root ({left:?}): start without SECBIT_NO_SETUID_FIXUP"
        );
        Ok(())
    }

    /// Identity of the server.
    pub(crate) fn own(&self) -> Identity {
        Identity { uid: self.uid, gid: self.gid, groups: ArrayVec::new(), own: true }
    }

    /// Identity of a call.
    ///
    /// # Errors
    /// The credential is malformed, or neither AUTH_NONE nor AUTH_SYS.
    pub(crate) fn of(&self, call: &CallInfo<'_>) -> Result<Identity, Refusal> {
        let (flavor, body) = call.credential();
        let nobody = (NOBODY, NOBODY, ArrayVec::new());
        let (uid, gid, groups) = if flavor == Flavor::None.code() {
            nobody
        } else if flavor == AuthSys::FLAVOR {
            let sys = AuthSys::parse(body).map_err(|_| Refusal::Authentication(AuthStat::BadCred.code()))?;
            // The highest number means "unchanged" to the system, which is root.
            let known = |id| if id == u32::MAX { NOBODY } else { id };
            match self.squash {
                Squash::All => nobody,
                Squash::Root if sys.uid == 0 => nobody,
                // A member of root's group need not be root.
                Squash::Root => {
                    let squashed = |gid| if gid == 0 { NOBODY } else { known(gid) };
                    (known(sys.uid), squashed(sys.gid), sys.gids().map(squashed).collect())
                }
                Squash::None => (known(sys.uid), known(sys.gid), sys.gids().map(known).collect()),
            }
        } else {
            return Err(Refusal::Authentication(AuthStat::RejectedCred.code()));
        };
        if !self.privileged {
            return Ok(Identity { uid: self.uid, gid, groups, own: true });
        }
        let own = uid == 0 && gid == self.gid;
        Ok(Identity { uid, gid, groups, own })
    }
}

impl Identity {
    /// Runs system calls as this user, on this thread: with the user's IDs and groups, and without the capabilities of
    /// root, which the kernel takes from a thread whose effective user is no longer root (capabilities(7)). So a
    /// changed file loses its set-ID bits, and quotas and reserved blocks hold, as for a local process of the user.
    /// Every system call that changes data or metadata for a client runs here.
    ///
    /// # Errors
    /// Those of the calls; or the switch failed, and nothing was done.
    pub(crate) fn act<T>(&self, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.own {
            return run();
        }
        // Also if the switch fails half-way.
        let _back = Back;
        let groups: ArrayVec<Gid, { AuthSys::MAX_GIDS }> = self.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        set_thread_groups(&groups)?;
        set_thread_res_gid(None, Gid::from_raw(self.gid), None)?;
        set_thread_res_uid(None, Uid::from_raw(self.uid), None)?;
        run()
    }

    /// True for the owner and root.
    pub(crate) fn owns(&self, uid: u32) -> bool {
        self.own || self.uid == 0 || self.uid == uid
    }
}

/// Restores the thread's own identity on drop.
struct Back;

impl Drop for Back {
    fn drop(&mut self) {
        let back = set_thread_res_uid(None, Uid::ROOT, None)
            .and_then(|()| set_thread_res_gid(None, rustix::process::getgid(), None))
            .and_then(|()| set_thread_groups(&[]));
        if let Err(error) = back {
            // The thread would serve others as this user.
            eprintln!("this thread could not become root again: {error}");
            std::process::abort();
        }
    }
}
