//! Concurrent clients of a store on one tokio runtime.
//!
//! Each client has its own connection and keys.
//!
//! ```text
//! kv-client ADDRESS fill SEED      puts values, and verifies them
//! kv-client ADDRESS verify SEED    verifies the values
//! kv-client ADDRESS forever SEED   puts values until it or the server is killed; prints `begun` after the first ones
//! ```

use std::error::Error;
use std::process::ExitCode;

use rpcrdma::Address;
use rpcrdma::client::Endpoint;
use rpcrdma_embed::client::{Result, Store, endpoint};

/// Number of clients in one process.
const CLIENTS: u32 = 6;
/// Number of keys of each client.
const KEYS: u32 = 40;

/// Derives the value of a key, which is unique and of varying length.
fn value(seed: u32, client: u32, key: u32) -> Vec<u8> {
    let mut state = u64::from(seed) << 40 | u64::from(client) << 20 | u64::from(key);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let (max_len, len) = ([0, 200, 5000, 16 << 10, 256 << 10][key as usize % 5], next());
    let len = if max_len == 0 { 0 } else { len % max_len + 1 };
    (0..len).map(|_| next() as u8).collect()
}

fn name(seed: u32, client: u32, key: u32) -> String {
    format!("{seed}/{client}/{key:04}")
}

/// False for every seventh key, which is deleted.
fn is_kept(key: u32) -> bool {
    key % 7 != 3
}

async fn fill(mut store: Store, seed: u32, client: u32) -> Result<()> {
    for key in 0..KEYS {
        // The second put replaces the first.
        store.put(&name(seed, client, key), &value(seed, client, key + 1)).await?;
        store.put(&name(seed, client, key), &value(seed, client, key)).await?;
        if !is_kept(key) {
            assert!(store.delete(&name(seed, client, key)).await?);
            assert!(!store.delete(&name(seed, client, key)).await?);
        }
    }
    verify(store, seed, client).await
}

async fn verify(mut store: Store, seed: u32, client: u32) -> Result<()> {
    // Another task lists the keys concurrently, on the same connection.
    let mut other = store.clone();
    let names = tokio::spawn(async move { other.list(&format!("{seed}/{client}/")).await });
    for key in 0..KEYS {
        let expected = is_kept(key).then(|| value(seed, client, key));
        let found = store.get(&name(seed, client, key)).await?;
        if found != expected {
            let (found, expected) = (found.map(|value| value.len()), expected.map(|value| value.len()));
            return Err(format!("{}: {found:?} bytes, expected {expected:?}", name(seed, client, key)).into());
        }
    }
    let expected: Vec<_> = (0..KEYS).filter(|&key| is_kept(key)).map(|key| name(seed, client, key)).collect();
    if names.await?? != expected {
        return Err("the listed keys differ from the stored ones".into());
    }
    Ok(())
}

async fn put_forever(mut store: Store, seed: u32, client: u32) -> Result<()> {
    for key in 0.. {
        store.put(&name(seed, client, key % KEYS), &value(seed, client, key)).await?;
        if key == 10 && client == 0 {
            println!("begun");
        }
    }
    Ok(())
}

async fn run(endpoint: &Endpoint, address: &Address, what: &str, seed: u32) -> Result<()> {
    let mut tasks = Vec::new();
    for client in 0..CLIENTS {
        let store = Store::connect(endpoint, address).await?;
        tasks.push(match what {
            "fill" => tokio::spawn(fill(store, seed, client)),
            "verify" => tokio::spawn(verify(store, seed, client)),
            "forever" => tokio::spawn(put_forever(store, seed, client)),
            _ => return Err(format!("invalid command `{what}`: expected fill, verify or forever").into()),
        });
    }
    for task in tasks {
        task.await??;
    }
    Ok(())
}

fn main() -> std::result::Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().collect();
    let [_, address, what, seed] = &arguments[..] else {
        return Err("usage: kv-client ADDRESS fill|verify|forever SEED".into());
    };
    let (address, seed): (Address, u32) = (address.parse()?, seed.parse()?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    let outcome = runtime.block_on(async {
        let endpoint = endpoint(&address).await?;
        let outcome = run(&endpoint, &address, what, seed).await;
        // The drop of the endpoint waits for a thread, so the endpoint is returned and dropped outside of the runtime.
        Ok::<_, Box<dyn Error + Send + Sync>>((endpoint, outcome))
    });
    match outcome.and_then(|(_endpoint, outcome)| outcome) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("kv-client: {error}");
            Ok(ExitCode::FAILURE)
        }
    }
}
