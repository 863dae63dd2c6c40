//! Settings as Rust code, with names of `rpcrdma`, its `server` and `client`.

use super::knob::{Knob, class};
use super::settings::Settings;

/// Input of the code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Code<'a> {
    pub(super) settings: &'a Settings,
    /// The effective credit limit, if the settings have none.
    pub(super) credits: Option<u32>,
    /// Cores of the client, of the server, further ones.
    pub(super) cores: &'a [usize],
}

impl Code<'_> {
    /// Configuration of the server.
    pub(super) fn server(&self) -> String {
        let shards = self.settings.number(Knob::Shards);
        let workers = self.settings.number(Knob::Workers);
        let free = self.cores.get(1..).unwrap_or_default();
        let fields = self.fields(true);
        let mut lines = vec![format!("let mut shard = Config::default();\n{fields}ServerConfig {{\n    shard,")];
        lines.push(format!("    shards: {shards},"));
        if let Some(cores) = free.get(..shards) {
            lines.push(format!("    cores: Some(vec!{cores:?}),"));
        }
        if workers > 0 {
            let cores = free.get(shards..).and_then(|left| left.get(..workers));
            let cores = cores.map_or_else(String::new, |cores| format!("cores: Some(vec!{cores:?}), "));
            let idle = self.idle();
            lines.push(format!(
                "    workers: Some(WorkerConfig {{ count: {workers}, {cores}idle: {idle}, ..WorkerConfig::default() }}),"
            ));
        }
        lines.push("    ..ServerConfig::default()\n}".to_owned());
        lines.join("\n")
    }

    /// Changes to `shard`, the shard configuration of a client from `ClientConfig::new`.
    pub(super) fn client(&self) -> String {
        let core = self.cores.first().map_or_else(String::new, |core| format!("shard.poll.core = Some({core});\n"));
        format!("{core}{}", self.fields(false)).trim_end().to_owned()
    }

    fn idle(&self) -> &'static str {
        match self.settings.get(Knob::Idle) {
            Some("adaptive") => "IdlePolicy::default()",
            Some("event") => "IdlePolicy::Event",
            _ => "IdlePolicy::Poll",
        }
    }

    /// Assignments of the knobs of `Config` that differ from its default, and of those whose default in `rpcperf`
    /// differs.
    fn fields(&self, of_server: bool) -> String {
        let mut text = String::new();
        for knob in Knob::all() {
            let value = match knob {
                Knob::Shards | Knob::Workers => None,
                Knob::BulkBuffers if !of_server => None,
                Knob::Idle => Some(self.idle().to_owned()),
                Knob::Credits => self
                    .settings
                    .get(knob)
                    .map(str::to_owned)
                    .or_else(|| self.credits.map(|credits| credits.to_string())),
                Knob::Batch | Knob::CoalesceGrants => {
                    self.settings.get(knob).filter(|value| *value == "off").map(|_| "false".to_owned())
                }
                Knob::BulkBuffers => self.settings.get(knob).map(|value| {
                    let classes: Vec<(usize, usize)> = value.split('+').filter_map(class).collect();
                    format!("vec!{classes:?}")
                }),
                _ => self.settings.get(knob).filter(|value| knob.row().default != Some(*value)).map(str::to_owned),
            };
            if let Some(value) = value {
                let group = match knob {
                    Knob::Credits => "limits",
                    Knob::SmallBuffers | Knob::MessageBuffers | Knob::BulkBuffers => "memory",
                    Knob::ReceiveSize => "wire",
                    _ => "poll",
                };
                text += &format!("shard.{group}.{knob} = {value};\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma::client::ClientConfig;
    use rpcrdma::server::{ServerConfig, WorkerConfig};
    use rpcrdma::{Config, IdlePolicy};

    use super::*;

    /// The value of a block, and the text of its code.
    macro_rules! told {
        ($($code:tt)*) => {
            ({ $($code)* }, stringify!($($code)*))
        };
    }

    fn same(code: &str, text: &str) {
        let squeezed = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(squeezed(code), squeezed(text));
    }

    /// The printed code compiles: the fields exist, and the values have their types.
    #[test]
    fn the_code_is_code() {
        let every = "credits=128 batch=off coalesce_grants=off signal_every=4 receive_size=8192 idle=event \
                     small_buffers=512 message_buffers=300 bulk_buffers=64K:4+1M:2 shards=2 workers=1";
        let settings: Settings = every.parse().unwrap();
        assert_eq!(settings.to_string().split(' ').count(), Knob::all().count(), "every knob is in it");
        let code = Code { settings: &settings, credits: Some(64), cores: &[0, 1, 2, 3] };
        #[rustfmt::skip]
        let (server, text) = told! {
            let mut shard = Config::default();
            shard.limits.credits = 128;
            shard.poll.batch = false;
            shard.poll.coalesce_grants = false;
            shard.poll.signal_every = 4;
            shard.wire.receive_size = 8192;
            shard.poll.idle = IdlePolicy::Event;
            shard.memory.small_buffers = 512;
            shard.memory.message_buffers = 300;
            shard.memory.bulk_buffers = vec![(65536, 4), (1048576, 2)];
            ServerConfig {
            shard,
            shards: 2,
            cores: Some(vec![1, 2]),
            workers: Some(WorkerConfig {
                count: 1, cores: Some(vec![3]), idle: IdlePolicy::Event, ..WorkerConfig::default()
            }),
            ..ServerConfig::default()
            }
        };
        same(&code.server(), text);
        assert_eq!((server.shards, server.shard.limits.credits), (2, 128));
        let mut shard = ClientConfig::new(1, 1).shard;
        #[rustfmt::skip]
        let ((), text) = told! {
            shard.poll.core = Some(0);
            shard.limits.credits = 128;
            shard.poll.batch = false;
            shard.poll.coalesce_grants = false;
            shard.poll.signal_every = 4;
            shard.wire.receive_size = 8192;
            shard.poll.idle = IdlePolicy::Event;
            shard.memory.small_buffers = 512;
            shard.memory.message_buffers = 300;
        };
        same(&code.client(), text);
        assert_eq!(shard.poll.core, Some(0));
    }

    #[test]
    fn defaults_are_not_printed() {
        let settings = Settings::default();
        let code = Code { settings: &settings, credits: Some(64), cores: &[] };
        #[rustfmt::skip]
        let (server, text) = told! {
            let mut shard = Config::default();
            shard.limits.credits = 64;
            shard.poll.idle = IdlePolicy::Poll;
            ServerConfig {
                shard,
                shards: 1,
                ..ServerConfig::default()
            }
        };
        same(&code.server(), text);
        assert_eq!(server.cores, None);
        let adaptive: Settings = "idle=adaptive workers=2".parse().unwrap();
        let code = Code { settings: &adaptive, credits: None, cores: &[0, 1] }.server();
        assert!(
            code.contains("count: 2, idle: IdlePolicy::default(), ..") && code.contains("cores: Some(vec![1]),"),
            "{code}"
        );
    }

    /// The defaults of `rpcperf`'s options equal the defaults of the engine's fields.
    #[test]
    fn the_usual_values_are_the_engines() {
        let (config, server) = (Config::default(), ServerConfig::default());
        let number = |knob: Knob| knob.row().default.and_then(|value| value.parse::<usize>().ok()).unwrap();
        assert_eq!(number(Knob::SignalEvery), config.poll.signal_every as usize);
        assert_eq!(number(Knob::ReceiveSize), config.wire.receive_size);
        assert_eq!((number(Knob::Shards), number(Knob::Workers)), (server.shards, 0));
        assert!(config.poll.batch && config.poll.coalesce_grants && server.workers.is_none());
        assert_eq!((Knob::Batch.row().default, Knob::CoalesceGrants.row().default), (Some("on"), Some("on")));
    }
}
