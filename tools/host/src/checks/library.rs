//! The installed C library.

use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::tree::ReadError;

/// The library's name for the dynamic linker.
const SONAME: &str = "librpcrdma.so.0";
/// The dynamic linker's list of libraries, which ldconfig writes.
const CACHE: &str = "/etc/ld.so.cache";
/// Directories in which packages and `cargo cinstall` install it, possibly in a subdirectory of the architecture.
const DIRECTORIES: [&str; 4] = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64"];

checks! {
    "library", Library: library,
        wanted "librpcrdma.so.0 of this program's version, or no such library",
        why "C programs load this library; settings and statistics of another version may differ from those that these \
              tools describe, but the protocol is the same";
}

fn library(context: &CheckContext) -> Result<Verdict, ReadError> {
    let tree = context.tree();
    // The cache is binary and contains the paths as strings that end with a zero byte.
    let cache = tree.read_text(CACHE)?;
    let loaded = cache.split('\0').find(|text| text.ends_with(&format!("/{SONAME}")));
    let Some(path) = loaded else {
        let directories = DIRECTORIES
            .map(|directory| [directory.to_owned(), format!("{directory}/{}-linux-gnu", std::env::consts::ARCH)]);
        let unlisted = directories.iter().flatten().find(|directory| tree.exists(&format!("{directory}/{SONAME}")));
        return Ok(match unlisted {
            None => Verdict::ok("not installed; these programs do not need it"),
            Some(directory) => {
                let fix = format!(
                    "echo {directory} | {}\n{}",
                    context.as_root("tee /etc/ld.so.conf.d/rpcrdma.conf"),
                    context.as_root("ldconfig")
                );
                Verdict::fault(Status::Warning, format!("{directory}/{SONAME} is not in {CACHE}"), fix)
            }
        });
    };
    // The link's target has the version in its name: librpcrdma.so.0.1.0.
    let file =
        tree.read_link(path).ok_or_else(|| ReadError::new(path, "expected a link to a file librpcrdma.so.VERSION"))?;
    let version = file.strip_prefix("librpcrdma.so.").unwrap_or(&file);
    let own = env!("CARGO_PKG_VERSION");
    let fix = context.as_root("apt-get install librpcrdma0 rpcrdma-tools");
    let fix = format!("{fix}\n# without packages: build library and programs from one commit, then run ldconfig");
    Ok(Verdict::ok_if(version == own, format!("{version}: {path}; this program is {own}"), Status::Warning, fix))
}
