//! Tables of wire code points and their names.

use std::fmt;

/// Declares an enum of wire codes, one row per code.
macro_rules! codes {
    (
        $(#[$meta:meta])*
        pub enum $Name:ident {
            $( $(#[$row:meta])* $Variant:ident = $code:literal, $text:literal; )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $Name { $( $(#[$row])* $Variant = $code, )+ }

        impl $Name {
            /// Every row of the table.
            #[doc(hidden)]
            pub const ALL: &[$Name] = &[$( $Name::$Variant ),+];

            /// The number on the wire.
            #[inline]
            pub const fn code(self) -> u32 {
                self as u32
            }

            /// The row with this number.
            #[inline]
            #[doc(hidden)]
            pub const fn from_code(code: u32) -> Option<$Name> {
                match code {
                    $( $code => Some($Name::$Variant), )+
                    _ => None,
                }
            }

            /// The name in the specification, without its prefix.
            #[doc(hidden)]
            pub const fn name(self) -> &'static str {
                match self { $( $Name::$Variant => $text, )+ }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
pub(crate) use codes;

codes! {
    /// The protocol version of a header, `rdma_vers`.
    pub enum Version {
        /// RFC 8166.
        V1 = 1, "v1";
        /// draft-ietf-nfsv4-rpcrdma-version-two-00, or its predecessor, see [`Revision`].
        V2 = 2, "v2";
    }
}

/// The document whose code points version 2 uses. All revisions have the same header structure. Both ends must agree,
/// because no header states the revision. Configuration selects it, and version 1 ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Revision {
    /// draft-ietf-nfsv4-rpcrdma-version-two-00: ten errors, six properties, message continuation.
    #[default]
    Ietf00,
    /// draft-cel-nfsv4-rpcrdma-version-two-09: nine errors (no INVAL_FLAG), two properties, no MORE flag.
    Cel09,
}

impl Revision {
    /// Both revisions.
    #[doc(hidden)]
    pub const ALL: &[Revision] = &[Revision::Ietf00, Revision::Cel09];

    /// The name used in configuration and on command lines.
    #[doc(hidden)]
    pub const fn name(self) -> &'static str {
        match self {
            Revision::Ietf00 => "ietf00",
            Revision::Cel09 => "cel09",
        }
    }

    /// The revision with this name.
    #[doc(hidden)]
    pub fn from_name(name: &str) -> Option<Revision> {
        Revision::ALL.iter().copied().find(|revision| revision.name() == name)
    }

    /// The flags that a version 2 header of this revision may carry.
    #[doc(hidden)]
    #[inline]
    pub const fn known_flags(self) -> Flags {
        match self {
            Revision::Ietf00 => Flags(Flags::RESPONSE.0 | Flags::MORE.0 | Flags::RECEIVED.0),
            Revision::Cel09 => Flags(Flags::RESPONSE.0 | Flags::RECEIVED.0),
        }
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

codes! {
    /// Header type: `rdma_proc` in version 1, `rdma_htype` in version 2. It determines the content after the fixed
    /// words.
    pub enum HeaderType {
        /// Chunk lists, then the RPC message or (with [`Flags::MORE`]) a part.
        Msg = 0, "MSG";
        /// Chunk lists. The RPC message is elsewhere. In version 2 without chunks: a pure grant of credits.
        Nomsg = 1, "NOMSG";
        /// Version 1 only, and never sent (RFC 8166 §4.6.1).
        Msgp = 2, "MSGP";
        /// Version 1 only, and never sent (RFC 8166 §4.6.2).
        Done = 3, "DONE";
        /// A responder's report of a transport error.
        Error = 4, "ERROR";
        /// Version 2: transport properties of the sender.
        Connprop = 5, "CONNPROP";
        /// Version 2: an optional operation, see [`optional`](super::optional).
        Optional = 0xFFFF_FF05, "OPTIONAL";
    }
}

impl HeaderType {
    /// The header type with this code, if this version has it.
    #[inline]
    pub const fn of_version(code: u32, version: Version) -> Option<HeaderType> {
        let Some(htype) = HeaderType::from_code(code) else { return None };
        let known = match htype {
            HeaderType::Msg | HeaderType::Nomsg | HeaderType::Error => true,
            HeaderType::Msgp | HeaderType::Done => matches!(version, Version::V1),
            HeaderType::Connprop | HeaderType::Optional => matches!(version, Version::V2),
        };
        if known { Some(htype) } else { None }
    }

    /// Whether chunk lists follow the prefix.
    #[inline]
    pub const fn has_lists(self) -> bool {
        matches!(self, HeaderType::Msg | HeaderType::Nomsg | HeaderType::Msgp)
    }
}

/// `rdma_flags` of a version 2 header. Version 1 headers have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u32);

impl Flags {
    /// No flag.
    pub const NONE: Flags = Flags(0);
    /// The message is a reply or an error. Its receiver chose the XID.
    pub const RESPONSE: Flags = Flags(1);
    /// The payload continues in the next message.
    pub const MORE: Flags = Flags(2);
    /// A word after the flags counts received messages (windowed credits).
    pub const RECEIVED: Flags = Flags(4);

    const NAMES: [(Flags, &str); 3] =
        [(Flags::RESPONSE, "RESPONSE"), (Flags::MORE, "MORE"), (Flags::RECEIVED, "RECEIVED")];

    /// Whether all flags of `other` are set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union with `other`.
    #[inline]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// The flags except those of `other`.
    #[inline]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    /// Flags that this revision does not define. A responder answers them with INVAL_FLAG, or INVAL_HTYPE in
    /// [`Revision::Cel09`].
    #[inline]
    pub const fn unknown(self, revision: Revision) -> Flags {
        self.without(revision.known_flags())
    }

    /// Whether no flag is set.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Names joined by `|`, unknown bits in hexadecimal, `-` for none.
impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("-");
        }
        let mut unnamed = *self;
        let mut separator = "";
        for (flag, name) in Flags::NAMES {
            if self.contains(flag) {
                write!(f, "{separator}{name}")?;
                separator = "|";
                unnamed = unnamed.without(flag);
            }
        }
        if !unnamed.is_empty() {
            write!(f, "{separator}{:#x}", unnamed.0)?;
        }
        Ok(())
    }
}
