//! ONC RPC over a byte stream (RFC 5531 §11), as a client: for what goes beside RDMA, such as MOUNT and
//! rpcbind. One call at a time, blocking; nothing of it is fast, or meant to be.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rpcrdma_proto::Refusal;
use rpcrdma_proto::wire::rpc::{CallHeader, OpaqueAuth, ReplyHeader};

/// Longest reply that is taken, in bytes.
const LONGEST: usize = 4 << 20;
/// The bit of a record mark that ends the record; the others are the fragment's length.
const LAST: u32 = 1 << 31;

/// How a call over a stream can end without results.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The stream ended, or nothing came in time.
    #[error("stream of RPC failed")]
    Io(#[from] io::Error),
    /// What came is not the reply to the call.
    #[error("malformed reply: {0}")]
    Malformed(&'static str),
    /// The server answered that it does not carry it out.
    #[error("refused by the server: {0}")]
    Refused(Refusal),
}

/// A connection to a server.
#[derive(Debug)]
pub struct StreamClient<S = TcpStream> {
    stream: S,
    xid: u32,
}

impl StreamClient<TcpStream> {
    /// Connects by TCP. Connecting, and each call, may take `timeout`.
    ///
    /// # Errors
    /// As of the system.
    pub fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        stream.set_nodelay(true)?;
        Ok(Self::new(stream))
    }
}

impl StreamClient<UnixStream> {
    /// Connects to a socket of this host. Each call may take `timeout`.
    ///
    /// # Errors
    /// As of the system.
    pub fn connect_local(path: &Path, timeout: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self::new(stream))
    }
}

impl<S: Read + Write> StreamClient<S> {
    /// Over a stream that is connected.
    pub fn new(stream: S) -> Self {
        Self { stream, xid: std::process::id().wrapping_mul(0x9E37_79B9) }
    }

    /// Calls, as nobody in particular, with XDR encoded arguments; the results, XDR encoded.
    ///
    /// # Errors
    /// After any but [`StreamError::Refused`] the connection is of no more use.
    pub fn call(&mut self, program: u32, version: u32, procedure: u32, args: &[u8]) -> Result<Vec<u8>, StreamError> {
        self.xid = self.xid.wrapping_add(1);
        let auth = OpaqueAuth::NONE;
        let header = CallHeader { xid: self.xid, program, version, procedure, credential: auth, verifier: auth };
        let len = header.encoded_len();
        let mut record = vec![0; 4 + len];
        header.emit(&mut record[4..]).map_err(|_| StreamError::Malformed("the call's header"))?;
        record[..4].copy_from_slice(&(LAST | (len + args.len()) as u32).to_be_bytes());
        record.extend(args);
        self.stream.write_all(&record)?;
        let mut reply = self.record()?;
        let (header, at) = ReplyHeader::parse(&reply).map_err(|_| StreamError::Malformed("its RPC header"))?;
        if header.xid != self.xid {
            return Err(StreamError::Malformed("it answers another call"));
        }
        match Refusal::of(&header.body) {
            Some(refusal) => Err(StreamError::Refused(refusal)),
            None => Ok(reply.split_off(at)),
        }
    }

    /// The next record, of however many fragments.
    fn record(&mut self) -> Result<Vec<u8>, StreamError> {
        let mut record = Vec::new();
        loop {
            let mut mark = [0; 4];
            self.stream.read_exact(&mut mark)?;
            let mark = u32::from_be_bytes(mark);
            let (start, len) = (record.len(), (mark & !LAST) as usize);
            if start + len > LONGEST {
                return Err(StreamError::Malformed("it is too long"));
            }
            record.resize(start + len, 0);
            self.stream.read_exact(&mut record[start..])?;
            if mark & LAST != 0 {
                return Ok(record);
            }
            if len == 0 {
                return Err(StreamError::Malformed("an empty fragment that another one follows"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Keeps what is written, and has been read before.
    struct Tape {
        said: Vec<u8>,
        answer: Cursor<Vec<u8>>,
    }

    impl Read for Tape {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.answer.read(out)
        }
    }

    impl Write for Tape {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.said.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// Calls, and gets an answer made of the call's XID.
    fn call(answer: impl Fn(u32) -> Vec<u8>) -> (Result<Vec<u8>, StreamError>, Vec<u8>) {
        let xid = StreamClient::new(io::empty()).xid.wrapping_add(1);
        let tape = Tape { said: Vec::new(), answer: Cursor::new(answer(xid)) };
        let mut client = StreamClient::new(tape);
        let result = client.call(7, 8, 9, &[1, 2, 3, 4]);
        assert_eq!(client.xid, xid);
        (result, client.stream.said)
    }

    #[test]
    fn a_call_is_one_record_and_a_reply_may_be_several_fragments() {
        let (result, said) = call(|xid| words(&[8, xid, 1, 8, 0, 0, 12 | LAST, 0, 0, 42]));
        assert_eq!(result.unwrap(), words(&[42]));
        let (mark, message) = said.split_first_chunk().unwrap();
        assert_eq!(u32::from_be_bytes(*mark), LAST | message.len() as u32);
        let (header, args) = CallHeader::parse(message).unwrap();
        assert_eq!((header.program, header.version, header.procedure), (7, 8, 9));
        assert_eq!(message[args..], [1, 2, 3, 4]);
    }

    #[test]
    fn what_is_no_reply_to_the_call_is_told() {
        let record = |body: Vec<u32>| words(&[&[(4 * body.len() as u32) | LAST], &body[..]].concat());
        let refused = |result| match result {
            Err(StreamError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        let (result, _) = call(|xid| record(vec![xid, 1, 0, 0, 0, 2, 3, 4]));
        assert_eq!(refused(result), Refusal::ProgramMismatch { low: 3, high: 4 });
        let (result, _) = call(|xid| record(vec![xid, 1, 1, 1, 5]));
        assert_eq!(refused(result), Refusal::Authentication(5));
        let malformed = |answer: &dyn Fn(u32) -> Vec<u8>| {
            assert!(matches!(call(answer).0, Err(StreamError::Malformed(_))));
        };
        malformed(&|xid| record(vec![xid ^ 1, 1, 0, 0, 0, 0]));
        malformed(&|xid| record(vec![xid, 0, 0]));
        malformed(&|_| words(&[LAST | u32::MAX >> 1]));
        malformed(&|_| words(&[0]));
        let (result, _) = call(|xid| words(&[24 | LAST, xid, 1]));
        assert!(matches!(result, Err(StreamError::Io(_))), "{result:?}");
    }
}
