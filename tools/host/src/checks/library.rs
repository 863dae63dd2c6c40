//! The installed C library.

use crate::check::{Status, Verdict};
use crate::scene::Scene;
use crate::tree::Unseen;

/// Its name for the dynamic linker.
const SONAME: &str = "librpcrdma.so.0";
/// The dynamic linker's list of libraries, made by ldconfig.
const CACHE: &str = "/etc/ld.so.cache";
/// Where packages and `cargo cinstall` put it, below a directory of the architecture or not.
const DIRECTORIES: [&str; 4] = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64"];

checks! {
    "library", Library: library,
        wanted "librpcrdma.so.0 of this program's version, or none",
        why "C programs load it. With another version their settings and statistics may differ from these tools' \
              descriptions; the protocol is the same";
}

fn library(scene: &Scene) -> Result<Verdict, Unseen> {
    let tree = scene.tree();
    // Binary, with the paths as strings that end with a zero byte.
    let cache = tree.text(CACHE)?;
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
                    scene.as_root("tee /etc/ld.so.conf.d/rpcrdma.conf"),
                    scene.as_root("ldconfig")
                );
                Verdict::fault(Status::Warning, format!("{directory}/{SONAME} is not in {CACHE}"), fix)
            }
        });
    };
    // The file's name has the version: librpcrdma.so.0.1.0.
    let file = tree.link(path).ok_or_else(|| Unseen::new(path, "no link to a file librpcrdma.so.VERSION"))?;
    let version = file.strip_prefix("librpcrdma.so.").unwrap_or(&file);
    let own = env!("CARGO_PKG_VERSION");
    let fix = scene.as_root("apt-get install librpcrdma0 rpcrdma-tools");
    let fix = format!("{fix}\n# without packages: build library and programs from one commit, then ldconfig");
    Ok(Verdict::if_good(version == own, format!("{version}: {path}; this program is {own}"), Status::Warning, fix))
}
