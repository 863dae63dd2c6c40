//! Credentials and verifiers (RFC 5531 §8).

use super::super::codes::codes;
use super::super::word::word;
use super::super::xdr::{BadXdr, Decoder, EncodeError, Encoder, padded};

/// The longest body of a credential or verifier, bytes.
pub const MAX_AUTH_LEN: usize = 400;

codes! {
    /// Authentication flavors in common use.
    pub enum Flavor {
        /// No authentication; the body is empty.
        None = 0, "AUTH_NONE";
        /// Unix ids, see [`AuthSys`].
        Sys = 1, "AUTH_SYS";
        /// A server's shorthand for AUTH_SYS.
        Short = 2, "AUTH_SHORT";
        /// Diffie-Hellman, obsolete.
        Dh = 3, "AUTH_DH";
        /// RPCSEC_GSS (RFC 2203).
        Gss = 6, "RPCSEC_GSS";
    }
}

codes! {
    /// Reasons to refuse a call as unauthenticated, `auth_stat`.
    ///
    /// Servers answer with these codes. Those of AUTH_KERB, and those that clients detect, are only for decoders.
    #[non_exhaustive]
    pub enum AuthStat {
        /// No error.
        #[doc(hidden)]
        Ok = 0, "AUTH_OK";
        /// Bad credential.
        BadCred = 1, "AUTH_BADCRED";
        /// The client must start a new session.
        RejectedCred = 2, "AUTH_REJECTEDCRED";
        /// Bad verifier.
        BadVerf = 3, "AUTH_BADVERF";
        /// Verifier expired or replayed.
        RejectedVerf = 4, "AUTH_REJECTEDVERF";
        /// Refused for security reasons.
        TooWeak = 5, "AUTH_TOOWEAK";
        /// The response's verifier is invalid. Detected by the client.
        #[doc(hidden)]
        InvalidResp = 6, "AUTH_INVALIDRESP";
        /// Local failure. Detected by the client.
        #[doc(hidden)]
        Failed = 7, "AUTH_FAILED";
        /// Kerberos: generic error.
        #[doc(hidden)]
        KerbGeneric = 8, "AUTH_KERB_GENERIC";
        /// Kerberos: the credential has expired.
        #[doc(hidden)]
        TimeExpire = 9, "AUTH_TIMEEXPIRE";
        /// Kerberos: problem with the ticket file.
        #[doc(hidden)]
        TktFile = 10, "AUTH_TKT_FILE";
        /// Kerberos: the authenticator cannot be decoded.
        #[doc(hidden)]
        Decode = 11, "AUTH_DECODE";
        /// Kerberos: wrong network address in the ticket.
        #[doc(hidden)]
        NetAddr = 12, "AUTH_NET_ADDR";
        /// RPCSEC_GSS: no credentials for the user.
        GssCredProblem = 13, "RPCSEC_GSS_CREDPROBLEM";
        /// RPCSEC_GSS: problem with the context.
        GssCtxProblem = 14, "RPCSEC_GSS_CTXPROBLEM";
    }
}

/// A credential or verifier: a flavor and up to 400 opaque bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct OpaqueAuth<'a> {
    /// The flavor's number: 0 for AUTH_NONE, [`AuthSys::FLAVOR`], 6 for RPCSEC_GSS.
    pub flavor: u32,
    /// The body.
    pub body: &'a [u8],
}

impl<'a> OpaqueAuth<'a> {
    /// AUTH_NONE.
    pub const NONE: OpaqueAuth<'static> = OpaqueAuth { flavor: Flavor::None.code(), body: &[] };

    /// Bytes on the wire.
    pub const fn encoded_len(&self) -> usize {
        8 + padded(self.body.len())
    }

    #[inline]
    pub(super) fn read(reader: &mut Decoder<'a>, what: &'static str) -> Result<OpaqueAuth<'a>, BadXdr> {
        Ok(OpaqueAuth { flavor: reader.u32(what)?, body: reader.opaque(MAX_AUTH_LEN, what)? })
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>) -> Result<(), EncodeError> {
        debug_assert!(self.body.len() <= MAX_AUTH_LEN, "RFC 5531 §8.2 limits opaque_auth");
        out.u32(self.flavor)?;
        out.opaque(self.body, MAX_AUTH_LEN)
    }
}

/// The body of an AUTH_SYS credential (RFC 5531 appendix A).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthSys<'a> {
    /// An arbitrary number from the caller.
    pub stamp: u32,
    /// Name of the caller's machine, at most 255 bytes.
    pub machine: &'a [u8],
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    gids: &'a [[u8; 4]],
}

impl<'a> AuthSys<'a> {
    /// The flavor's number, AUTH_SYS.
    pub const FLAVOR: u32 = Flavor::Sys.code();
    /// Maximum supplementary groups.
    pub const MAX_GIDS: usize = 16;
    /// Maximum bytes of the machine name.
    const MAX_MACHINE: usize = 255;

    /// A credential without supplementary groups.
    #[doc(hidden)]
    pub const fn new(stamp: u32, machine: &'a [u8], uid: u32, gid: u32) -> AuthSys<'a> {
        AuthSys { stamp, machine, uid, gid, gids: &[] }
    }

    /// Reads a body.
    pub fn parse(body: &'a [u8]) -> Result<AuthSys<'a>, BadXdr> {
        let mut reader = Decoder::new(body);
        let stamp = reader.u32("stamp")?;
        let machine = reader.opaque(Self::MAX_MACHINE, "machinename")?;
        let (uid, gid) = (reader.u32("uid")?, reader.u32("gid")?);
        let at = reader.at();
        let gids = reader.words("gids")?;
        match (gids.len(), reader.rest()) {
            (..=Self::MAX_GIDS, []) => Ok(AuthSys { stamp, machine, uid, gid, gids }),
            _ => Err(BadXdr { what: "gids", at }),
        }
    }

    /// Writes the body with `gids` in place of the parsed groups. Only the first [`AuthSys::MAX_GIDS`] groups and the
    /// first 255 bytes of the name are written.
    #[doc(hidden)]
    pub fn emit(&self, gids: &[u32], out: &mut [u8]) -> Result<usize, EncodeError> {
        let gids = &gids[..gids.len().min(Self::MAX_GIDS)];
        let mut writer = Encoder::new(out);
        writer.u32(self.stamp)?;
        writer.opaque(&self.machine[..self.machine.len().min(Self::MAX_MACHINE)], Self::MAX_MACHINE)?;
        writer.words([self.uid, self.gid, gids.len() as u32])?;
        gids.iter().try_for_each(|gid| writer.u32(*gid))?;
        Ok(writer.len())
    }

    /// The received supplementary groups.
    pub fn gids(&self) -> impl ExactSizeIterator<Item = u32> + Clone + use<'a> {
        self.gids.iter().map(|gid| word(gid, 0))
    }
}
