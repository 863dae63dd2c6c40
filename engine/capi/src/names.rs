//! Translation of Rust names in texts of the engine to names of the C interface.
#![forbid(unsafe_code)]

/// Names of Rust, and their counterparts in C. A longer name comes before its own beginning.
const NAMES: &[(&str, &str)] = &[
    ("`read_chunks` needs", "`max_read` needs"),
    ("`write_chunks` needs", "`max_write` needs"),
    (
        "Procedure::max_reply, or max_reply and max_inline_result in the placement file",
        "max_reply of rpcrdma_procedure",
    ),
    ("Procedure::max_reply", "max_reply of rpcrdma_procedure"),
    (
        "ClientConfig::credential at the client, or pass Procedure::cached or typed::ProgramCache a function that \
         identifies it",
        "client.auth_sys at the client",
    ),
    ("Procedure::cached", "RPCRDMA_CACHED"),
    ("Procedure::read_chunks", "read_chunks and max_read of rpcrdma_procedure"),
    ("Procedure::write_chunks", "write_chunks and max_write of rpcrdma_procedure"),
    ("Procedure::results_from_handler", "RPCRDMA_OWN_RESULTS"),
    ("Procedure::on_workers`, or `run` in the placement file, needs", "RPCRDMA_ON_WORKERS` needs"),
    ("Procedure::on_workers", "RPCRDMA_ON_WORKERS"),
    ("Procedure::deferred", "deferred of rpcrdma_procedure"),
    ("Procedure::one_way", "RPCRDMA_ONE_WAY"),
    ("Procedure::place_reads_in", "reads_into of rpcrdma_procedure"),
    ("Procedure::uncounted", "RPCRDMA_UNCOUNTED"),
    ("ServerCall::set_result", "rpcrdma_call_result"),
    ("ServerConfig::workers", "server.workers"),
    ("ServerConfig::stats", "server.stats"),
    ("ServerConfig::shards", "server.shards"),
    ("ServerConfig::cores", "server.cores"),
    ("ServerConfig::serves", "the addresses of rpcrdma_server_start"),
    ("WorkerConfig::count", "server.workers"),
    ("WorkerConfig::cores", "server.cores"),
    ("WorkerConfig::ring_capacity", "ring capacity of the workers"),
    ("ConnectParams::windows", "windows of the connection"),
    ("ClientCall::timeout", "timeout of rpcrdma_request"),
    ("ClientConfig::services", "rpcrdma_config_callbacks"),
    ("ClientConfig::program", "program of the connect"),
    ("ClientConfig::version", "version of the connect"),
    ("LocalClient::prepare", "rpcrdma_local_client_start"),
    ("Client::start, Client::alloc_async", "rpcrdma_client_start"),
    ("Client::start", "rpcrdma_client_start"),
    ("ArenaConfig::bytes", "len of rpcrdma_arena_new"),
    ("ArenaConfig::build", "memory of the library"),
    ("DuplicateRequestCacheConfig::entries", "RPCRDMA_CACHED"),
    ("Bulk::placed", "rpcrdma_call_write_chunk_filled"),
    ("Refusal::ProgramUnavailable", "RPCRDMA_PROG_UNAVAIL"),
    ("Refusal::ProcedureUnavailable", "RPCRDMA_PROC_UNAVAIL"),
    ("Refusal::GarbageArguments", "RPCRDMA_GARBAGE_ARGS"),
    ("Refusal::SystemError", "RPCRDMA_SYSTEM_ERR"),
    ("Refusal::NoReply", "RPCRDMA_NO_REPLY"),
    ("`close_reason` of the client", "rpcrdma_close_reason"),
    ("`alloc` of this connection", "rpcrdma_alloc with this client"),
    ("calls from `prepare` of this client", "calls are of this client"),
    ("DeferredCall", "deferred call"),
    ("wire.host_auth, or `--host-key FILE`", "wire.host_key"),
    ("wire.host_auth is required", "wire.host_key is set"),
    ("wire.host_auth off or optional", "no wire.host_key"),
    ("wire.host_auth", "wire.host_key"),
    ("openssl rand -out FILE 32", "openssl rand -hex 32"),
    ("build with `--features verbs`", "build with `engine/capi/install --features=verbs`"),
    ("memory.arenas", "rpcrdma_config_arena"),
];

/// Replaces the Rust names in a text by C names.
#[cold]
pub(crate) fn to_c_names(text: String) -> String {
    let known = NAMES.iter().filter(|(rust, _)| text.contains(rust));
    known.fold(text.clone(), |text, (rust, c)| text.replace(rust, c))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn rust_names_in_texts_are_replaced_by_c_names() {
        let text = "no reply (Procedure::max_reply); use ServerCall::set_result (memory.arenas)";
        let c = "no reply (max_reply of rpcrdma_procedure); use rpcrdma_call_result (rpcrdma_config_arena)";
        assert_eq!(to_c_names(text.to_owned()), c);
        assert_eq!(to_c_names("`read_chunks` needs buffers".to_owned()), "`max_read` needs buffers");
    }

    /// The string literals of a source file, without those of its tests.
    fn literals(source: &str) -> Vec<String> {
        let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
        // A backslash at the end of a line joins the next one.
        let joined = lines.map(str::trim_start).map(|line| match line.strip_suffix('\\') {
            Some(begun) => begun.to_owned(),
            None => format!("{line}\n"),
        });
        let source = joined.collect::<String>().replace("'\"'", "").replace("\\\"", "'");
        source.split('"').skip(1).step_by(2).map(str::to_owned).collect()
    }

    /// Whether a text names a path of Rust, a command-line option or a placement file, which a program in C lacks.
    fn has_rust_name(text: &str) -> bool {
        has_path(text) || has_option(text) || text.contains("placement file")
    }

    /// Whether a text has a path of Rust, such as `Procedure::max_reply`.
    fn has_path(text: &str) -> bool {
        text.match_indices("::").any(|(at, _)| {
            let before = text[..at].chars().rev().take_while(char::is_ascii_alphanumeric).last();
            let after = text[at + 2..].chars().next();
            before.is_some_and(|first| first.is_ascii_uppercase())
                && after.is_some_and(|next| next.is_ascii_lowercase())
        })
    }

    /// Whether a text has an option such as `--host-key FILE` without its command in the same backticks.
    fn has_option(text: &str) -> bool {
        text.split('`').enumerate().any(|(index, part)| {
            let is_code = index % 2 == 1;
            part.match_indices("--").any(|(at, _)| {
                let (before, after) = (&part[..at], &part[at + 2..]);
                after.starts_with(|next: char| next.is_ascii_lowercase())
                    && !before.ends_with('-')
                    && (!is_code || before.trim().is_empty())
            })
        })
    }

    #[test]
    fn options_are_found_unless_their_command_is_named() {
        for text in ["or `--host-key FILE`)", "(--host-key FILE)", "--verbose", "see `a`, or `--host-key`"] {
            assert!(has_option(text), "{text}");
        }
        for text in ["see `numactl --hardware`", "`prlimit --pid $$ --memlock=1`", "-----begin", "a -- b", "`a` --"] {
            assert!(!has_option(text), "{text}");
        }
    }

    fn check(directory: &Path, found: &mut Vec<String>, text_count: &mut usize) {
        for entry in fs::read_dir(directory).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("tests") {
                check(&path, found, text_count);
            } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
                let literals = literals(&fs::read_to_string(&path).expect("a source file"));
                for text in literals.into_iter().filter(|text| has_rust_name(text)) {
                    *text_count += 1;
                    if has_rust_name(&to_c_names(text.clone())) {
                        found.push(format!("{}: {text}", path.display()));
                    }
                }
            }
        }
    }

    #[test]
    fn no_text_of_the_engine_names_an_item_of_rust_or_an_option() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        if !root.join("engine/proto").is_dir() {
            // The published package has no sources of the engine.
            return;
        }
        let (mut found, mut text_count) = (Vec::new(), 0);
        for crate_of in
            ["engine/src", "engine/proto/src", "engine/fabric/src", "mempool/src", "engine/capi/src/interface"]
        {
            check(&root.join(crate_of), &mut found, &mut text_count);
        }
        assert!(found.is_empty(), "add their counterparts in C to NAMES: {found:#?}");
        assert!(text_count > 20, "only {text_count} such texts were found");
    }
}
