//! RPC header of a client's calls, which is constant except for two words.

use crate::wire::EncodeError;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, AuthSys, CallHeader, MAX_AUTH_LEN, OpaqueAuth, accepted_reply_room};

/// RPC credential of the caller: flavor and body (RFC 5531 §8.2).
///
/// The body has at most 400 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credential {
    flavor: u32,
    body: Vec<u8>,
}

impl Credential {
    /// `AUTH_NONE`.
    pub fn none() -> Self {
        Self::default()
    }

    /// `AUTH_SYS` (RFC 5531 §14.1).
    ///
    /// The machine name is truncated to 255 bytes, and groups beyond the first 16 are omitted.
    ///
    /// # Errors
    /// None at present, because such a body always fits a credential.
    pub fn sys(machine: &str, uid: u32, gid: u32, gids: &[u32]) -> Result<Self, EncodeError> {
        Self::stamped(AuthSys::new(0, machine.as_bytes(), uid, gid), gids)
    }

    /// `AUTH_SYS` with a stamp, for the C interface.
    #[doc(hidden)]
    pub fn stamped(sys: AuthSys<'_>, gids: &[u32]) -> Result<Self, EncodeError> {
        let mut body = vec![0; MAX_AUTH_LEN];
        let len = sys.emit(gids, &mut body)?;
        body.truncate(len);
        Ok(Self { flavor: AuthSys::FLAVOR, body })
    }

    /// A credential of any flavor; `body` is sent unchanged.
    pub fn opaque(flavor: u32, body: Vec<u8>) -> Self {
        Self { flavor, body }
    }

    pub(super) fn as_opaque_auth(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: self.flavor, body: &self.body }
    }
}

/// The RPC header of a client's calls, encoded once.
#[derive(Clone, Debug)]
pub(super) struct HeaderTemplate {
    header: Vec<u8>,
    /// Length of the header. It is a `u16`, so that the compiler knows that offsets computed from it do not overflow.
    len: u16,
    /// Bytes that the verifier of a reply may have.
    verifier_room: usize,
}

/// Length of a header with `AUTH_NONE`.
const AUTH_NONE_LEN: usize = 40;
/// Offset of the procedure number.
const PROCEDURE_AT: usize = 20;

impl HeaderTemplate {
    pub(super) fn new(program: u32, version: u32, credential: &Credential) -> Self {
        let header = CallHeader {
            xid: 0,
            program,
            version,
            procedure: 0,
            credential: credential.as_opaque_auth(),
            verifier: OpaqueAuth::NONE,
        };
        let mut bytes = vec![0; header.encoded_len()];
        // The buffer has the length of the header.
        let written = header.emit(&mut bytes).unwrap_or(0);
        debug_assert_eq!(written, bytes.len());
        let verifier_room = accepted_reply_room(credential.flavor) - ACCEPTED_REPLY_LEN;
        Self { header: bytes, len: written as u16, verifier_room }
    }

    /// Bytes in front of the arguments.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// Bytes of `results` plus the longest verifier, without the fixed reply header.
    #[inline]
    pub(super) fn reply_room(&self, results: usize) -> usize {
        results.saturating_add(self.verifier_room)
    }

    /// Writes a header with a credential.
    ///
    /// This function is not inlined, because the compiler would merge this copy and the one in `write` into one of
    /// unknown length.
    #[inline(never)]
    fn write_with_credential(&self, out: &mut [u8]) {
        out[..self.header.len()].copy_from_slice(&self.header);
    }

    /// Writes the header to the start of `out`; the XID is 0.
    #[inline]
    pub(super) fn write(&self, out: &mut [u8], procedure: u32) {
        match (out.first_chunk_mut::<AUTH_NONE_LEN>(), self.header.first_chunk()) {
            // A header of the usual length, which is constant, is copied without a function call.
            (Some(out), Some(template)) if self.header.len() == AUTH_NONE_LEN => *out = *template,
            _ => self.write_with_credential(out),
        }
        if let Some(word) = out.get_mut(PROCEDURE_AT..).and_then(<[u8]>::first_chunk_mut) {
            *word = procedure.to_be_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_header_is_parsed_back() {
        let credential = Credential::sys("host", 1, 2, &[3, 4]).unwrap();
        let template = HeaderTemplate::new(7, 8, &credential);
        let mut bytes = vec![0xFF; template.len() + 4];
        template.write(&mut bytes, 9);
        let (header, args) = CallHeader::parse(&bytes).unwrap();
        assert_eq!((header.program, header.version, header.procedure, args), (7, 8, 9, template.len()));
        let sys = AuthSys::parse(header.credential.body).unwrap();
        assert_eq!((sys.machine, sys.uid, sys.gid), (&b"host"[..], 1, 2));
        assert_eq!(sys.gids().collect::<Vec<_>>(), [3, 4]);
    }
}
