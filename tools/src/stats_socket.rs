//! Reads snapshots of a server's statistics from its statistics socket.

use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rpcrdma::stats::{FORMAT, Snapshot};
use rpcrdma_rpcbind::stream::Timed;

/// Time limit for a snapshot.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest accepted snapshot, in bytes.
const MAX_LEN: usize = 64 << 20;

/// Checks that the path does not exist, or is a socket.
///
/// # Errors
/// The path is another kind of file.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let is_other_kind = path.metadata().is_ok_and(|found| !found.file_type().is_socket());
    if !is_other_kind {
        return Ok(());
    }
    let advice = "use the path of the server's option for statistics (`ServerConfig::stats`)";
    Err(format!("{}: not a socket; {advice}", path.display()))
}

/// Reads a current snapshot.
///
/// # Errors
/// There is no snapshot. The error names the path and the reason.
pub(crate) fn read(path: &Path) -> Result<Snapshot, String> {
    check(path)?;
    let name = path.display();
    let advice = "is the server started, with its option for statistics (`ServerConfig::stats`)?";
    let stream = UnixStream::connect(path).map_err(|error| format!("{name}: {error}; {advice}"))?;
    let bytes = read_all(&stream, MAX_LEN).map_err(|error| format!("{name}: {error}"))?;
    let invalid = |reason| format!("{name}: not a snapshot of a server: {reason}");
    let snapshot: Snapshot = serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
    if snapshot.format != FORMAT {
        return Err(invalid(format!("format {} instead of {FORMAT}", snapshot.format)));
    }
    Ok(snapshot)
}

/// Reads to the end of the stream, within the time limit.
fn read_all(stream: &UnixStream, longest: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = Timed::new(stream, TIMEOUT).take(longest as u64 + 1).read_to_end(&mut bytes);
    let (kind, why) = match read {
        Ok(_) if bytes.len() <= longest => return Ok(bytes),
        Ok(_) => (ErrorKind::InvalidData, format!("more than {longest} bytes")),
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            (ErrorKind::TimedOut, format!("no snapshot within {TIMEOUT:?}"))
        }
        Err(error) => return Err(error),
    };
    Err(std::io::Error::new(kind, why))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Returns the result of reading from a socket that sends this text.
    fn read_text(text: &str) -> Result<Snapshot, String> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("stats");
        let listener = UnixListener::bind(&path).expect("a socket");
        std::thread::scope(|scope| {
            scope.spawn(|| listener.accept().expect("a reader").0.write_all(text.as_bytes()));
            read(&path)
        })
    }

    #[test]
    fn unknown_fields_are_skipped_and_missing_ones_are_0() {
        let snapshot = read_text(
            r#"{"format":2,"colour":"red","shards":[{"shard":3,"stats":{"calls":7,"new":[1]}},{"stats":null}]}"#,
        );
        let snapshot = snapshot.expect("a snapshot");
        assert_eq!((snapshot.shards.len(), snapshot.shards[0].shard), (2, 3));
        let stats = snapshot.shards[0].stats.as_ref().expect("it answered");
        assert_eq!((stats.calls, stats.turns, stats.latency.len()), (7, 0, 0));
        assert!(snapshot.shards[1].stats.is_none());
    }

    #[test]
    fn an_invalid_snapshot_is_an_error_with_the_path() {
        for (text, expected) in [
            ("", "EOF"),
            (r#"{"format":2,"shards":[{"#, "EOF"),
            ("HTTP/1.1 200 OK", "expected value"),
            (r#"{"format":99}"#, "format 99 instead of"),
            ("{}", "format 0 instead of"),
        ] {
            let error = read_text(text).expect_err(text);
            assert!(error.contains(expected) && error.contains("/stats: "), "{text}: {error}");
        }
        let error = read(Path::new("/nowhere/stats")).expect_err("no server");
        assert!(error.contains("/nowhere/stats") && error.contains("is the server started"), "{error}");
    }

    #[test]
    fn an_endless_snapshot_is_refused() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        std::thread::scope(|scope| {
            scope.spawn(move || while theirs.write_all(&[b' '; 4096]).is_ok() {});
            let error = read_all(&ours, 1 << 20).expect_err("too long");
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            drop(ours);
        });
    }
}
