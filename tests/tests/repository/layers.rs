//! Order of the layers, and the files that may have `unsafe` code.

use std::collections::BTreeSet;

use rpcrdma_tests::source::{code, code_without_tests, files, is_test, paths, read, words};

/// A layer of the engine.
struct Layer {
    name: &'static str,
    /// Files and directories of the layer. A directory ends with a slash. The longest match applies.
    places: &'static [&'static str],
    /// Other layers that this layer uses. The test fails if one of them is not used.
    uses: &'static [&'static str],
    /// Whether clocks, threads and atomics are forbidden.
    pure: bool,
    /// Dependencies that the layer may use.
    crates: &'static [&'static str],
}

const MEMPOOL: &str = "rpcrdma_mempool";
const XDR: &str = "rpcrdma_xdr";

/// All layers, lowest first: a layer may use only entries that precede it. Cargo ensures that `rpcrdma-proto` and
/// `rpcrdma-fabric` use neither each other nor the engine.
const LAYERS: &[Layer] = &[
    Layer {
        name: "wire",
        places: &["engine/proto/src/wire/"],
        uses: &[],
        pure: true,
        crates: &[XDR, "serde", "thiserror"],
    },
    Layer {
        name: "auth",
        places: &["engine/proto/src/auth/"],
        uses: &[],
        pure: false,
        crates: &["getrandom", "hmac", "sha2", "thiserror"],
    },
    Layer {
        name: "binding",
        places: &["engine/proto/src/binding.rs", "engine/proto/src/binding/"],
        uses: &["wire"],
        pure: true,
        crates: &["thiserror"],
    },
    Layer {
        name: "proto",
        places: &["engine/proto/src/"],
        uses: &["auth", "binding", "wire"],
        pure: true,
        crates: &["arrayvec", "serde", "thiserror"],
    },
    Layer {
        name: "fabric",
        places: &["engine/fabric/src/"],
        uses: &[],
        pure: false,
        crates: &[
            MEMPOOL,
            "arrayvec",
            "bytesize",
            "crc32c",
            "humantime",
            "libc",
            "log",
            "nix",
            "rdma_sys",
            "rustix",
            "serde",
            "thiserror",
        ],
    },
    Layer {
        name: "start_error",
        places: &["engine/src/start_error.rs"],
        uses: &["fabric"],
        pure: true,
        crates: &[MEMPOOL, "thiserror"],
    },
    Layer {
        name: "cross_thread",
        places: &["engine/src/cross_thread/"],
        uses: &["fabric", "start_error"],
        pure: false,
        crates: &[MEMPOOL, "core_affinity", "crossbeam_utils", "log", "loom", "rustix", "serde", "thiserror"],
    },
    Layer {
        name: "stats",
        places: &["engine/src/stats/"],
        uses: &["fabric", "proto"],
        pure: true,
        crates: &[MEMPOOL, "hdrhistogram", "serde"],
    },
    Layer {
        name: "service",
        places: &["engine/src/service/"],
        uses: &["binding", "fabric", "cross_thread", "proto", "start_error", "stats", "wire"],
        pure: false,
        crates: &[MEMPOOL, XDR, "arrayvec", "rustix", "sha2", "thiserror"],
    },
    Layer {
        name: "config",
        places: &["engine/src/config/"],
        uses: &["auth", "fabric", "cross_thread", "proto", "start_error", "wire"],
        pure: true,
        crates: &[MEMPOOL, "serde", "thiserror"],
    },
    Layer {
        name: "address",
        places: &["engine/src/address.rs"],
        uses: &["config", "fabric"],
        pure: true,
        crates: &["thiserror"],
    },
    Layer {
        name: "shard",
        places: &["engine/src/shard/"],
        uses: &["auth", "config", "fabric", "cross_thread", "proto", "service", "start_error", "stats", "wire"],
        pure: false,
        crates: &[MEMPOOL, XDR, "arrayvec", "futures_util", "log", "rustix", "thiserror"],
    },
    Layer {
        name: "client",
        places: &["engine/src/client/"],
        uses: &[
            "address",
            "binding",
            "config",
            "fabric",
            "cross_thread",
            "proto",
            "service",
            "shard",
            "start_error",
            "stats",
            "wire",
        ],
        pure: false,
        crates: &[MEMPOOL, "arrayvec", "log", "rustix", "thiserror"],
    },
    Layer {
        name: "server",
        places: &["engine/src/server/"],
        uses: &["address", "client", "config", "fabric", "cross_thread", "service", "shard", "start_error", "stats"],
        pure: false,
        crates: &[MEMPOOL, "log", "rustix", "serde_json", "thiserror"],
    },
    Layer {
        name: "typed",
        places: &["engine/src/typed/"],
        uses: &["binding", "client", "fabric", "proto", "service", "shard"],
        pure: false,
        crates: &[MEMPOOL, XDR, "arrayvec", "thiserror"],
    },
];

/// Source directories of the engine's crates. `engine/src/lib.rs` is in no layer, and may use all of them.
const CRATES: &[&str] = &["engine/proto/src/", "engine/fabric/src/", "engine/src/"];

/// Words that name a clock, a thread or an atomic.
const IMPURE: &[&str] = &["time", "Instant", "SystemTime", "thread", "thread_local", "sync", "atomic", "Arc", "Mutex"];

/// Source files that may have `unsafe` code. Test files may have it too, with a reason.
const UNSAFE: &[&str] = &[
    // The C interface, whose functions take pointers.
    "engine/capi/src/any.rs",
    "engine/capi/src/arguments.rs",
    "engine/capi/src/handle.rs",
    "engine/capi/src/interface/call.rs",
    "engine/capi/src/interface/client.rs",
    "engine/capi/src/interface/config.rs",
    "engine/capi/src/interface/general.rs",
    "engine/capi/src/interface/local_client.rs",
    "engine/capi/src/interface/memory.rs",
    "engine/capi/src/interface/mod.rs",
    "engine/capi/src/interface/reply.rs",
    "engine/capi/src/interface/server.rs",
    "engine/capi/src/interface/services.rs",
    "engine/capi/src/interface/threads.rs",
    "engine/capi/src/log.rs",
    "engine/capi/src/memory.rs",
    "engine/capi/src/peers.rs",
    "engine/capi/src/process.rs",
    "engine/capi/src/request.rs",
    "engine/capi/src/services.rs",
    "engine/examples/src/bin/own_memory.rs",
    "engine/fabric/src/iwarp/sys.rs",
    "engine/fabric/src/verbs/receives.rs",
    "engine/fabric/src/verbs/sys/cm.rs",
    "engine/fabric/src/verbs/sys/device.rs",
    "engine/fabric/src/verbs/sys/queue.rs",
    "engine/fabric/src/verbs/work_queues.rs",
    "engine/src/cross_thread/return_queue.rs",
    "engine/src/cross_thread/slot.rs",
    "engine/src/cross_thread/spsc.rs",
    "engine/src/service/writer.rs",
    "mempool/src/buf.rs",
    "mempool/src/core.rs",
    "mempool/src/external_memory.rs",
    "mempool/src/map.rs",
    "mempool/src/pool.rs",
    "mempool/src/prefetch.rs",
    "mempool/src/ring.rs",
    "mempool/src/shared.rs",
    "mempool/src/thread_pointer.rs",
    "tools/blockstore/src/sys.rs",
    "tools/nfs3d/src/sys.rs",
];

/// All Rust files of the repository.
fn sources() -> Vec<String> {
    let all: Vec<_> =
        ["bench", "engine", "mempool", "tests", "tools"].iter().flat_map(|crate_| files(crate_, ".rs")).collect();
    assert!(all.len() > 100, "expected more than 100 source files, found {}", all.len());
    all
}

/// The source files of the engine, without tests.
fn engine_sources() -> Vec<String> {
    let all = CRATES.iter().flat_map(|crate_| files(crate_.trim_end_matches('/'), ".rs"));
    let all: Vec<_> = all.filter(|path| !is_test(path) && path != "engine/src/lib.rs").collect();
    assert!(all.len() > 100, "expected more than 100 source files, found {}", all.len());
    all
}

/// The layer of a file of the engine.
fn layer_of(path: &str) -> Option<&'static Layer> {
    let longest_match = |layer: &'static Layer| {
        let matching =
            layer.places.iter().filter(|place| path == **place || place.ends_with('/') && path.starts_with(**place));
        matching.map(|place| (place.len(), layer)).max_by_key(|&(len, _)| len)
    };
    LAYERS.iter().filter_map(longest_match).max_by_key(|&(len, _)| len).map(|(_, layer)| layer)
}

/// Returns the source directory of the crate of a file, and the path of its module in the crate.
fn module_of(path: &str) -> (&'static str, Vec<&str>) {
    let crate_ = *CRATES.iter().find(|crate_| path.starts_with(**crate_)).expect("the file is in one of CRATES");
    let mut modules: Vec<&str> = path[crate_.len()..].trim_end_matches(".rs").split('/').collect();
    if ["mod", "lib"].contains(modules.last().unwrap_or(&"")) {
        modules.pop();
    }
    (crate_, modules)
}

/// Returns the layers that a file uses, each with the path that names it.
fn used_layers(path: &str, code: &str) -> Vec<(String, String)> {
    let (crate_, modules) = module_of(path);
    let mut found: Vec<(String, String)> = paths(code, "crate").into_iter().collect();
    // A path to the crate's root by way of `super`.
    let to_root = vec!["super"; modules.len()].join("::");
    if !to_root.is_empty() {
        found.extend(paths(code, &to_root).into_iter().filter(|(first, _)| first != "super" && first != "*"));
    }
    let resolve = |(first, second): (String, String)| {
        let named = format!("crate::{first}::{second}");
        // The engine's `lib.rs` re-exports lower layers as modules of the same names.
        let by_name = LAYERS.iter().find(|layer| layer.name == first && crate_ == "engine/src/");
        let places = [format!("{crate_}{first}/"), format!("{crate_}{first}.rs")];
        let found = by_name.or_else(|| places.iter().find_map(|place| layer_of(place)));
        (found.map_or(first, |layer| layer.name.to_owned()), named)
    };
    found.into_iter().map(resolve).collect()
}

#[test]
fn modules_use_only_lower_layers() {
    let mut wrong = Vec::new();
    let mut used = vec![BTreeSet::new(); LAYERS.len()];
    for path in engine_sources() {
        let Some(layer) = layer_of(&path) else {
            wrong.push(format!("{path} is in no layer of LAYERS"));
            continue;
        };
        let index =
            LAYERS.iter().position(|other| other.name == layer.name).expect("layer_of returns an entry of LAYERS");
        for (target, named) in used_layers(&path, &code_without_tests(&read(&path))) {
            if target == layer.name {
                continue;
            }
            if !layer.uses.contains(&target.as_str()) {
                wrong.push(format!("{path} names {named}: LAYERS does not let {} use {target}", layer.name));
            }
            used[index].insert(target);
        }
    }
    for (index, layer) in LAYERS.iter().enumerate() {
        for target in layer.uses {
            if !LAYERS[..index].iter().any(|lower| lower.name == *target) {
                wrong.push(format!("LAYERS lets {} use {target}, which does not precede it", layer.name));
            }
            if !used[index].contains(*target) {
                wrong.push(format!("LAYERS lets {} use {target}, which it does not use", layer.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn layers_use_only_their_listed_crates() {
    let manifests = ["engine", "engine/fabric", "engine/proto"].map(|crate_| read(format!("{crate_}/Cargo.toml")));
    let dependencies: BTreeSet<String> = manifests
        .iter()
        .flat_map(|manifest| manifest.lines())
        .filter_map(|line| line.split_once(".workspace").or_else(|| line.split_once(" = { workspace")))
        .map(|(name, _)| name.trim().replace('-', "_"))
        .filter(|name| !["version", "edition", "rust_version", "license", "include"].contains(&name.as_str()))
        // These crates are layers themselves.
        .filter(|name| !["rpcrdma_fabric", "rpcrdma_proto"].contains(&name.as_str()))
        .collect();
    assert!(dependencies.contains(MEMPOOL) && dependencies.contains("rustix"), "{dependencies:?}");
    let mut wrong = Vec::new();
    for path in engine_sources() {
        let Some(layer) = layer_of(&path) else { continue };
        let code = code_without_tests(&read(&path));
        for name in words(&code).filter(|word| dependencies.contains(*word)) {
            if !layer.crates.contains(&name) {
                wrong.push(format!("{path} names the crate {name}, which LAYERS does not list for {}", layer.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn pure_layers_use_no_clock_thread_or_atomic() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in engine_sources() {
        let Some(layer) = layer_of(&path) else { continue };
        if !layer.pure {
            continue;
        }
        seen += 1;
        // `Duration` does not read a clock.
        let code = code_without_tests(&read(&path)).replace("std::time::Duration", "");
        for word in words(&code).filter(|word| IMPURE.contains(word) || word.starts_with("Atomic")) {
            wrong.push(format!("{path} names {word}"));
        }
    }
    assert!(seen > 20, "expected more than 20 files of pure layers, found {seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_code_is_in_listed_files_only() {
    let mut wrong = Vec::new();
    let mut found = BTreeSet::new();
    for path in sources() {
        let code = code(&read(&path));
        if !words(&code).any(|word| word == "unsafe") {
            continue;
        }
        // `code` has emptied string literals, so the reason is an empty one here.
        let without_spaces: String = code.split_whitespace().collect();
        if is_test(&path) {
            if !without_spaces.contains("expect(unsafe_code,reason=\"\"") {
                wrong.push(format!("{path} needs expect(unsafe_code, reason = \"…\") for its unsafe code"));
            }
            continue;
        }
        if !UNSAFE.contains(&path.as_str()) {
            wrong.push(format!("{path} has unsafe code, but UNSAFE does not list it"));
        }
        if !without_spaces.starts_with("#![expect(unsafe_code,reason=\"\"") {
            wrong.push(format!("{path} does not start with #![expect(unsafe_code, reason = \"…\")]"));
        }
        found.insert(path);
    }
    for path in UNSAFE.iter().filter(|path| !found.contains(**path)) {
        wrong.push(format!("UNSAFE lists {path}, which has no unsafe code"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
