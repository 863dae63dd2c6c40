//! Snapshots of a server's statistics, read from its socket.

use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rpcrdma::stats::{FORMAT, Snapshot};
use rpcrdma_rpcbind::stream::Timed;

/// Time limit for a snapshot.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest snapshot, in bytes. A longer one is an error.
const LONGEST: usize = 64 << 20;

/// Checks that the path is free, or a socket.
///
/// # Errors
/// The path is something else.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let is_other = path.metadata().is_ok_and(|found| !found.file_type().is_socket());
    if !is_other {
        return Ok(());
    }
    let wanted = "give the one of the server's option for statistics (`ServerConfig::stats`)";
    Err(format!("{}: this is no socket; {wanted}", path.display()))
}

/// Reads a current snapshot.
///
/// # Errors
/// The path, and the reason for its absence.
pub(crate) fn read(path: &Path) -> Result<Snapshot, String> {
    check(path)?;
    let name = path.display();
    let asked = "is the server started, with its option for statistics (`ServerConfig::stats`)?";
    let stream = UnixStream::connect(path).map_err(|error| format!("{name}: {error}; {asked}"))?;
    let bytes = read_all(&stream, LONGEST).map_err(|error| format!("{name}: {error}"))?;
    let other = |reason| format!("{name}: this is no snapshot of a server: {reason}");
    let snapshot: Snapshot = serde_json::from_slice(&bytes).map_err(|error| other(error.to_string()))?;
    if snapshot.format != FORMAT {
        return Err(other(format!("its format is {}, and this program knows {FORMAT}", snapshot.format)));
    }
    Ok(snapshot)
}

/// Reads to the end of the stream, within the time limit.
fn read_all(stream: &UnixStream, longest: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = Timed::new(stream, PATIENCE).take(longest as u64 + 1).read_to_end(&mut bytes);
    let (kind, why) = match read {
        Ok(_) if bytes.len() <= longest => return Ok(bytes),
        Ok(_) => (ErrorKind::InvalidData, format!("more than {longest} bytes")),
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            (ErrorKind::TimedOut, format!("no snapshot within {PATIENCE:?}"))
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

    /// Result of reading when the socket delivers this.
    fn said(text: &str) -> Result<Snapshot, String> {
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
        let told =
            said(r#"{"format":2,"colour":"red","shards":[{"shard":3,"stats":{"calls":7,"new":[1]}},{"stats":null}]}"#);
        let told = told.expect("a snapshot");
        assert_eq!((told.shards.len(), told.shards[0].shard), (2, 3));
        let stats = told.shards[0].stats.as_ref().expect("it answered");
        assert_eq!((stats.calls, stats.turns, stats.latency.len()), (7, 0, 0));
        assert!(told.shards[1].stats.is_none());
    }

    #[test]
    fn an_invalid_snapshot_is_an_error_with_the_path() {
        for (text, says) in [
            ("", "EOF"),
            (r#"{"format":2,"shards":[{"#, "EOF"),
            ("HTTP/1.1 200 OK", "expected value"),
            (r#"{"format":99}"#, "its format is 99"),
            ("{}", "its format is 0"),
        ] {
            let error = said(text).expect_err(text);
            assert!(error.contains(says) && error.contains("/stats: "), "{text}: {error}");
        }
        let error = read(Path::new("/nowhere/stats")).expect_err("nobody is there");
        assert!(error.contains("/nowhere/stats") && error.contains("is the server started"), "{error}");
    }

    #[test]
    fn an_endless_snapshot_is_not_kept() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        std::thread::scope(|scope| {
            scope.spawn(move || while theirs.write_all(&[b' '; 4096]).is_ok() {});
            let error = read_all(&ours, 1 << 20).expect_err("too long");
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            drop(ours);
        });
    }
}
