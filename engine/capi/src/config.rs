//! Configuration by names of knobs.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rpcrdma::auth::{AuthPolicy, PreSharedKey};
use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::config::{AcceptConfig, Config, ConfigError, ConnectConfig};
use rpcrdma::rpc::AuthSys;
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::{Arena, Services};
use rpcrdma_config::{Role, SettingError, Settings, knobs_named, secret_file};
use rustix::io::Errno;

use crate::failure::ApiFailure;
use crate::names::to_c_names;
use crate::services::ServiceTable;

/// Source of settings in error texts.
const SOURCE: &str = "rpcrdma_config_set";

/// Knobs of servers and clients.
#[derive(Default)]
pub(crate) struct Knobs {
    settings: Settings,
    /// The defaults with the settings applied: shard, accept (server) and connect (client) configuration.
    applied: (Config, AcceptConfig, ConnectConfig),
    extra: ExtraKnobs,
    /// Memory of the application.
    pub(crate) arenas: Vec<Arena>,
    /// Services of a client in the reverse direction.
    pub(crate) callbacks: Option<Arc<Services>>,
    /// Memory for the Read chunks of `callbacks`.
    pub(crate) callback_arenas: Vec<Arena>,
}

/// Knobs of the C interface that are fields or arguments of other types in Rust.
#[derive(Clone, Default)]
struct ExtraKnobs {
    shards: Option<usize>,
    cores: Option<Vec<usize>>,
    workers: usize,
    stats: Option<PathBuf>,
    user: Option<AuthSysUser>,
    host_auth: AuthPolicy,
}

impl ExtraKnobs {
    /// Sets the knob `name`. Returns `None` if it is not one of these knobs.
    fn set(&mut self, name: &str, text: &str) -> Option<Result<(), ApiFailure>> {
        // As in a file, a value may be quoted, and `unset` restores the default.
        let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
        if text == UNSET && self.unset(name) {
            return Some(Ok(()));
        }
        Some(match name {
            "server.shards" => number_in_range(name, text, 1..=MAX_THREADS).map(|count| self.shards = Some(count)),
            "server.cores" => {
                let cores: Option<Vec<_>> = text.split(',').map(core_range).collect();
                let wrong = || {
                    ApiFailure::argument(format_args!(
                        "{name}: invalid value `{text}`: expected cores of 0 to {HIGHEST_CORE}, such as 0,2 or 0-3"
                    ))
                };
                cores.ok_or_else(wrong).map(|cores| self.cores = Some(cores.into_iter().flatten().collect()))
            }
            "server.workers" => number_in_range(name, text, 0..=MAX_THREADS).map(|count| self.workers = count),
            "server.stats" if text.len() > LONGEST_SOCKET => Err(ApiFailure::argument(format_args!(
                "{name}: path of {} bytes exceeds {LONGEST_SOCKET}, the limit of names of Unix sockets",
                text.len()
            ))),
            "server.stats" => {
                self.stats = (!text.is_empty()).then(|| text.into());
                Ok(())
            }
            "client.auth_sys" => AuthSysUser::parse(name, text).map(|user| self.user = Some(user)),
            HOST_KEY => host_key(name, text).map(|policy| self.host_auth = policy),
            _ => return None,
        })
    }

    /// Sets the knob `name` to its default. Returns false if it is not one of these knobs, or always has a value.
    fn unset(&mut self, name: &str) -> bool {
        match name {
            "server.shards" => self.shards = None,
            "server.cores" => self.cores = None,
            "server.stats" => self.stats = None,
            "client.auth_sys" => self.user = None,
            HOST_KEY => self.host_auth = AuthPolicy::Off,
            _ => return false,
        }
        true
    }
}

impl Knobs {
    pub(crate) fn set(&mut self, name: &str, text: &str) -> Result<(), ApiFailure> {
        let found = match name.contains('.') {
            true => vec![name.to_owned()],
            false => full_names(name),
        };
        let name = match &found[..] {
            [only] => only,
            [] => return Err(ApiFailure::argument(format_args!("{name}: no such knob (tuning.md lists all)"))),
            candidates => {
                return Err(ApiFailure::argument(format_args!(
                    "{name}: ambiguous: expected {}",
                    candidates.join(" or ")
                )));
            }
        };
        let mut extra = self.extra.clone();
        if let Some(result) = extra.set(name, text) {
            return result.and_then(|()| self.replace_extra(name, extra));
        }
        let (settings, (config, accept, connect)) = (&mut self.settings, &mut self.applied);
        let set = match name.starts_with(CONNECT) {
            true => settings.set_applied(SOURCE, name, text, (config, connect)),
            false => settings.set_applied(SOURCE, name, text, (config, accept)),
        };
        set.map_err(|error| setting_failure(error, Some(name)))
    }

    /// Stores `extra`, in which the knob `name` is new. Fails if it contradicts the settings.
    fn replace_extra(&mut self, name: &str, extra: ExtraKnobs) -> Result<(), ApiFailure> {
        if name == HOST_KEY {
            let mut config = self.applied.0.clone();
            config.wire.host_auth.clone_from(&extra.host_auth);
            config.validate().map_err(|error| ApiFailure::argument(format_args!("{name}: {error}")))?;
            self.applied.0 = config;
        }
        self.extra = extra;
        Ok(())
    }

    /// Adds the knobs of a file.
    pub(crate) fn load(&mut self, path: &Path) -> Result<(), ApiFailure> {
        let mut next = self.settings.clone();
        next.read(path).map_err(|error| match error {
            SettingError::File { why, errno, .. } => {
                let code = errno.map_or(Errno::INVAL, Errno::from_raw_os_error);
                ApiFailure::new(code, format_args!("{}: {why}", path.display()))
            }
            error => setting_failure(error, None),
        })?;
        let mut extra = self.extra.clone();
        for name in EXTRA_KNOBS {
            if let Some(text) = next.take(name) {
                if name == HOST_KEY {
                    let refused = |error| ApiFailure::argument(format_args!("{name}: {error:#}"));
                    secret_file::check(path).map_err(refused)?;
                }
                let add_path = |failure: ApiFailure| {
                    ApiFailure::untranslated(failure.code(), format!("{}: {}", path.display(), failure.text()))
                };
                extra.set(name, &text).unwrap_or(Ok(())).map_err(add_path)?;
            }
        }
        // If the file contradicts an earlier setting, the error does not name the file, so it is added.
        self.apply(next, &extra.host_auth).map_err(|failure| {
            let name = path.display().to_string();
            if failure.text().starts_with(&name) { failure } else { failure.with_subject(name) }
        })?;
        self.extra = extra;
        Ok(())
    }

    /// Replaces the settings if the new ones are valid with this host authentication.
    fn apply(&mut self, next: Settings, host_auth: &AuthPolicy) -> Result<(), ApiFailure> {
        let failure = |error| setting_failure(error, None);
        let mut defaults = Config::default();
        defaults.wire.host_auth.clone_from(host_auth);
        let (config, accept) = next.apply(&defaults, &AcceptConfig::default(), &[]).map_err(failure)?;
        let (_, connect) = next.apply(&defaults, &ConnectConfig::default(), &[]).map_err(failure)?;
        self.applied = (config, accept, connect);
        self.settings = next;
        Ok(())
    }

    fn shard<R: Role>(&self, defaults: Config, role: &R) -> Result<(Config, R), ApiFailure> {
        let (mut shard, role) = self.settings.apply(&defaults, role, &[]).map_err(ApiFailure::argument)?;
        shard.memory.arenas.clone_from(&self.arenas);
        shard.wire.host_auth.clone_from(&self.extra.host_auth);
        Ok((shard, role))
    }

    /// Configuration of a server with this many addresses, for these services.
    pub(crate) fn server(&self, addresses: usize, services: &ServiceTable) -> Result<ServerConfig, ApiFailure> {
        let (shard, accept) = self.shard(Config::default(), &AcceptConfig::default())?;
        let cores = self.extra.cores.as_ref().map(Vec::len);
        let shards = self.extra.shards.or(cores).unwrap_or(addresses);
        let workers = Some(self.extra.workers).filter(|count| *count > 0);
        if shards < addresses {
            let knob = if self.extra.shards.is_some() { "server.shards" } else { "the number of server.cores" };
            return Err(ApiFailure::argument(format_args!(
                "{addresses} addresses need at least {addresses} shards, but {knob} is {shards}"
            )));
        }
        if let Some(cores) = cores.filter(|cores| *cores != shards) {
            return Err(ApiFailure::argument(format_args!(
                "server.shards is {shards}, but the number of server.cores is {cores}: expected a core for each shard"
            )));
        }
        if let (Some(name), None) = (services.on_workers(), workers) {
            return Err(ApiFailure::argument(format_args!(
                "{name} has RPCRDMA_ON_WORKERS, but server.workers is 0: set it to 1 or more"
            )));
        }
        if services.has_task() && workers.is_some() {
            return Err(ApiFailure::argument(
                "server.workers is set, but the services have a task (rpcrdma_services_task): leave it at 0",
            ));
        }
        if let Some(directory) = self.extra.stats.as_deref().and_then(Path::parent)
            && !directory.as_os_str().is_empty()
            && !directory.exists()
        {
            return Err(ApiFailure::new(
                Errno::NOENT,
                format_args!("server.stats: directory {} does not exist", directory.display()),
            ));
        }
        Ok(ServerConfig {
            shard,
            accept,
            shards,
            cores: self.extra.cores.clone(),
            workers: workers.map(|count| WorkerConfig { count, ..WorkerConfig::default() }),
            stats: self.extra.stats.clone(),
            ..ServerConfig::default()
        })
    }

    /// Configuration of a polled server.
    ///
    /// # Errors
    /// A knob is set that needs threads.
    pub(crate) fn local_server(&self, services: &ServiceTable) -> Result<ServerConfig, ApiFailure> {
        let config = self.server(1, services)?;
        let knobs = [
            ("server.shards", config.shards > 1),
            ("server.cores", config.cores.is_some()),
            ("server.stats", config.stats.is_some()),
            ("poll.core", config.shard.poll.core.is_some()),
        ];
        match knobs.into_iter().find(|(_, is_set)| *is_set) {
            Some((knob, _)) => {
                Err(ApiFailure::argument(format_args!("{knob} is set: a polled server has no thread for it")))
            }
            None => Ok(config),
        }
    }

    /// Configuration of a polled client.
    ///
    /// # Errors
    /// `poll.core` is set, but there is no thread to pin.
    pub(crate) fn local_client(&self, program: u32, version: u32) -> Result<ClientConfig, ApiFailure> {
        let config = self.client(program, version)?;
        match config.shard.poll.core {
            Some(_) => Err(ApiFailure::argument("poll.core is set: a polled client has no thread for it")),
            None => Ok(config),
        }
    }

    /// Configuration of a client for calls of this program.
    pub(crate) fn client(&self, program: u32, version: u32) -> Result<ClientConfig, ApiFailure> {
        let config = ClientConfig::new(program, version);
        let (mut shard, connect) = self.shard(config.shard, &config.connect)?;
        for arena in &self.callback_arenas {
            if shard.memory.arenas.iter().all(|known| known.id() != arena.id()) {
                shard.memory.arenas.push(arena.clone());
            }
        }
        let credential = self.extra.user.as_ref().map_or_else(Credential::none, AuthSysUser::credential);
        let services = self.callbacks.clone();
        Ok(ClientConfig { shard, connect, credential, services, ..ClientConfig::new(program, version) })
    }
}

/// Prefix of the names of a client's own knobs.
const CONNECT: &str = "connect.";

/// Formats an error as `SOURCE: KNOB: CAUSE`, without the source if it is `rpcrdma_config_set`.
///
/// `set` is the knob given to that function. The cause may name another one.
#[cold]
fn setting_failure(error: SettingError, set: Option<&str>) -> ApiFailure {
    let (source, text) = match error {
        SettingError::Unknown { source_, knob, known } => {
            let extra = EXTRA_KNOBS.join(", ");
            let hint = Some(to_c_names(knob.clone())).filter(|here| *here != knob);
            let hint = hint.map_or_else(String::new, |here| format!(" (in C: {here})"));
            let text = format!("{knob}: no such knob{hint}: {}; also {extra}", to_c_names(known));
            return ApiFailure::untranslated(Errno::INVAL, with_source(&source_, text));
        }
        SettingError::Replaced { source_, knob, became } => (source_, format!("{knob}: {became}")),
        SettingError::Value { source_, knob, value, why } => {
            (source_, format!("{knob}: invalid value `{value}`: {why}"))
        }
        SettingError::Refused { source_, error } => match set {
            Some(set) if set != error.knob => (source_, format!("{set}: {error}")),
            _ => {
                let ConfigError { knob, value, expected, .. } = error;
                (source_, format!("{knob}: invalid value `{value}`: expected {expected}"))
            }
        },
        error => return ApiFailure::argument(error),
    };
    ApiFailure::argument(with_source(&source, text))
}

/// Puts the source of a setting in front of a text, unless that is `rpcrdma_config_set`.
fn with_source(source: &str, text: String) -> String {
    if source == SOURCE { text } else { format!("{source}: {text}") }
}

/// Names of the [`ExtraKnobs`].
const EXTRA_KNOBS: [&str; 6] =
    ["server.shards", "server.cores", "server.workers", "server.stats", "client.auth_sys", HOST_KEY];
/// Text that sets a knob back to its default.
const UNSET: &str = "unset";
/// The knob whose value is a secret.
const HOST_KEY: &str = "wire.host_key";

/// Full names of the knobs with this name in any group.
fn full_names(name: &str) -> Vec<String> {
    let extra = EXTRA_KNOBS.into_iter().filter(|extra| extra.split_once('.').is_some_and(|(_, last)| last == name));
    knobs_named(name).into_iter().chain(extra.map(str::to_owned)).collect()
}

/// Parses a number. `max` is the highest value of the knob, for the error.
fn number<T: FromStr>(name: &str, text: &str, max: impl Display) -> Result<T, ApiFailure> {
    let wrong = |_| {
        ApiFailure::argument(format_args!("{name}: invalid value `{text}`: expected a whole number, at most {max}"))
    };
    text.trim().parse().map_err(wrong)
}

/// Bytes of the longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Maximum shards, or workers, of a server.
const MAX_THREADS: usize = 1024;
/// Highest number of a core in a `cpu_set_t`.
const HIGHEST_CORE: usize = 1023;

/// Parses a number in this range.
fn number_in_range(name: &str, text: &str, range: RangeInclusive<usize>) -> Result<usize, ApiFailure> {
    let value = number(name, text, range.end())?;
    match range.contains(&value) {
        true => Ok(value),
        false => Err(ApiFailure::argument(format_args!(
            "{name}: invalid value `{value}`: expected {} to {}",
            range.start(),
            range.end()
        ))),
    }
}

/// Parses a core, or a range of cores, `FIRST-LAST`. `None` if the text is neither.
fn core_range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let core = |text: &str| text.trim().parse().ok().filter(|core| *core <= HIGHEST_CORE);
    let range = core(first)?..=core(last)?;
    (!range.is_empty()).then_some(range)
}

/// Parses the number of a user or a group.
fn user_or_group_id(name: &str, text: &str) -> Result<u32, ApiFailure> {
    number(name, text, u32::MAX)
}

/// A user of `AUTH_SYS` (RFC 5531 §14): `UID:GID[:GID,…]`.
#[derive(Clone)]
struct AuthSysUser {
    uid: u32,
    gid: u32,
    gids: Vec<u32>,
}

impl AuthSysUser {
    fn parse(name: &str, text: &str) -> Result<Self, ApiFailure> {
        let wrong = || {
            ApiFailure::argument(format_args!("{name}: invalid value `{text}`: expected UID:GID or UID:GID:GID,GID"))
        };
        let mut parts = text.splitn(3, ':');
        let uid = user_or_group_id(name, parts.next().ok_or_else(wrong)?)?;
        let gid = user_or_group_id(name, parts.next().ok_or_else(wrong)?)?;
        let gids = parts.next().into_iter().flat_map(|gids| gids.split(','));
        let gids = gids.map(|gid| user_or_group_id(name, gid)).collect::<Result<Vec<_>, _>>()?;
        match gids.len() {
            ..=AuthSys::MAX_GIDS => Ok(Self { uid, gid, gids }),
            many => Err(ApiFailure::argument(format_args!("{name}: {many} groups exceed {}", AuthSys::MAX_GIDS))),
        }
    }

    /// The credential of one client.
    ///
    /// Each client has its own stamp, so that servers tell its retransmitted calls from those of other clients.
    fn credential(&self) -> Credential {
        // `RandomState` has a random seed, so the stamps of a process's clients differ.
        let stamp = RandomState::new().hash_one(std::process::id()) as u32;
        let host = rustix::system::uname();
        let sys = AuthSys::new(stamp, host.nodename().to_bytes(), self.uid, self.gid);
        // There is room for the longest name, and for all groups.
        Credential::stamped(sys, &self.gids).unwrap_or_default()
    }
}

/// Parses `ID:KEY`, with the key in hexadecimal digits.
fn host_key(name: &str, text: &str) -> Result<AuthPolicy, ApiFailure> {
    let wrong = || ApiFailure::argument(format_args!("{name}: expected ID:KEY, with the key in hexadecimal digits"));
    let (id, key) = text.split_once(':').ok_or_else(wrong)?;
    let digits = |at: usize| key.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(wrong);
    let key = (0..key.len()).step_by(2).map(digits).collect::<Result<Vec<u8>, ApiFailure>>()?;
    let key = PreSharedKey::new(id, &key).map_err(|error| ApiFailure::argument(format_args!("{name}: {error}")))?;
    Ok(AuthPolicy::Required(Arc::new(key)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::services::ProgramVersion;

    fn refused(name: &str, value: &str) -> String {
        let failure = Knobs::default().set(name, value).expect_err(name);
        assert_eq!(failure.code(), Errno::INVAL);
        failure.text().to_owned()
    }

    #[test]
    fn an_unknown_knob_is_named_as_it_was_written() {
        for (name, in_c) in [("wire.host_auth", "wire.host_key"), ("memory.arenas", "rpcrdma_config_arena")] {
            let text = refused(name, "1");
            assert!(text.starts_with(&format!("{name}: no such knob (in C: {in_c})")), "{text}");
        }
        assert!(refused("wire.colour", "1").starts_with("wire.colour: no such knob: wire has "));
    }

    #[test]
    fn an_out_of_range_value_is_refused_when_set() {
        let (many, long) = (format!("0:0:{}", ["1"; 17].join(",")), "/".repeat(108));
        for (name, value, text) in [
            (
                "memory.budget",
                "256TiB",
                "memory.budget: invalid value `281474976710656`: expected 0 to 140737488355328",
            ),
            (
                "memory.bulk_buffers",
                "[[1073741824, 16777216]]",
                "memory.bulk_buffers: invalid value `18014398509481984 bytes in all`",
            ),
            (
                "memory.receives",
                "99999999999999999999",
                "memory.receives: invalid value `99999999999999999999`: expected 256 to 1048576",
            ),
            ("memory.numa_node", "1024", "memory.numa_node: invalid value `1024`: expected 0 to 1023"),
            ("limits.credits", "5000000000", "limits.credits: invalid value `5000000000`: expected 4 to 32767"),
            ("limits.credits", "-1", "limits.credits: invalid value `-1`: expected 4 to 32767"),
            (
                "limits.max_deferred",
                "4294967296",
                "limits.max_deferred: invalid value `4294967296`: expected a whole number, 0 to 4294967295",
            ),
            ("poll.core", "1024", "poll.core: invalid value `1024`: expected 0 to 1023"),
            ("device.gid_index", "256", "device.gid_index: invalid value `256`: expected 0 to 255"),
            (
                "server.workers",
                "99999999999999999999",
                "server.workers: invalid value `99999999999999999999`: expected a whole number, at",
            ),
            (
                "client.auth_sys",
                "4294967296:0",
                "client.auth_sys: invalid value `4294967296`: expected a whole number, at most 4294967295",
            ),
            ("client.auth_sys", &many, "client.auth_sys: 17 groups exceed 16"),
            ("server.stats", &long, "server.stats: path of 108 bytes exceeds 107"),
        ] {
            assert!(refused(name, value).starts_with(text), "{name}: {}", refused(name, value));
        }
        assert!(Knobs::default().set("server.stats", &long[1..]).is_ok());
    }

    #[test]
    fn knobs_of_c_may_be_quoted_and_unset() {
        let mut knobs = Knobs::default();
        assert!(knobs.set("server.stats", "\"/run/stats\"").is_ok());
        assert_eq!(knobs.extra.stats.as_deref(), Some(Path::new("/run/stats")));
        let key = format!("me:{}", "07".repeat(32));
        for (name, value) in [("server.cores", "0-1"), ("client.auth_sys", "1:2"), ("wire.host_key", &key)] {
            assert!(knobs.set(name, &format!("\"{value}\"")).is_ok(), "{name}");
        }
        for name in ["server.stats", "server.cores", "client.auth_sys", "wire.host_key", "server.shards"] {
            assert!(knobs.set(name, "unset").is_ok() && knobs.set(name, "\"unset\"").is_ok(), "{name}");
        }
        let ExtraKnobs { shards, cores, stats, user, host_auth, .. } = &knobs.extra;
        assert!(shards.is_none() && cores.is_none() && stats.is_none() && user.is_none());
        assert!(matches!(host_auth, AuthPolicy::Off));
    }

    #[test]
    fn an_error_begins_with_the_knob_that_was_set() {
        for (name, value) in [
            ("nothing", "1"),
            ("wire.revision", "1"),
            ("debug.nothing", "1"),
            ("server.cores", "x"),
            ("server.stats", &"/".repeat(108)),
            ("client.auth_sys", "0"),
            ("wire.host_key", "me"),
            ("poll.idle", "never"),
            // The text names `memory.receives`, which is too small.
            ("limits.credits", "32767"),
        ] {
            let text = refused(name, value);
            assert!(text.starts_with(&format!("{name}: ")), "{text}");
        }
    }

    #[test]
    fn a_host_key_and_version_1_are_refused_in_either_order() {
        let key = format!("me:{}", "07".repeat(32));
        let mut knobs = Knobs::default();
        assert!(knobs.set("wire.host_key", &key).is_ok());
        let text = "wire.credit_mode: invalid value `v1`: expected a mode of version 2, because wire.host_key is set \
                    and version 1 has no host authentication; or no wire.host_key";
        let refusal = knobs.set("wire.credit_mode", "v1").expect_err("a key is set");
        assert_eq!((refusal.code(), refusal.text()), (Errno::INVAL, text));
        // Other knobs of the group leave the key as it is.
        assert!(knobs.set("wire.receive_size", "8192").is_ok());
        assert!(knobs.set("wire.credit_mode", "v1").is_err() && knobs.client(1, 1).is_ok());

        let mut knobs = Knobs::default();
        assert!(knobs.set("wire.credit_mode", "v1").is_ok());
        let refusal = knobs.set("wire.host_key", &key).expect_err("version 1 is set");
        assert!(refusal.text().starts_with("wire.host_key: invalid wire.credit_mode `v1`: "), "{}", refusal.text());
        assert!(matches!(knobs.client(1, 1).map(|config| config.shard.wire.host_auth), Ok(AuthPolicy::Off)));

        let file = format!("[wire]\nhost_key = \"{key}\"\ncredit_mode = \"v1\"\n");
        let (path, result) = loaded(file.as_bytes(), 0o600);
        let text = result.err().expect("the file contradicts itself");
        assert!(text.starts_with(&format!("{path}: wire.credit_mode: invalid value `v1`")), "{text}");
    }

    #[test]
    fn a_file_that_contradicts_an_earlier_setting_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("a path").join("key.toml");
        fs::write(&path, format!("[wire]\nhost_key = \"me:{}\"\n", "07".repeat(32))).expect("space");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("our file");
        let mut knobs = Knobs::default();
        assert!(knobs.set("wire.credit_mode", "v1").is_ok());
        let refusal = knobs.load(&path).expect_err("version 1 is set");
        assert!(refusal.text().starts_with(&format!("{}: wire.credit_mode", path.display())), "{}", refusal.text());
        assert!(matches!(knobs.extra.host_auth, AuthPolicy::Off));
    }

    #[test]
    fn a_budget_that_is_removed_leaves_the_defaults() {
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
        let mut services = ServiceTable::default();
        assert!(services.add(ProgramVersion { program: 0x2000_0001, version: 3 }, &entry).is_ok());
        let failure = Knobs::default().server(1, &services).expect_err("no workers");
        let text = "procedure 7 of program 0x20000001, version 3 has RPCRDMA_ON_WORKERS, but server.workers is 0: \
                    set it to 1 or more";
        assert_eq!(failure.text(), text);
    }

    #[test]
    fn cores_are_numbers_and_ranges() {
        for (text, cores) in [("0,2", &[0, 2][..]), ("3,0-1", &[3, 0, 1]), ("1023", &[1023])] {
            let mut knobs = Knobs::default();
            assert!(knobs.set("server.cores", text).is_ok(), "{text}");
            assert_eq!(knobs.extra.cores.as_deref(), Some(cores), "{text}");
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
            (
                &b"[server]\nworkers = \"two\"\n"[..],
                "server.workers: invalid value `two`: expected a whole number, at most 1024",
            ),
            (b"[server]\nshards = 0\n", "server.shards: invalid value `0`: expected 1 to 1024"),
            (b"[wire]\nhost_key = \"me\"\n", "wire.host_key: expected ID:KEY, with the key in hexadecimal digits"),
            (b"[limits]\n# \xff\n", "line 2: not UTF-8"),
            ("#".repeat(5 << 20).as_bytes(), "file of 5242880 bytes exceeds limit 4194304"),
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
        assert!(matches!(knobs.extra.host_auth, AuthPolicy::Required(_)));
        assert!(loaded(b"[limits]\ncredits = 32\n", 0o644).1.is_ok(), "the file has no key");
    }

    #[test]
    fn a_file_that_is_refused_changes_nothing() {
        let mut knobs = Knobs::default();
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("knobs.toml");
        fs::write(&path, "[server]\nworkers = 7\n[limits]\ncredits = 32\nmax_calls = 0\n").expect("space");
        assert!(knobs.load(&path).is_err());
        assert_eq!((knobs.extra.workers, knobs.applied.0.limits.credits), (0, Config::default().limits.credits));
    }

    #[test]
    fn a_file_that_cannot_be_read_has_the_code_of_its_system_call() {
        for (path, code) in [("/", Errno::ISDIR), ("/nowhere", Errno::NOENT), ("/dev/null/x", Errno::NOTDIR)] {
            let failure = Knobs::default().load(Path::new(path)).expect_err(path);
            assert_eq!(failure.code(), code, "{path}: {}", failure.text());
        }
    }
}
