//! XDR of NFS version 4.1 (RFC 5662), as required here.

use rpcrdma::wire::xdr::{BadXdr, Reader};

/// NFS4_OK.
pub(crate) const OK: u32 = 0;

/// `stateid4`: sequence number, and 12 bytes of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stateid(pub(crate) [u8; 16]);

/// `sessionid4`.
pub(crate) type SessionId = [u8; 16];

/// Encoded arguments or results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    pub(crate) fn u32(&mut self, word: u32) -> &mut Self {
        self.fixed(&word.to_be_bytes())
    }

    pub(crate) fn u64(&mut self, word: u64) -> &mut Self {
        self.fixed(&word.to_be_bytes())
    }

    pub(crate) fn words(&mut self, words: &[u32]) -> &mut Self {
        words.iter().fold(self, |encoder, &word| encoder.u32(word))
    }

    /// `opaque[n]`, of a length that is a multiple of 4.
    pub(crate) fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    /// `opaque<>`, `string<>`.
    pub(crate) fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32);
        self.0.extend(bytes);
        let end = self.0.len().next_multiple_of(4);
        self.0.resize(end, 0);
        self
    }
}

/// Types beyond words.
pub(crate) trait Read<'a> {
    fn u64(&mut self) -> Result<u64, BadXdr>;
    fn id(&mut self) -> Result<[u8; 16], BadXdr>;
    fn text(&mut self) -> Result<&'a [u8], BadXdr>;
    fn skip_words(&mut self, count: usize) -> Result<(), BadXdr>;
}

impl<'a> Read<'a> for Reader<'a> {
    fn u64(&mut self) -> Result<u64, BadXdr> {
        Ok(u64::from(self.u32("high word")?) << 32 | u64::from(self.u32("low word")?))
    }

    /// 16 bytes: `stateid4`, `sessionid4`.
    fn id(&mut self) -> Result<[u8; 16], BadXdr> {
        let at = self.at();
        self.bytes(16, "id")?.try_into().map_err(|_| BadXdr { what: "id", at })
    }

    fn text(&mut self) -> Result<&'a [u8], BadXdr> {
        self.opaque(1024, "opaque")
    }

    fn skip_words(&mut self, count: usize) -> Result<(), BadXdr> {
        self.bytes(4 * count, "words").map(|_| ())
    }
}
