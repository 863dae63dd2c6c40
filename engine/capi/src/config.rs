//! Knobs by name.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::config::{AcceptConfig, Config, ConnectConfig};
use rpcrdma::rpc::AuthSys;
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::{Arena, Services};
use rpcrdma_config::{Role, SettingError, Settings, knobs_named, secret_file};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::names::in_c;
use crate::services::Table;

/// Source of settings, for errors.
const SOURCE: &str = "rpcrdma_config_set";

/// Knobs of servers and clients.
#[derive(Default)]
pub(crate) struct Knobs {
    settings: Settings,
    /// The settings on the defaults of a server, and of a client's connects.
    applied: (Config, AcceptConfig, ConnectConfig),
    own: Own,
    /// Memory of the application.
    pub(crate) arenas: Vec<Arena>,
    /// What a client serves in the reverse direction.
    pub(crate) callbacks: Option<Arc<Services>>,
    /// Where their Read chunks arrive.
    pub(crate) callback_arenas: Vec<Arena>,
}

/// What has a function's argument in Rust, and a name here.
#[derive(Clone, Default)]
struct Own {
    shards: Option<usize>,
    cores: Option<Vec<usize>>,
    workers: usize,
    stats: Option<PathBuf>,
    user: Option<User>,
    host_auth: AuthPolicy,
}

impl Own {
    /// Sets `name`. `None` if it is another's.
    fn set(&mut self, name: &str, text: &str) -> Option<Result<(), Failure>> {
        Some(match name {
            "server.shards" => within(name, text, 1..=MOST_THREADS).map(|count| self.shards = Some(count)),
            "server.cores" => {
                let cores: Option<Vec<_>> = text.split(',').map(core_range).collect();
                let wrong = || {
                    let most = HIGHEST_CORE;
                    Failure::argument(format_args!(
                        "{name} = {text}: expected cores of 0 to {most}, such as 0,2 or 0-3"
                    ))
                };
                cores.ok_or_else(wrong).map(|cores| self.cores = Some(cores.into_iter().flatten().collect()))
            }
            "server.workers" => within(name, text, 0..=MOST_THREADS).map(|count| self.workers = count),
            "server.stats" if text.len() > LONGEST_SOCKET => Err(Failure::argument(format_args!(
                "{name} is a path of {} bytes: names of Unix sockets have at most {LONGEST_SOCKET}",
                text.len()
            ))),
            "server.stats" => {
                self.stats = (!text.is_empty()).then(|| text.into());
                Ok(())
            }
            "client.auth_sys" => User::of(name, text).map(|user| self.user = Some(user)),
            HOST_KEY => host_key(name, text).map(|policy| self.host_auth = policy),
            _ => return None,
        })
    }
}

impl Knobs {
    pub(crate) fn set(&mut self, name: &str, text: &str) -> Result<(), Failure> {
        let found = match name.contains('.') {
            true => vec![name.to_owned()],
            false => named(name),
        };
        let name = match &found[..] {
            [one] => one,
            [] => return Err(Failure::argument(format_args!("no knob `{name}` (tuning.md has all)"))),
            several => return Err(Failure::argument(format_args!("{name} is {}: say which", several.join(" or ")))),
        };
        if let Some(done) = self.own.set(name, text) {
            return done;
        }
        let (settings, (config, accept, connect)) = (&mut self.settings, &mut self.applied);
        let set = match name.starts_with(CONNECT) {
            true => settings.set_applied(SOURCE, name, text, (config, connect)),
            false => settings.set_applied(SOURCE, name, text, (config, accept)),
        };
        set.map_err(failure)
    }

    /// Adds a file's.
    pub(crate) fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let mut next = self.settings.clone();
        next.read(path).map_err(|error| match error {
            SettingError::File { why, errno, .. } => {
                let code = errno.map_or(Errno::INVAL, Errno::from_raw_os_error);
                Failure::new(code, format_args!("{}: {why}", path.display()))
            }
            error => failure(error),
        })?;
        let mut own = self.own.clone();
        for name in OWN {
            if let Some(text) = next.take(name) {
                if name == HOST_KEY {
                    let refused = |error| Failure::argument(format_args!("{name}: {error:#}"));
                    secret_file::check(path).map_err(refused)?;
                }
                let of_file = |failure: Failure| {
                    Failure::as_is(failure.code(), format!("{}: {}", path.display(), failure.text()))
                };
                own.set(name, &text).unwrap_or(Ok(())).map_err(of_file)?;
            }
        }
        self.check(next)?;
        self.own = own;
        Ok(())
    }

    /// Takes these if they are valid. What depends on other knobs is checked at the start.
    fn check(&mut self, next: Settings) -> Result<(), Failure> {
        let (config, accept) = next.apply(&Config::default(), &AcceptConfig::default(), &[]).map_err(failure)?;
        let (_, connect) = next.apply(&Config::default(), &ConnectConfig::default(), &[]).map_err(failure)?;
        self.applied = (config, accept, connect);
        self.settings = next;
        Ok(())
    }

    fn shard<R: Role>(&self, defaults: Config, role: &R) -> Result<(Config, R), Failure> {
        let (mut shard, role) = self.settings.apply(&defaults, role, &[]).map_err(Failure::argument)?;
        shard.memory.arenas.clone_from(&self.arenas);
        shard.wire.host_auth.clone_from(&self.own.host_auth);
        Ok((shard, role))
    }

    /// Configuration of a server with this many addresses, for these services.
    pub(crate) fn server(&self, addresses: usize, services: &Table) -> Result<ServerConfig, Failure> {
        let (shard, accept) = self.shard(Config::default(), &AcceptConfig::default())?;
        let cores = self.own.cores.as_ref().map(Vec::len);
        let shards = self.own.shards.or(cores).unwrap_or(addresses);
        let workers = Some(self.own.workers).filter(|count| *count > 0);
        let wrong = |text: String| Err(Failure::argument(text));
        if shards < addresses || cores.is_some_and(|cores| cores != shards) {
            let cores = cores.map_or_else(String::new, |cores| format!(", server.cores names {cores} cores"));
            return wrong(format!(
                "server.shards is {shards}{cores}: a shard for each of {addresses} addresses, and as \
                                  many cores as shards"
            ));
        }
        if let (Some(name), None) = (services.on_workers(), workers) {
            return wrong(format!("{name} has RPCRDMA_ON_WORKERS, and server.workers is 0"));
        }
        if services.has_task() && workers.is_some() {
            return wrong("server.workers is set, and the services have a task (rpcrdma_services_task)".to_owned());
        }
        if let Some(folder) = self.own.stats.as_deref().and_then(Path::parent)
            && !folder.as_os_str().is_empty()
            && !folder.exists()
        {
            return Err(Failure::new(Errno::NOENT, format_args!("server.stats: no folder {}", folder.display())));
        }
        Ok(ServerConfig {
            shard,
            accept,
            shards,
            cores: self.own.cores.clone(),
            workers: workers.map(|count| WorkerConfig { count, ..WorkerConfig::default() }),
            stats: self.own.stats.clone(),
            ..ServerConfig::default()
        })
    }

    /// As [`server`](Self::server), for a polled one.
    ///
    /// # Errors
    /// It has none of what a knob is for.
    pub(crate) fn local_server(&self, services: &Table) -> Result<ServerConfig, Failure> {
        let config = self.server(1, services)?;
        let knobs = [
            ("server.shards", config.shards > 1),
            ("server.cores", config.cores.is_some()),
            ("server.stats", config.stats.is_some()),
            ("poll.core", config.shard.poll.core.is_some()),
        ];
        match knobs.into_iter().find(|(_, is_set)| *is_set) {
            Some((knob, _)) => {
                Err(Failure::argument(format_args!("{knob} is set: a polled server has no thread for it")))
            }
            None => Ok(config),
        }
    }

    /// As [`client`](Self::client), for a polled one.
    ///
    /// # Errors
    /// It has no thread to be pinned.
    pub(crate) fn local_client(&self, program: u32, version: u32) -> Result<ClientConfig, Failure> {
        let config = self.client(program, version)?;
        match config.shard.poll.core {
            Some(_) => Err(Failure::argument("poll.core is set: a polled client has no thread for it")),
            None => Ok(config),
        }
    }

    pub(crate) fn client(&self, program: u32, version: u32) -> Result<ClientConfig, Failure> {
        let config = ClientConfig::new(program, version);
        let (mut shard, connect) = self.shard(config.shard, &config.connect)?;
        for arena in &self.callback_arenas {
            if shard.memory.arenas.iter().all(|known| known.id() != arena.id()) {
                shard.memory.arenas.push(arena.clone());
            }
        }
        let credential = self.own.user.as_ref().map_or_else(Credential::none, User::credential);
        let services = self.callbacks.clone();
        Ok(ClientConfig { shard, connect, credential, services, ..ClientConfig::new(program, version) })
    }
}

/// Begin of the names of a client's own knobs.
const CONNECT: &str = "connect.";

#[cold]
fn failure(error: SettingError) -> Failure {
    match error {
        SettingError::Unknown { source_, knob, known } => {
            let own = OWN.join(", ");
            let hint = Some(in_c(knob.clone())).filter(|here| *here != knob);
            let hint = hint.map_or_else(String::new, |here| format!(" (in C: {here})"));
            Failure::as_is(Errno::INVAL, format!("{source_}: no knob {knob}{hint}: {}; also {own}", in_c(known)))
        }
        error => Failure::argument(error),
    }
}

/// Names of [`Own`] knobs.
const OWN: [&str; 6] = ["server.shards", "server.cores", "server.workers", "server.stats", "client.auth_sys", HOST_KEY];
/// The knob that is a secret.
const HOST_KEY: &str = "wire.host_key";

/// Full names of a knob.
fn named(name: &str) -> Vec<String> {
    let own = OWN.into_iter().filter(|own| own.split_once('.').is_some_and(|(_, last)| last == name));
    knobs_named(name).into_iter().chain(own.map(str::to_owned)).collect()
}

/// A number. `most` is the highest one of its knob, for the error.
fn number<T: FromStr>(name: &str, text: &str, most: impl Display) -> Result<T, Failure> {
    let wrong = |_| Failure::argument(format_args!("{name} = {text}: wanted a whole number, at most {most}"));
    text.trim().parse().map_err(wrong)
}

/// Bytes of the longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Most shards, or workers, of a server.
const MOST_THREADS: usize = 1024;
/// Highest number of a core: that of a set of cores in the C library.
const HIGHEST_CORE: usize = 1023;

/// A number in this range.
fn within(name: &str, text: &str, range: RangeInclusive<usize>) -> Result<usize, Failure> {
    let value = number(name, text, range.end())?;
    match range.contains(&value) {
        true => Ok(value),
        false => Err(Failure::argument(format_args!("{name} is {value}: {} to {}", range.start(), range.end()))),
    }
}

/// A core, or a range of them, `FIRST-LAST`. `None` if it is neither.
fn core_range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let core = |text: &str| text.trim().parse().ok().filter(|core| *core <= HIGHEST_CORE);
    let range = core(first)?..=core(last)?;
    (!range.is_empty()).then_some(range)
}

/// The number of a user or a group.
fn id(name: &str, text: &str) -> Result<u32, Failure> {
    number(name, text, u32::MAX)
}

/// A user of `AUTH_SYS` (RFC 5531 §14): `UID:GID[:GID,…]`.
#[derive(Clone)]
struct User {
    uid: u32,
    gid: u32,
    gids: Vec<u32>,
}

impl User {
    fn of(name: &str, text: &str) -> Result<Self, Failure> {
        let wrong = || Failure::argument(format_args!("{name} = {text}: wanted UID:GID or UID:GID:GID,GID"));
        let mut parts = text.splitn(3, ':');
        let uid = id(name, parts.next().ok_or_else(wrong)?)?;
        let gid = id(name, parts.next().ok_or_else(wrong)?)?;
        let gids = parts.next().into_iter().flat_map(|gids| gids.split(','));
        let gids = gids.map(|gid| id(name, gid)).collect::<Result<Vec<_>, _>>()?;
        match gids.len() {
            ..=AuthSys::MAX_GIDS => Ok(Self { uid, gid, gids }),
            many => Err(Failure::argument(format_args!("{name} has {many} groups: at most {}", AuthSys::MAX_GIDS))),
        }
    }

    /// A credential of a client, with a stamp of its own: servers know its retransmitted calls from those of others.
    fn credential(&self) -> Credential {
        let stamp = RandomState::new().hash_one(std::process::id()) as u32;
        let host = rustix::system::uname();
        let sys = AuthSys::new(stamp, host.nodename().to_bytes(), self.uid, self.gid);
        // There is room for the longest name, and for all groups.
        Credential::stamped(sys, &self.gids).unwrap_or_default()
    }
}

/// `ID:KEY`, the key in hexadecimal digits.
fn host_key(name: &str, text: &str) -> Result<AuthPolicy, Failure> {
    let wrong = || Failure::argument(format_args!("{name}: wanted ID:KEY, the key in hexadecimal digits"));
    let (id, key) = text.split_once(':').ok_or_else(wrong)?;
    let digits = |at: usize| key.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(wrong);
    let key = (0..key.len()).step_by(2).map(digits).collect::<Result<Vec<u8>, Failure>>()?;
    let key = PreSharedKey::new(id, &key).map_err(|error| Failure::argument(format_args!("{name}: {error}")))?;
    Ok(AuthPolicy::Required(Arc::new(key)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::services::Program;

    fn refused(name: &str, value: &str) -> String {
        let failure = Knobs::default().set(name, value).expect_err(name);
        assert_eq!(failure.code(), Errno::INVAL);
        failure.text().to_owned()
    }

    #[test]
    fn an_unknown_knob_is_named_as_it_was_written() {
        for (name, in_c) in [("wire.host_auth", "wire.host_key"), ("memory.arenas", "rpcrdma_config_arena")] {
            let text = refused(name, "1");
            assert!(text.contains(&format!("no knob {name} (in C: {in_c})")), "{text}");
        }
        assert!(refused("wire.colour", "1").contains("no knob wire.colour: wire has "));
    }

    #[test]
    fn a_value_that_no_host_permits_is_refused_when_it_is_set() {
        let (many, long) = (format!("0:0:{}", ["1"; 17].join(",")), "/".repeat(108));
        for (name, value, text) in [
            ("memory.budget", "256TiB", "memory.budget is 281474976710656: 0 to 140737488355328"),
            (
                "memory.bulk_buffers",
                "[[1073741824, 16777216]]",
                "memory.bulk_buffers is 18014398509481984 bytes in all",
            ),
            ("memory.receives", "99999999999999999999", "memory.receives is 99999999999999999999: 256 to 1048576"),
            ("memory.numa_node", "1024", "memory.numa_node is 1024: 0 to 1023"),
            ("limits.credits", "5000000000", "limits.credits is 5000000000: 4 to 32767"),
            ("limits.credits", "-1", "limits.credits is -1: 4 to 32767"),
            ("limits.max_deferred", "4294967296", "wanted a whole number, 0 to 4294967295"),
            ("poll.core", "1024", "poll.core is 1024: 0 to 1023"),
            ("device.gid_index", "256", "device.gid_index is 256: 0 to 255"),
            (
                "server.workers",
                "99999999999999999999",
                "server.workers = 99999999999999999999: wanted a whole number, at",
            ),
            (
                "client.auth_sys",
                "4294967296:0",
                "client.auth_sys = 4294967296: wanted a whole number, at most 4294967295",
            ),
            ("client.auth_sys", &many, "client.auth_sys has 17 groups: at most 16"),
            ("server.stats", &long, "server.stats is a path of 108 bytes: names of Unix sockets have at most 107"),
        ] {
            assert!(refused(name, value).contains(text), "{name}: {}", refused(name, value));
        }
        assert!(Knobs::default().set("server.stats", &long[1..]).is_ok());
    }

    #[test]
    fn a_budget_that_is_lifted_again_leaves_the_defaults() {
        let mut knobs = Knobs::default();
        for (name, value) in [("limits.max_calls", "64"), ("memory.budget", "64MiB"), ("memory.budget", "0")] {
            assert!(knobs.set(name, value).is_ok(), "{name}");
        }
        let (memory, usual) = (&knobs.applied.0.memory, Config::default().memory);
        assert_eq!((memory.receives, &memory.bulk_buffers), (usual.receives, &usual.bulk_buffers));
        assert_eq!((memory.message_buffers, &memory.long_buffers), (usual.message_buffers, &usual.long_buffers));
    }

    #[test]
    fn a_procedure_for_workers_is_named_if_there_are_none() {
        extern "C-unwind" fn never(
            _: *mut std::ffi::c_void,
            _: *mut crate::types::rpcrdma_call,
            _: *const std::ffi::c_void,
            _: usize,
            _: *mut std::ffi::c_void,
            _: *mut usize,
        ) -> std::ffi::c_int {
            0
        }
        let entry = crate::services::rpcrdma_procedure {
            number: 7,
            flags: crate::services::RPCRDMA_ON_WORKERS,
            handler: Some(never),
            deferred: None,
            context: std::ptr::null_mut(),
            max_reply: 0,
            read_chunks: 0,
            write_chunks: 0,
            max_read: 0,
            max_write: 0,
            reads_into: std::ptr::null_mut(),
        };
        let mut services = Table::default();
        assert!(services.add(Program { program: 0x2000_0001, version: 3 }, &entry).is_ok());
        let failure = Knobs::default().server(1, &services).expect_err("no workers");
        let text = "procedure 7 of program 0x20000001, version 3 has RPCRDMA_ON_WORKERS, and server.workers is 0";
        assert_eq!(failure.text(), text);
    }

    #[test]
    fn cores_are_numbers_and_ranges() {
        for (text, cores) in [("0,2", &[0, 2][..]), ("3,0-1", &[3, 0, 1]), ("1023", &[1023])] {
            let mut knobs = Knobs::default();
            assert!(knobs.set("server.cores", text).is_ok(), "{text}");
            assert_eq!(knobs.own.cores.as_deref(), Some(cores), "{text}");
        }
        for text in ["", "0,", "2-1", "0-1-2", "1024", "0-99999999999", "x"] {
            assert!(refused("server.cores", text).contains("such as 0,2 or 0-3"), "{text}");
        }
    }

    /// Loads a file with this text and mode. Returns its path without symbolic links, and the text of the failure.
    fn loaded(text: &[u8], mode: u32) -> (String, Result<Knobs, String>) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("a path").join("knobs.toml");
        fs::write(&path, text).expect("space");
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("our file");
        let mut knobs = Knobs::default();
        let result = knobs.load(&path).map_err(|failure| {
            assert_eq!(failure.code(), Errno::INVAL, "{}", failure.text());
            failure.text().to_owned()
        });
        (path.display().to_string(), result.map(|()| knobs))
    }

    #[test]
    fn a_wrong_value_is_named_with_its_file() {
        for (file, cause) in [
            (&b"[server]\nworkers = \"two\"\n"[..], "server.workers = two: wanted a whole number, at most 1024"),
            (b"[server]\nshards = 0\n", "server.shards is 0: 1 to 1024"),
            (b"[wire]\nhost_key = \"me\"\n", "wire.host_key: wanted ID:KEY, the key in hexadecimal digits"),
            (b"[limits]\n# \xff\n", "line 2: not UTF-8"),
            ("#".repeat(5 << 20).as_bytes(), "a file of 5242880 bytes; a configuration has at most 4194304"),
        ] {
            let (path, result) = loaded(file, 0o600);
            assert_eq!(result.err(), Some(format!("{path}: {cause}")));
        }
    }

    #[test]
    fn a_short_key_is_refused_with_a_command_for_hexadecimal_digits() {
        let text = refused("wire.host_key", "me:0001");
        assert!(text.starts_with("wire.host_key: key of 2 bytes") && text.contains("`openssl rand -hex 32`"), "{text}");
    }

    #[test]
    fn a_file_with_a_host_key_that_others_may_read_is_refused() {
        let key = format!("[limits]\ncredits = 32\n[wire]\nhost_key = \"me:{}\"\n", "07".repeat(32));
        let (path, result) = loaded(key.as_bytes(), 0o644);
        let expected =
            format!("wire.host_key: {path} has mode 0644, so that other users could read the key: chmod 600 {path}");
        assert_eq!(result.err(), Some(expected));
        let knobs = loaded(key.as_bytes(), 0o600).1.expect("only its owner may read it");
        assert!(matches!(knobs.own.host_auth, AuthPolicy::Required(_)));
        assert!(loaded(b"[limits]\ncredits = 32\n", 0o644).1.is_ok(), "it has no key");
    }

    #[test]
    fn a_file_that_is_refused_changes_nothing() {
        let mut knobs = Knobs::default();
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("knobs.toml");
        fs::write(&path, "[server]\nworkers = 7\n[limits]\ncredits = 32\nmax_calls = 0\n").expect("space");
        assert!(knobs.load(&path).is_err());
        assert_eq!((knobs.own.workers, knobs.applied.0.limits.credits), (0, Config::default().limits.credits));
    }

    #[test]
    fn a_file_that_cannot_be_read_has_the_code_of_its_system_call() {
        for (path, code) in [("/", Errno::ISDIR), ("/nowhere", Errno::NOENT), ("/dev/null/x", Errno::NOTDIR)] {
            let failure = Knobs::default().load(Path::new(path)).expect_err(path);
            assert_eq!(failure.code(), code, "{path}: {}", failure.text());
        }
    }
}
