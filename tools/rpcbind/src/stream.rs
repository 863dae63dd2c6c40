//! ONC RPC over a byte stream (RFC 5531 §11), for MOUNT and rpcbind.
//!
//! A blocking client with one call at a time, and functions with which servers read and write records.
#![forbid(unsafe_code)]

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rpcrdma_proto::Refusal;
use rpcrdma_proto::wire::rpc::{CallHeader, OpaqueAuth, ReplyHeader};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Longest reply, in bytes.
const MAX_REPLY: usize = 4 << 20;
/// Last-fragment bit of a record mark, whose other bits are the length.
const LAST: u32 = 1 << 31;

/// Failure of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The stream failed, ended or timed out.
    #[error("RPC stream failed")]
    Io(#[from] io::Error),
    /// The received message is not a reply to the call.
    #[error("malformed reply: {0}")]
    Malformed(&'static str),
    /// The server refused the call.
    #[error("server refused the call: {0}")]
    Refused(Refusal),
}

/// A client of a server on a byte stream.
#[derive(Debug)]
pub struct StreamClient<S = Timed<TcpStream>> {
    stream: S,
    xid: u32,
}

impl StreamClient {
    /// Connects by TCP.
    ///
    /// `timeout` limits the connect and all calls together, so slowly arriving bytes do not extend it.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let end = Instant::now() + timeout;
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        Ok(Self::new(Timed::until(stream, end)))
    }
}

impl StreamClient<Timed<UnixStream>> {
    /// Connects to a local socket. `timeout` limits all calls together.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn connect_local(path: &Path, timeout: Duration) -> io::Result<Self> {
        Ok(Self::new(Timed::new(UnixStream::connect(path)?, timeout)))
    }
}

impl<S: Read + Write> StreamClient<S> {
    /// Creates a client on a connected stream.
    pub fn new(stream: S) -> Self {
        Self { stream, xid: std::process::id().wrapping_mul(0x9E37_79B9) }
    }

    /// Makes a call without authentication. Arguments and results are XDR encoded.
    ///
    /// # Errors
    /// The connection is unusable after any error except [`StreamError::Refused`].
    pub fn call(&mut self, program: u32, version: u32, procedure: u32, args: &[u8]) -> Result<Vec<u8>, StreamError> {
        self.call_as(OpaqueAuth::NONE, program, version, procedure, args)
    }

    /// Makes a call with a credential. Arguments and results are XDR encoded.
    ///
    /// # Errors
    /// The connection is unusable after any error except [`StreamError::Refused`].
    pub fn call_as(
        &mut self,
        credential: OpaqueAuth<'_>,
        program: u32,
        version: u32,
        procedure: u32,
        args: &[u8],
    ) -> Result<Vec<u8>, StreamError> {
        self.xid = self.xid.wrapping_add(1);
        let verifier = OpaqueAuth::NONE;
        let header = CallHeader { xid: self.xid, program, version, procedure, credential, verifier };
        let mut message = vec![0; header.encoded_len()];
        header.emit(&mut message).map_err(|_| StreamError::Malformed("the call's header"))?;
        message.extend(args);
        write_record(&mut self.stream, &message)?;
        let mut reply = read_record(&mut self.stream, MAX_REPLY)?.ok_or(io::Error::from(ErrorKind::UnexpectedEof))?;
        let (header, at) = ReplyHeader::parse(&reply).map_err(|_| StreamError::Malformed("invalid RPC header"))?;
        if header.xid != self.xid {
            return Err(StreamError::Malformed("the XID is that of another call"));
        }
        match Refusal::from_reply_body(&header.body) {
            Some(refusal) => Err(StreamError::Refused(refusal)),
            None => Ok(reply.split_off(at)),
        }
    }
}

/// Reads a record of any number of fragments; `None` at the end of the stream.
///
/// # Errors
/// The stream failed, or ended within the record; or the fragments with their marks exceed `limit` bytes.
pub fn read_record(stream: &mut impl Read, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let (mut record, mut total) = (Vec::new(), 0);
    loop {
        let mut mark = [0; 4];
        match stream.read_exact(&mut mark) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof && total == 0 => return Ok(None),
            outcome => outcome?,
        }
        let mark = u32::from_be_bytes(mark);
        let (start, len) = (record.len(), (mark & !LAST) as usize);
        total += 4 + len;
        if total > limit {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("record exceeds {limit} bytes")));
        }
        record.resize(start + len, 0);
        stream.read_exact(&mut record[start..])?;
        if mark & LAST != 0 {
            return Ok(Some(record));
        }
    }
}

/// Writes a message as one record.
///
/// # Errors
/// Those of the stream.
pub fn write_record(stream: &mut impl Write, message: &[u8]) -> io::Result<()> {
    stream.write_all(&[&(LAST | message.len() as u32).to_be_bytes(), message].concat())
}

/// A socket, or a reference to one, with a common time limit for all reads and writes.
#[derive(Debug)]
pub struct Timed<S> {
    stream: S,
    end: Instant,
}

impl<S: AsFd> Timed<S> {
    /// Creates a socket whose time limit starts now.
    pub fn new(stream: S, time: Duration) -> Self {
        Self::until(stream, Instant::now() + time)
    }

    /// Creates a socket whose time limit ends at `end`.
    pub fn until(stream: S, end: Instant) -> Self {
        Self { stream, end }
    }

    /// Runs a system call within the remaining time.
    fn run<T>(&mut self, timeout: Timeout, call: impl FnOnce(&mut S) -> io::Result<T>) -> io::Result<T> {
        let remaining = self.end.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        set_socket_timeout(&self.stream, timeout, Some(remaining))?;
        call(&mut self.stream).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

impl<S: AsFd + Read> Read for Timed<S> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.run(Timeout::Recv, |stream| stream.read(out))
    }
}

impl<S: AsFd + Write> Write for Timed<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.run(Timeout::Send, |stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A stream that records writes and reads prepared data.
    struct FakeStream {
        written: Vec<u8>,
        answer: Cursor<Vec<u8>>,
    }

    impl Read for FakeStream {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.answer.read(out)
        }
    }

    impl Write for FakeStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.written.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// Makes a call to which `answer` returns the reply for its XID. Returns the result, and the written bytes.
    fn call(answer: impl Fn(u32) -> Vec<u8>) -> (Result<Vec<u8>, StreamError>, Vec<u8>) {
        let xid = StreamClient::new(io::empty()).xid.wrapping_add(1);
        let stream = FakeStream { written: Vec::new(), answer: Cursor::new(answer(xid)) };
        let mut client = StreamClient::new(stream);
        let result = client.call(7, 8, 9, &[1, 2, 3, 4]);
        assert_eq!(client.xid, xid);
        (result, client.stream.written)
    }

    #[test]
    fn a_call_is_one_record_and_a_reply_may_have_several_fragments() {
        let (result, written) = call(|xid| words(&[8, xid, 1, 8, 0, 0, 12 | LAST, 0, 0, 42]));
        assert_eq!(result.unwrap(), words(&[42]));
        let (mark, message) = written.split_first_chunk().unwrap();
        assert_eq!(u32::from_be_bytes(*mark), LAST | message.len() as u32);
        let (header, args) = CallHeader::parse(message).unwrap();
        assert_eq!((header.program, header.version, header.procedure), (7, 8, 9));
        assert_eq!(message[args..], [1, 2, 3, 4]);
    }

    #[test]
    fn refusals_and_malformed_replies_are_errors() {
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
        for (answer, kind) in [
            (words(&[LAST | u32::MAX >> 1]), ErrorKind::InvalidData),
            (vec![0; MAX_REPLY + 4], ErrorKind::InvalidData),
            (words(&[0]), ErrorKind::UnexpectedEof),
            (words(&[24 | LAST, 7, 1]), ErrorKind::UnexpectedEof),
            (Vec::new(), ErrorKind::UnexpectedEof),
        ] {
            let (result, _) = call(|_| answer.clone());
            assert!(matches!(&result, Err(StreamError::Io(error)) if error.kind() == kind), "{result:?}");
        }
    }

    #[test]
    fn reads_and_writes_after_the_time_limit_fail() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let mut timed = Timed::new(&stream, Duration::from_millis(200));
        for _ in 0..2 {
            // Two bytes of a record mark do not extend the time limit.
            peer.write_all(&[0; 2]).unwrap();
            let error = read_record(&mut timed, 100).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        }
        assert_eq!(write_record(&mut timed, b"late").unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
