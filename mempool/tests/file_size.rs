//! Too small a limit of file sizes. The test has its own binary, because the limit applies to the whole process.
#![cfg(not(loom))]

use rpcrdma_mempool::{ArenaConfig, MemError, PagePolicy, SharedMapping, exceeded_limit};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: u64 = 1 << 20;

/// A system call that exceeds the limit would end this process by SIGXFSZ.
#[test]
fn memory_beyond_rlimit_fsize_is_an_error_that_names_the_limit() {
    let hard = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: hard }).unwrap();
    let arena = |pages| ArenaConfig { bytes: 4 << 20, pages, ..ArenaConfig::default() }.build().map(drop);
    let assert_refused = |result: Result<(), MemError>| {
        let error = result.unwrap_err();
        let text = error.to_string();
        for part in ["ftruncate of 4194304 bytes failed", "RLIMIT_FSIZE is 1048576", "`ulimit -f unlimited`"] {
            assert!(text.contains(part), "{text:?} must contain {part:?}");
        }
    };
    assert_refused(arena(PagePolicy::Small));
    assert_refused(arena(PagePolicy::default()));
    assert_refused(SharedMapping::create(4 << 20, "ring").map(drop));
    // Memory up to the limit is allocated.
    drop(SharedMapping::create(LIMIT as usize, "ring").unwrap());
    ArenaConfig { bytes: LIMIT as usize, pages: PagePolicy::Small, ..ArenaConfig::default() }.build().unwrap();

    let text = exceeded_limit(&Errno::FBIG.into()).unwrap();
    assert!(text.contains("RLIMIT_FSIZE is 1048576 bytes") && text.contains("`ulimit -f"), "{text}");
    setrlimit(Resource::Fsize, Rlimit { current: hard, maximum: hard }).unwrap();
    assert_eq!(exceeded_limit(&Errno::FBIG.into()).is_some(), hard.is_some(), "the file system's own limit otherwise");
    let files = getrlimit(Resource::Nofile).current.unwrap();
    assert!(exceeded_limit(&Errno::MFILE.into()).unwrap().contains(&format!("RLIMIT_NOFILE is {files};")));
}
