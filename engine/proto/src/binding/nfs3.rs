//! NFS version 3 binding (RFC 8267 §4), with sizes of RFC 1813.
//!
//! Four items may be reduced: the data of READ and WRITE, the path of READLINK and SYMLINK. The server chooses two
//! sizes ([`Sizes`]). The protocol does not bound names and paths; as in servers, they are at most [`NAME_MAX`] and
//! [`PATH_MAX`] bytes.

use super::{Binding, Bindings};

/// Program number.
pub const PROGRAM: u32 = 100_003;
/// Program version.
pub const VERSION: u32 = 3;
/// Longest name of a file, bytes.
pub const NAME_MAX: usize = 255;
/// Longest path in a symbolic link, in bytes. Linux's `PATH_MAX` also counts a final zero.
pub const PATH_MAX: usize = 4095;

/// The sizes in the server's FSINFO reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Most bytes of one READ, and of one WRITE: `rtmax`, `wtmax`.
    pub transfer: usize,
    /// Most bytes of one READDIR or READDIRPLUS: `dtpref`, and the client's maximum.
    pub directory: usize,
}

/// 1 MiB, and 64 KiB for directories.
impl Default for Sizes {
    fn default() -> Self {
        Self { transfer: 1 << 20, directory: 64 << 10 }
    }
}

// Maximum wire sizes of the types of RFC 1813 §2.5 and §2.6.
const STATUS: usize = 4;
const FH: usize = 4 + 64;
const NAME: usize = 4 + NAME_MAX.next_multiple_of(4);
const DIROP: usize = FH + NAME;
const FATTR: usize = 84;
/// `post_op_attr`.
const ATTR: usize = 4 + FATTR;
/// `wcc_data`.
const WCC: usize = (4 + 24) + ATTR;
/// `post_op_fh3`.
const POST_FH: usize = 4 + FH;
/// `sattr3`.
const SATTR: usize = 8 + 8 + 8 + 12 + 12 + 12;
/// Results of CREATE, MKDIR, SYMLINK and MKNOD.
const CREATED: usize = STATUS + POST_FH + ATTR + WCC;

/// The binding of one procedure; `None` beyond the last one.
pub const fn binding(procedure: u32, sizes: &Sizes) -> Option<Binding> {
    Some(match procedure {
        // NULL
        0 => Binding::inline(0, 0),
        // GETATTR
        1 => Binding::inline(FH, STATUS + FATTR),
        // SETATTR
        2 => Binding::inline(FH + SATTR + 12, STATUS + WCC),
        // LOOKUP
        3 => Binding::inline(DIROP, STATUS + FH + 2 * ATTR),
        // ACCESS
        4 => Binding::inline(FH + 4, STATUS + ATTR + 4),
        // READLINK: the path; its length stays.
        5 => Binding::inline(FH, STATUS + ATTR + 4).results(1, PATH_MAX),
        // READ: the data; its length stays, behind count and eof.
        6 => Binding::inline(FH + 8 + 4, STATUS + ATTR + 4 + 4 + 4).results(1, sizes.transfer),
        // WRITE: the data; its length stays, behind offset, count and stable.
        7 => Binding::inline(FH + 8 + 4 + 4 + 4, STATUS + WCC + 4 + 4 + 8).arguments(1, sizes.transfer),
        // CREATE
        8 => Binding::inline(DIROP + 4 + SATTR, CREATED),
        // MKDIR
        9 => Binding::inline(DIROP + SATTR, CREATED),
        // SYMLINK: the path; its length stays, behind the attributes.
        10 => Binding::inline(DIROP + SATTR + 4, CREATED).arguments(1, PATH_MAX),
        // MKNOD
        11 => Binding::inline(DIROP + 4 + SATTR + 8, CREATED),
        // REMOVE, RMDIR
        12 | 13 => Binding::inline(DIROP, STATUS + WCC),
        // RENAME
        14 => Binding::inline(2 * DIROP, STATUS + 2 * WCC),
        // LINK
        15 => Binding::inline(FH + DIROP, STATUS + ATTR + WCC),
        // READDIR, READDIRPLUS: entries are not eligible, so large ones need a Reply chunk.
        16 => Binding::inline(FH + 8 + 8 + 4, STATUS + ATTR + sizes.directory),
        17 => Binding::inline(FH + 8 + 8 + 4 + 4, STATUS + ATTR + sizes.directory),
        // FSSTAT
        18 => Binding::inline(FH, STATUS + ATTR + 6 * 8 + 4),
        // FSINFO
        19 => Binding::inline(FH, STATUS + ATTR + 7 * 4 + 8 + 8 + 4),
        // PATHCONF
        20 => Binding::inline(FH, STATUS + ATTR + 6 * 4),
        // COMMIT
        21 => Binding::inline(FH + 8 + 4, STATUS + WCC + 8),
        _ => return None,
    })
}

/// The bindings of all procedures.
pub fn bindings(sizes: &Sizes) -> Bindings {
    let mut bindings = Bindings::new();
    for procedure in 0.. {
        let Some(binding) = binding(procedure, sizes) else { break };
        bindings.add(PROGRAM, VERSION, procedure, binding);
    }
    bindings
}
