//! Cores of the threads.
#![forbid(unsafe_code)]

use std::str::FromStr;

use rpcrdma_host::CoreList;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use crate::failure::Failure;

/// `--cores CLIENT[,SERVER]` of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cores {
    pub(crate) client: usize,
    pub(crate) server: Option<usize>,
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let core = |part: &str| {
            part.trim()
                .parse()
                .map_err(|_| format!("invalid core `{part}`: expected CLIENT or CLIENT,SERVER, such as 0,1"))
        };
        match text.split_once(',') {
            None => Ok(Self { client: core(text)?, server: None }),
            Some((client, server)) => Ok(Self { client: core(client)?, server: Some(core(server)?) }),
        }
    }
}

/// Cores of client and server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Placement {
    /// Cores in this process' affinity.
    pub(crate) allowed: Vec<usize>,
    /// Core of the client.
    pub(crate) client: usize,
    /// Core of a server that this process starts; the assumed core of any other server.
    pub(crate) server: usize,
    /// Both sides share a core and yield to each other.
    pub(crate) shared: bool,
    /// Description for people.
    pub(crate) note: String,
}

impl Placement {
    /// The requested cores; by default the first allowed core for the client, the second for the server.
    pub(crate) fn decide(requested: Option<Cores>) -> Result<Self, Failure> {
        Self::among(allowed_cores()?, requested)
    }

    fn among(allowed: Vec<usize>, requested: Option<Cores>) -> Result<Self, Failure> {
        let Some(&first) = allowed.first() else {
            return Err(Failure::Run("sched_getaffinity: this process may run on no core".to_owned()));
        };
        let named = requested.iter().flat_map(|c| [Some(c.client), c.server]).flatten();
        check_allowed(&allowed, named)?;
        let client = requested.map_or(first, |c| c.client);
        let next = allowed.iter().copied().find(|&core| core != client).unwrap_or(client);
        let server = requested.and_then(|c| c.server).unwrap_or(next);
        let shared = client == server;
        let by = if requested.is_some() { "as requested" } else { "by default" };
        let cores: CoreList = allowed.iter().copied().collect();
        let note = if shared {
            format!("client and server share core {client} ({by}; allowed {cores}) and yield to each other")
        } else {
            format!("client on core {client}, server on core {server} ({by}; allowed {cores})")
        };
        Ok(Self { allowed, client, server, shared, note })
    }
}

impl Placement {
    /// Adopts the core that the server reports.
    pub(crate) fn adopt_server_core(&mut self, core: usize) {
        self.server = core;
        self.shared = core == self.client;
        let shared = if self.shared { ": they share it and yield to each other" } else { "" };
        self.note = format!("client on core {}, server on core {core}, as it reports{shared}", self.client);
    }
}

/// Cores of a server's threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerCores {
    /// Core of each shard; the process itself is pinned to the first.
    pub(crate) shards: Vec<usize>,
    /// Core of each worker; `None` if there are too few cores, so that the kernel places the workers.
    pub(crate) workers: Option<Vec<usize>>,
}

impl ServerCores {
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> {
        self.shards.iter().chain(self.workers.iter().flatten()).copied()
    }
}

impl Placement {
    /// Chooses a server's cores: `given` first, then any except the client's.
    pub(crate) fn decide_for_server(given: &[usize], client: Option<usize>) -> Result<Self, Failure> {
        let allowed = allowed_cores()?;
        check_allowed(&allowed, given.iter().copied())?;
        let requested = match (client, given.first()) {
            (Some(client), server) => Some(Cores { client, server: server.copied() }),
            // Without a client there is no core to avoid. A given core stands for the client's, because the server
            // uses the given cores in any case.
            (None, Some(&first)) => Some(Cores { client: first, server: None }),
            (None, None) => None,
        };
        Self::among(allowed, requested)
    }

    /// Core of each thread of a server: the given cores in order, then the other cores except the client's. If
    /// there are too few, the remaining shards run on the first shard's core and yield to each other.
    pub(crate) fn server_cores(&self, given: &[usize], shards: usize, workers: usize) -> ServerCores {
        let first = [self.server];
        let given = if given.is_empty() { &first } else { given };
        let other_cores = self.allowed.iter().copied().filter(|core| *core != self.client && !given.contains(core));
        let mut cores = given.iter().copied().chain(other_cores);
        let shards: Vec<usize> = (0..shards).map(|_| cores.next().unwrap_or(given[0])).collect();
        let workers_cores: Vec<usize> = cores.take(workers).collect();
        let workers = (workers_cores.len() == workers && workers > 0).then_some(workers_cores);
        ServerCores { shards, workers }
    }

    /// Core of a third polling thread: a free core, or the client's, where the two threads yield to each other.
    pub(crate) fn third_core(&self) -> usize {
        let free = self.allowed.iter().copied().find(|&core| core != self.client && core != self.server);
        free.unwrap_or(self.client)
    }
}

/// Pins the calling thread, and its later children, to one core.
pub(crate) fn pin(core: usize) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|e| Failure::run(format!("sched_setaffinity to core {core}"), e))
}

/// Rejects cores outside this process' affinity.
fn check_allowed(allowed: &[usize], mut named: impl Iterator<Item = usize>) -> Result<(), Failure> {
    match named.find(|core| !allowed.contains(core)) {
        None => Ok(()),
        Some(core) => Err(Failure::Usage(format!(
            "--cores: core {core} is not among the cores {} that this process may use; see Cpus_allowed_list in \
             /proc/self/status (taskset, a cgroup's cpuset or the machine's size set it)",
            CoreList::from_iter(allowed.iter().copied())
        ))),
    }
}

fn allowed_cores() -> Result<Vec<usize>, Failure> {
    let set = sched_getaffinity(None).map_err(|e| Failure::run("sched_getaffinity", e))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_first_two_allowed_cores() {
        let p = Placement::among(vec![2, 5, 7], None).unwrap();
        assert_eq!((p.client, p.server, p.shared), (2, 5, false));
        let p = Placement::among(vec![2, 5, 7], Some("5".parse().unwrap())).unwrap();
        assert_eq!((p.client, p.server), (5, 2));
        let p = Placement::among(vec![3], None).unwrap();
        assert!(p.shared && p.note.contains("share core 3"), "{}", p.note);
    }

    #[test]
    fn the_core_that_the_server_reports_replaces_the_assumed_one() {
        let mut p = Placement::among(vec![0, 1, 2], None).unwrap();
        p.adopt_server_core(2);
        assert_eq!((p.client, p.server, p.shared), (0, 2, false));
        p.adopt_server_core(0);
        assert!(p.shared && p.note.contains("share"), "{}", p.note);
    }

    #[test]
    fn a_third_thread_gets_a_free_core_or_the_clients() {
        let third_core = |allowed| Placement::among(allowed, None).unwrap().third_core();
        assert_eq!((third_core(vec![2, 5, 7]), third_core(vec![2, 5]), third_core(vec![3])), (7, 2, 3));
    }

    #[test]
    fn server_threads_get_given_cores_then_others() {
        let cores = |allowed: Vec<usize>, client, given: &[usize], shards, workers| {
            let placement = Placement::among(allowed, Some(Cores { client, server: given.first().copied() })).unwrap();
            let ServerCores { shards, workers } = placement.server_cores(given, shards, workers);
            (shards, workers)
        };
        let all = || vec![0, 1, 2, 3, 4];
        // The given cores in the given order.
        assert_eq!(cores(all(), 1, &[1, 3, 2, 0], 2, 2), (vec![1, 3], Some(vec![2, 0])));
        // Then the other cores, without the client's.
        assert_eq!(cores(all(), 0, &[2], 2, 2), (vec![2, 1], Some(vec![3, 4])));
        assert_eq!(cores(all(), 0, &[], 1, 0), (vec![1], None));
        // Shards share the first core; workers get none.
        assert_eq!(cores(vec![0, 1], 0, &[1], 2, 1), (vec![1, 1], None));
    }

    #[test]
    fn a_core_outside_the_affinity_is_explained() {
        let e = Placement::among(vec![0, 1, 2, 8], Some("0,4".parse().unwrap())).unwrap_err().to_string();
        assert!(e.contains("core 4") && e.contains("0-2,8") && e.contains("Cpus_allowed_list"), "{e}");
        assert!("0,x".parse::<Cores>().is_err() && "".parse::<Cores>().is_err());
    }
}
