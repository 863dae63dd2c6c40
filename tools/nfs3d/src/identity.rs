//! User and groups of a call, from its AUTH_SYS credential.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};

use anyhow::{Context, ensure};
use arrayvec::ArrayVec;
use rpcrdma::Refusal;
use rpcrdma::rpc::{AuthStat, AuthSys};
use rpcrdma::typed::CallInfo;
use rpcrdma_config::print_error;
use rpcrdma_proto::wire::rpc::Flavor;
use rustix::fs::{Gid, Stat, Uid};
use rustix::io;
use rustix::process::geteuid;
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, capabilities, capabilities_secure_bits, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

/// Which users are mapped to nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Squash {
    /// No user.
    None,
    /// Root only.
    Root,
    /// All users.
    All,
}

/// User and group ID of nobody.
pub(crate) const NOBODY: u32 = 65534;

/// Capabilities that override permissions, ownership and limits of files.
const FILE_CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_RESOURCE);

/// Supplementary groups.
type Groups = ArrayVec<u32, { AuthSys::MAX_GIDS }>;

/// Policy that turns credentials into identities.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    squash: Squash,
    /// The server can switch users. Otherwise all calls run as the server's own user.
    privileged: bool,
    /// User of the server.
    uid: u32,
}

/// User of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    gid: u32,
    groups: Groups,
    /// The server cannot switch users. All calls run as its own user, and the kernel decides what that user may do.
    fixed: bool,
}

impl Policy {
    /// Creates the policy of a server that runs as this process's user.
    pub fn new(squash: Squash) -> Self {
        let uid = geteuid();
        Self { squash, privileged: uid.is_root(), uid: uid.as_raw() }
    }

    /// True if calls run as the users of their credentials.
    pub fn is_privileged(&self) -> bool {
        self.privileged
    }

    /// Prepares the calling thread, and all threads that it starts afterwards, for calls that run as users.
    ///
    /// # Errors
    /// The system denies a change of groups or capabilities, or the process would keep its capabilities under another
    /// user ID.
    pub fn prepare(&self) -> anyhow::Result<()> {
        if !self.privileged {
            // Calls run as the server's user, and must have no more rights than any other process of this user.
            let mut sets = capabilities(None).context("cannot read the capabilities of the process")?;
            for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
                set.remove(FILE_CAPABILITIES);
            }
            return set_capabilities(None, sets)
                .context("cannot drop the capabilities that override permissions of files");
        }
        let bits = capabilities_secure_bits().context("cannot read the securebits of the process")?;
        ensure!(
            !bits.contains(CapabilitiesSecureBits::NO_SETUID_FIXUP),
            "the process has the securebit no-setuid-fixup, with which calls of users would run with the capabilities \
             of root: start without SECBIT_NO_SETUID_FIXUP"
        );
        // Root's own groups are dropped, because each call sets the groups of its caller.
        set_thread_groups(&[]).context("cannot drop the supplementary groups of root (this needs CAP_SETGID)")
    }

    /// Identity of the server.
    #[cfg(test)]
    pub(crate) fn own(&self) -> Identity {
        let gid = rustix::process::getegid().as_raw();
        Identity { uid: self.uid, gid, groups: ArrayVec::new(), fixed: !self.privileged }
    }

    /// Identity of a call.
    ///
    /// # Errors
    /// The credential is malformed, or neither AUTH_NONE nor AUTH_SYS.
    pub(crate) fn identify_caller(&self, call: &CallInfo<'_>) -> Result<Identity, Refusal> {
        let (flavor, body) = call.credential();
        self.identify_credential(flavor, body).map_err(|stat| Refusal::Authentication(stat.code()))
    }

    /// Identity of a credential of this flavor.
    ///
    /// # Errors
    /// The credential is malformed, or neither AUTH_NONE nor AUTH_SYS.
    pub(crate) fn identify_credential(&self, flavor: u32, body: &[u8]) -> Result<Identity, AuthStat> {
        let nobody = (NOBODY, NOBODY, ArrayVec::new());
        let (uid, gid, groups) = if flavor == Flavor::None.code() {
            nobody
        } else if flavor == AuthSys::FLAVOR {
            let sys = AuthSys::parse(body).map_err(|_| AuthStat::BadCred)?;
            // The system calls take the highest number as "unchanged", so the call would run as root.
            let to_valid_id = |id| if id == u32::MAX { NOBODY } else { id };
            match self.squash {
                Squash::All => nobody,
                Squash::Root if sys.uid == 0 => nobody,
                // Root's group is squashed as well, because its members may have more rights than nobody.
                Squash::Root => {
                    let squashed = |gid| if gid == 0 { NOBODY } else { to_valid_id(gid) };
                    (to_valid_id(sys.uid), squashed(sys.gid), sys.gids().map(squashed).collect())
                }
                Squash::None => (to_valid_id(sys.uid), to_valid_id(sys.gid), sys.gids().map(to_valid_id).collect()),
            }
        } else {
            return Err(AuthStat::RejectedCred);
        };
        let uid = if self.privileged { uid } else { self.uid };
        Ok(Identity { uid, gid, groups, fixed: !self.privileged })
    }
}

thread_local! {
    /// Group IDs of this thread, if `run_as` has set them. They stay set between calls, because one client's calls are
    /// often consecutive, and because groups give root no rights that it does not have anyway.
    static GROUPS: RefCell<Option<(u32, Groups)>> = const { RefCell::new(None) };
    /// Whether this thread is within `run_as`.
    static SWITCHED: Cell<bool> = const { Cell::new(false) };
}

impl Identity {
    /// The owner of a file.
    pub(crate) fn owner(&self, stat: &Stat) -> Self {
        Self { uid: stat.st_uid, gid: stat.st_gid, groups: ArrayVec::new(), fixed: self.fixed }
    }

    /// Runs system calls on this thread with the user's IDs, and without capabilities unless the user is root.
    ///
    /// Calls may not be nested.
    ///
    /// # Errors
    /// Those of `run`. If the switch to the user fails, `run` is not called.
    pub(crate) fn run_as<T>(&self, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.fixed {
            return run();
        }
        assert!(!SWITCHED.replace(true), "nested switches of the user");
        // The user is also restored if the switch fails or `run` panics.
        let _restore = Restore { switched: self.uid != 0 };
        self.set_groups()?;
        if self.uid != 0 {
            // The kernel clears the thread's effective capabilities when root becomes another user, and sets them to
            // the permitted ones when it becomes root again.
            set_thread_res_uid(None, Uid::from_raw(self.uid), None)?;
        }
        run()
    }

    /// Sets the groups of this thread, unless they are set already.
    fn set_groups(&self) -> io::Result<()> {
        GROUPS.with_borrow_mut(|current| {
            if current.as_ref().is_some_and(|(gid, groups)| *gid == self.gid && *groups == self.groups) {
                return Ok(());
            }
            // If a system call fails, the groups are unknown.
            *current = None;
            let groups: ArrayVec<Gid, { AuthSys::MAX_GIDS }> =
                self.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
            set_thread_groups(&groups)?;
            set_thread_res_gid(None, Gid::from_raw(self.gid), None)?;
            *current = Some((self.gid, self.groups.clone()));
            Ok(())
        })
    }

    /// True if the server cannot switch users.
    pub(crate) fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// True if this user has the rights of the owner `uid`: the owner, root, and any user of a server that cannot
    /// switch.
    pub(crate) fn owns(&self, uid: u32) -> bool {
        self.fixed || self.uid == 0 || self.uid == uid
    }
}

/// Restores the thread's own user on drop.
struct Restore {
    switched: bool,
}

impl Drop for Restore {
    fn drop(&mut self) {
        if self.switched
            && let Err(error) = set_thread_res_uid(None, Uid::ROOT, None)
        {
            // Otherwise, the thread would run the calls of other users as this user.
            print_error!("cannot switch this thread back to root: {error}");
            std::process::abort();
        }
        SWITCHED.set(false);
    }
}
