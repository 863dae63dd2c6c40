//! Log of each shard, and one index over all logs.
//!
//! A record is a head, the key and the value. A batch of records is appended to the log. Its calls are answered once it
//! is on the disk, so answered records survive a crash. A torn record may follow them. The sequence number orders the
//! records of one key.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek};
use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::protocol::{MAX_KEY, MAX_PAGE, MAX_VALUE};

/// First word of a record.
const MAGIC: u32 = 0x6B76_6C67;
/// Bytes of a head: magic, sequence, and two lengths.
const HEAD: usize = 20;
/// Value length of a deleted key.
const NONE: u32 = u32::MAX;

/// Position of a value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValuePosition {
    pub(crate) log: usize,
    pub(crate) at: u64,
    pub(crate) len: u32,
}

/// Index entry of a key. The entry of a deleted key is kept, so that no older record replaces it.
#[derive(Debug)]
struct Entry {
    sequence: u64,
    position: Option<ValuePosition>,
}

pub(crate) struct Store {
    logs: Vec<Arc<File>>,
    /// End of each log when it was opened.
    ends: Vec<u64>,
    index: Mutex<BTreeMap<Vec<u8>, Entry>>,
    sequence: AtomicU64,
}

/// A record to write, without its value.
#[derive(Debug)]
pub(crate) struct Record {
    /// Head and key.
    pub(crate) front: Vec<u8>,
    sequence: u64,
    value_len: Option<u32>,
}

impl Record {
    fn key(&self) -> &[u8] {
        &self.front[HEAD..]
    }

    /// Bytes in the log.
    pub(crate) fn len(&self) -> u64 {
        self.front.len() as u64 + u64::from(self.value_len.unwrap_or(0))
    }
}

impl Store {
    /// Opens or creates the logs of `shards` shards in a directory, and opens all further logs there.
    pub(crate) fn open(directory: &Path, shards: usize) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut store =
            Self { logs: Vec::new(), ends: Vec::new(), index: Mutex::default(), sequence: AtomicU64::new(0) };
        for log in 0.. {
            let path = directory.join(format!("{log}.log"));
            if log >= shards && !path.exists() {
                return Ok(store);
            }
            let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
            let end = store.replay(log, &file)?;
            store.logs.push(Arc::new(file));
            store.ends.push(end);
        }
        Ok(store)
    }

    /// Reads a log into the index, and truncates it after its last complete record. Returns the end of that record.
    fn replay(&self, log: usize, file: &File) -> io::Result<u64> {
        let (mut reader, len) = (BufReader::new(file), file.metadata()?.len());
        let mut end = 0;
        let word = |head: &[u8; HEAD], at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|n| head[at + n]));
        while end + HEAD as u64 <= len {
            let mut head = [0; HEAD];
            reader.read_exact(&mut head)?;
            let sequence = u64::from(word(&head, 4)) << 32 | u64::from(word(&head, 8));
            let (key_len, value_len) = (word(&head, 12) as usize, word(&head, 16));
            let value_len = (value_len != NONE).then_some(value_len);
            let bounded = key_len <= MAX_KEY as usize && value_len.unwrap_or(0) <= MAX_VALUE;
            let record_end = end + (HEAD + key_len) as u64 + u64::from(value_len.unwrap_or(0));
            if word(&head, 0) != MAGIC || !bounded || record_end > len {
                break;
            }
            let mut front = head.to_vec();
            front.resize(HEAD + key_len, 0);
            reader.read_exact(&mut front[HEAD..])?;
            reader.seek_relative(i64::from(value_len.unwrap_or(0)))?;
            self.sequence.fetch_max(sequence + 1, Ordering::Relaxed);
            self.index_record(log, end, &Record { front, sequence, value_len });
            end = record_end;
        }
        reader.rewind()?;
        file.set_len(end)?;
        Ok(end)
    }

    /// Returns the log of a shard, and its end when it was opened.
    pub(crate) fn log(&self, log: usize) -> (Arc<File>, u64) {
        (Arc::clone(&self.logs[log]), self.ends[log])
    }

    pub(crate) fn logs(&self) -> &[Arc<File>] {
        &self.logs
    }

    fn index(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Entry>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds the position of a key's value.
    pub(crate) fn find(&self, key: &[u8]) -> Option<ValuePosition> {
        self.index().get(key)?.position
    }

    /// Returns a page of the keys that have `prefix` and follow `after`, and true if more keys follow.
    pub(crate) fn list(&self, prefix: &[u8], after: &[u8]) -> (Vec<Vec<u8>>, bool) {
        let (mut names, mut room) = (Vec::new(), MAX_PAGE);
        let from = if after >= prefix { Bound::Excluded(after) } else { Bound::Included(prefix) };
        for (key, entry) in self.index().range::<[u8], _>((from, Bound::Unbounded)) {
            if !key.starts_with(prefix) {
                break;
            }
            if entry.position.is_none() {
                continue;
            }
            let needed = 4 + rpcrdma::xdr::padded(key.len());
            match room.checked_sub(needed) {
                Some(left) => room = left,
                None => return (names, true),
            }
            names.push(key.clone());
        }
        (names, false)
    }

    /// Creates a record that sets or deletes a key, with a higher sequence number than all earlier records.
    pub(crate) fn new_record(&self, key: &[u8], value_len: Option<u32>) -> Record {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let words = [MAGIC, (sequence >> 32) as u32, sequence as u32, key.len() as u32, value_len.unwrap_or(NONE)];
        let mut front: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        front.extend(key);
        Record { front, sequence, value_len }
    }

    /// Adds a record, which is at byte `at` of a log, to the index.
    pub(crate) fn index_record(&self, log: usize, at: u64, record: &Record) {
        let position = record.value_len.map(|len| ValuePosition { log, at: at + record.front.len() as u64, len });
        let new = Entry { sequence: record.sequence, position };
        let mut index = self.index();
        match index.get_mut(record.key()) {
            Some(entry) if entry.sequence > new.sequence => {}
            Some(entry) => *entry = new,
            None => drop(index.insert(record.key().to_vec(), new)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_torn_log_is_replayed_up_to_its_last_complete_record() {
        let directory = std::env::temp_dir().join(format!("kv-log-{}", std::process::id()));
        let store = Store::open(&directory, 2).unwrap();
        let mut at = [0, 0];
        let mut put = |log: usize, key: &[u8], value: Option<&[u8]>| {
            let record = store.new_record(key, value.map(|value| value.len() as u32));
            let bytes = [&record.front, value.unwrap_or_default()].concat();
            assert_eq!(bytes.len() as u64, record.len());
            store.logs()[log].write_all_at(&bytes, at[log]).unwrap();
            store.index_record(log, at[log], &record);
            at[log] += record.len();
        };
        put(0, b"a/1", Some(b"one"));
        put(1, b"a/2", Some(b"two"));
        put(1, b"a/1", Some(b"newer"));
        put(0, b"b", Some(b""));
        put(0, b"a/2", None);
        let torn = store.new_record(b"torn", Some(100));
        store.logs()[0].write_all_at(&torn.front, at[0]).unwrap();
        for store in [&store, &Store::open(&directory, 1).unwrap(), &Store::open(&directory, 2).unwrap()] {
            let ValuePosition { log, at, len } = store.find(b"a/1").expect("the key was put");
            assert_eq!((log, len), (1, 5));
            let mut value = [0; 5];
            store.logs()[log].read_exact_at(&mut value, at).unwrap();
            assert_eq!(&value, b"newer");
            assert!(store.find(b"a/2").is_none() && store.find(b"torn").is_none());
            assert_eq!(store.list(b"a/", b""), (vec![b"a/1".to_vec()], false));
            assert_eq!(store.list(b"", b"a/1"), (vec![b"b".to_vec()], false));
        }
        assert_eq!(Store::open(&directory, 2).unwrap().log(0).1, at[0]);
        fs::remove_dir_all(directory).unwrap();
    }
}
