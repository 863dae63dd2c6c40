//! Files that were moved without the server: found in linear, bounded time, or reported as stale.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, openat};
use tempfile::TempDir;

use super::*;
use crate::export::{Export, Options};
use crate::handles::HandleSource;
use crate::identity::{Policy, Squash};
use crate::nfs::Call;
use crate::nfs3::{Diropargs3, Filename3, Remove3Args, Rename3Args, Rmdir3Args};

/// Names of an export, and its directory.
fn export() -> (Names, TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let root = openat(CWD, directory.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("it is there");
    let stat = fstat(&root).expect("attributes");
    (Names::new(root, &stat), directory)
}

/// Inode number and birth time.
fn identity(path: &Path) -> (u64, [u8; BIRTH]) {
    let file = open_path(CWD, path.as_os_str().as_encoded_bytes()).expect("it is there");
    (fstat(&file).expect("attributes").st_ino, Names::birth(file.as_fd()).expect("a birth"))
}

/// Nests directories from the inside out, because a path to the innermost one would be too long.
fn nest(top: &Path, depth: usize) {
    let (a, b) = (top.join("a"), top.join("b"));
    fs::create_dir(&a).expect("a directory");
    for _ in 1..depth {
        fs::create_dir(&b).expect("a directory");
        fs::rename(&a, b.join("a")).expect("renamed");
        fs::rename(&b, &a).expect("renamed");
    }
}

/// Removes nested directories.
fn unnest(top: &Path) {
    let (a, b) = (top.join("a"), top.join("b"));
    while fs::rename(a.join("a"), &b).is_ok() {
        fs::remove_dir(&a).expect("empty");
        fs::rename(&b, &a).expect("renamed");
    }
    fs::remove_dir(&a).expect("empty");
}

/// Waits until the clock of the file system's time stamps has advanced, so that a pass does not take earlier changes
/// for changes during the pass.
fn let_clock_advance() {
    thread::sleep(Duration::from_millis(25));
}

/// Repeats a request until there is a result. Returns it and the number of requests.
fn find(names: &Names, (ino, birth): (u64, [u8; BIRTH])) -> (Outcome<u64>, usize) {
    let_clock_advance();
    for requests in 1.. {
        let found = names.find(ino, &birth).map(|file| fstat(&file).expect("attributes").st_ino);
        if found != Err(Nfsstat3::ErrJukebox) {
            return (found, requests);
        }
        assert!(requests < 10_000, "the search does not end");
        lock(&names.search).end_pause();
    }
    unreachable!()
}

#[test]
fn a_chain_of_directories_is_searched_in_linear_time() {
    let (names, directory) = export();
    nest(directory.path(), DEPTH);
    let gone = directory.path().join("gone");
    fs::write(&gone, "").expect("a file");
    let identity = identity(&gone);
    fs::remove_file(&gone).expect("it is there");
    assert_eq!(find(&names, identity).0, Err(Nfsstat3::ErrStale));
    let search = lock(&names.search);
    assert_eq!((search.begun, search.visited), (1, DEPTH as u64));
    assert_eq!(
        search.opened,
        2 * (DEPTH as u64 + 1),
        "each directory is opened once on the way down and once on the way up"
    );
    drop(search);
    unnest(directory.path());
}

/// A call for a file at a great depth would otherwise take milliseconds.
#[test]
fn files_below_more_directories_than_the_limit_are_stale() {
    let (names, directory) = export();
    nest(directory.path(), DEPTH + 1);
    for (depth, expected) in [(DEPTH, Ok(())), (DEPTH + 1, Err(Nfsstat3::ErrStale))] {
        let identity = identity(&directory.path().join("a/".repeat(depth)));
        assert_eq!(find(&names, identity).0.map(drop), expected, "depth {depth}");
    }
    unnest(directory.path());
}

#[test]
fn one_call_visits_a_bounded_part_and_later_calls_continue() {
    for moved in [true, false] {
        let (names, directory) = export();
        lock(&names.search).names_per_call = 10;
        let dirs: Vec<_> = (0..20).map(|n| directory.path().join(format!("dir-{n}"))).collect();
        for dir in &dirs {
            fs::create_dir(dir).expect("a directory");
            (0..40).for_each(|n| fs::write(dir.join(format!("file-{n}")), "").expect("a file"));
        }
        let file = dirs[7].join("file-3");
        let identity = identity(&file);
        names.learn(names.root_ino, b"before", identity.0);
        match moved {
            true => fs::rename(&file, dirs[13].join("moved")).expect("renamed"),
            false => fs::remove_file(&file).expect("it is there"),
        }
        let (found, asked) = find(&names, identity);
        assert_eq!(found, if moved { Ok(identity.0) } else { Err(Nfsstat3::ErrStale) });
        let search = lock(&names.search);
        assert_eq!(search.begun, 1, "one pass");
        // There are 820 names, or 819 without the file. Each directory also takes two steps, and the root takes one.
        let parts = search.visited as usize / 10;
        assert!(asked > parts && (moved || asked >= 86), "{asked} requests for {} names", search.visited);
        assert!(moved || search.visited == 819, "each name once: {}", search.visited);
    }
}

/// The first pass that begins after a request decides about it.
#[test]
fn a_pass_that_began_before_a_request_does_not_make_its_file_stale() {
    let (names, directory) = export();
    lock(&names.search).names_per_call = 1;
    let (first, second) = (directory.path().join("first"), directory.path().join("second"));
    for dir in [&first, &second] {
        fs::create_dir(dir).expect("a directory");
        (0..10).for_each(|n| fs::write(dir.join(format!("{n}")), "").expect("a file"));
    }
    let absent = directory.path().join("absent");
    fs::write(&absent, "").expect("a file");
    let absent = (identity(&absent), fs::remove_file(&absent)).0;
    // The pass has visited one of the two directories.
    while lock(&names.search).visited < 7 {
        assert_eq!(names.find(absent.0, &absent.1).err(), Some(Nfsstat3::ErrJukebox));
    }
    let visited = [&first, &second].into_iter().find(|dir| lock(&names.search).has_entered(dir)).expect("one");
    // A file of the other directory moves into the visited one, so the pass sees neither of its names.
    let other = if visited == &first { &second } else { &first };
    let moves = identity(&other.join("5"));
    fs::rename(other.join("5"), visited.join("moved")).expect("renamed");
    lock(&names.search).names_per_call = usize::MAX;
    let (found, asked) = find(&names, moves);
    assert_eq!((found, lock(&names.search).begun > 1 || asked == 1), (Ok(moves.0), true));
    assert_eq!(find(&names, absent).0, Err(Nfsstat3::ErrStale));
}

/// A move from a directory that the pass has not visited to one that it has hides a file from the pass.
#[test]
fn a_file_that_moves_during_a_pass_does_not_become_stale() {
    for moves_directory in [false, true] {
        let (order, directory) = export();
        let dirs = ["first", "second"].map(|name| directory.path().join(name));
        for dir in &dirs {
            fs::create_dir(dir).expect("a directory");
            (0..10).for_each(|n| fs::write(dir.join(format!("{n}")), "").expect("a file"));
        }
        let_clock_advance();
        // One pass shows in which order the next one visits the directories.
        lock(&order.search).names_per_call = 1;
        let visited = loop {
            assert_eq!(order.find(1, &[0; BIRTH]).err(), Some(Nfsstat3::ErrJukebox));
            if let Some(visited) = dirs.iter().find(|dir| lock(&order.search).has_entered(dir)) {
                break visited;
            }
        };
        let other = dirs.iter().find(|dir| *dir != visited).expect("two directories");
        let names = Names::new(order.root, &rustix::fs::stat(directory.path()).expect("attributes"));
        lock(&names.search).names_per_call = 1;
        let (ino, birth) = identity(&other.join("5"));
        // The pass lists the first directory, its ten files, and the second directory.
        let is_at_move = |search: &Search| match moves_directory {
            true => search.visited == 12,
            false => search.has_entered(other),
        };
        while !is_at_move(&lock(&names.search)) {
            assert_eq!(names.find(ino, &birth).err(), Some(Nfsstat3::ErrJukebox));
        }
        match moves_directory {
            true => fs::rename(other, visited.join("moved")).expect("renamed"),
            false => fs::rename(other.join("5"), visited.join("moved")).expect("renamed"),
        }
        lock(&names.search).names_per_call = usize::MAX;
        assert_eq!(names.find(ino, &birth).err(), Some(Nfsstat3::ErrJukebox), "the pass has not found the file");
        assert_eq!(find(&names, (ino, birth)).0, Ok(ino));
        assert_eq!(lock(&names.search).begun, 2);
    }
}

/// A search for another file may list the name of a file that moves before a call follows the name.
#[test]
fn a_file_that_moves_after_another_search_has_listed_it_does_not_become_stale() {
    let (names, directory) = export();
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    let (ino, birth) = identity(&file);
    let_clock_advance();
    lock(&names.search).names_per_call = 0;
    for (ino, birth) in [(1, [0; BIRTH]), (ino, birth)] {
        assert_eq!(names.find(ino, &birth).err(), Some(Nfsstat3::ErrJukebox));
    }
    lock(&names.search).end_pause();
    lock(&names.search).names_per_call = usize::MAX;
    assert_eq!(find(&names, (1, [0; BIRTH])).0, Err(Nfsstat3::ErrStale));
    lock(&names.search).end_pause();
    assert_eq!(find(&names, (2, [0; BIRTH])).0, Err(Nfsstat3::ErrStale));
    fs::rename(&file, directory.path().join("moved")).expect("renamed");
    assert_eq!(find(&names, (ino, birth)).0, Ok(ino));
}

/// The client must learn of the removal, even if no pass is conclusive.
#[test]
fn a_removed_file_becomes_stale_in_a_tree_that_changes_all_the_time() {
    let (names, directory) = export();
    for pass in 1..=search::CHANGED_PASSES {
        lock(&names.search).names_per_call = 0;
        assert_eq!(names.find(1, &[0; BIRTH]).err(), Some(Nfsstat3::ErrJukebox));
        fs::write(directory.path().join(format!("{pass}")), "").expect("a file");
        lock(&names.search).names_per_call = usize::MAX;
        let last = pass == search::CHANGED_PASSES;
        let expected = if last { Nfsstat3::ErrStale } else { Nfsstat3::ErrJukebox };
        assert_eq!(names.find(1, &[0; BIRTH]).err(), Some(expected), "{pass}");
        assert_eq!(lock(&names.search).begun, pass);
        lock(&names.search).end_pause();
    }
}

/// File systems give the inode number of a removed file to a new one.
#[test]
fn a_handle_is_stale_immediately_if_its_inode_number_belongs_to_a_later_file() {
    let (names, directory) = export();
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    let (ino, birth) = identity(&file);
    let mut earlier = birth;
    earlier[7] ^= 1;
    assert_eq!(find(&names, (ino, earlier)), (Err(Nfsstat3::ErrStale), 1), "one pass finds the number");
    assert_eq!(find(&names, (ino, earlier)), (Err(Nfsstat3::ErrStale), 1));
    assert_eq!(names.known_count(), 1, "the name leads to the later file");
    assert_eq!(find(&names, (ino, birth)), (Ok(ino), 1));
    assert_eq!(lock(&names.search).begun, 1, "the later file is found by its known name");
}

/// A directory lists a mount point with the inode number of the directory below the mount, which cannot be opened.
#[test]
fn a_file_is_stale_if_its_listed_names_do_not_lead_to_it() {
    let (mut names, directory) = export();
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    // The file is on another device, as if it were mounted there.
    names.dev += 1;
    assert_eq!(find(&names, identity(&file)), (Err(Nfsstat3::ErrStale), 1));
    assert_eq!((lock(&names.search).begun, names.known_count()), (1, 0));
}

/// A pass that ended before the file was moved does not decide about the file.
#[test]
fn a_file_that_a_search_for_another_file_found_is_found_again_after_a_move() {
    let (names, directory) = export();
    let [gone, file, moved] = ["gone", "file", "moved"].map(|name| directory.path().join(name));
    fs::write(&gone, "").expect("a file");
    fs::write(&file, "").expect("a file");
    let (absent, moves) = (identity(&gone), identity(&file));
    fs::remove_file(&gone).expect("it is there");
    lock(&names.search).names_per_call = 0;
    assert_eq!(names.find(moves.0, &moves.1).err(), Some(Nfsstat3::ErrJukebox));
    lock(&names.search).names_per_call = usize::MAX;
    assert_eq!(find(&names, absent).0, Err(Nfsstat3::ErrStale));
    assert_eq!(find(&names, moves), (Ok(moves.0), 1), "the search for the absent file has found it");
    fs::rename(&file, &moved).expect("renamed");
    assert_eq!(find(&names, moves).0, Ok(moves.0));
}

/// A search does not delay calls that find their files by name.
#[test]
fn names_are_learned_and_followed_while_a_search_is_under_way() {
    let (names, directory) = export();
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    let (ino, birth) = identity(&file);
    let searching = lock(&names.search);
    thread::scope(|scope| {
        // This thread would hang if it needed the lock of the search.
        let other = scope.spawn(|| {
            names.learn(names.root_ino, b"file", ino);
            names.find(ino, &birth).map(|_| ())
        });
        assert_eq!(other.join().expect("no panic"), Ok(()));
    });
    drop(searching);
}

#[test]
fn names_of_removed_files_are_forgotten() {
    let (names, directory) = export();
    let (root, file) = (names.root_ino, directory.path().join("file"));
    let known = || names.known_count();
    for n in 0..100 {
        names.learn(root, format!("{n}").as_bytes(), n);
        names.forget(root, format!("{n}").as_bytes(), n, n % 2 == 0);
    }
    assert_eq!(known(), 0);
    // The removed name is not the known one. The known name stays, until the file's last name is removed.
    names.learn(root, b"known", 7);
    names.forget(root, b"other", 7, false);
    assert_eq!(known(), 1);
    names.forget(root, b"other", 7, true);
    assert_eq!(known(), 0);
    // A file that was removed without the server is forgotten when its name is followed.
    fs::write(&file, "").expect("a file");
    let gone = identity(&file);
    names.learn(root, b"file", gone.0);
    fs::remove_file(&file).expect("it is there");
    assert_eq!((known(), find(&names, gone).0, known()), (1, Err(Nfsstat3::ErrStale), 0));
}

/// REMOVE, RMDIR and RENAME forget the names that they remove.
#[test]
fn removal_by_clients_leaves_no_known_names() {
    let directory = tempfile::tempdir().expect("a directory");
    let policy = Policy::new(Squash::None);
    let (read_only, sync, handles, key, max_open_files) = (false, false, HandleSource::Names, [7; 32], 100);
    let export = Export::open(directory.path(), Options { read_only, sync, policy, handles, key, max_open_files });
    let export = export.expect("a directory");
    let (call, dir) = (Call { export: &export, user: policy.own(), host: None }, export.root.handle());
    let learn = |name: &str| drop(export.look_up(&export.root, name.as_bytes(), &call.user).expect("it is there"));
    for n in 0..20 {
        fs::write(directory.path().join("file"), "").expect("a file");
        fs::write(directory.path().join("other"), "").expect("a file");
        fs::create_dir(directory.path().join("dir")).expect("a directory");
        ["file", "other", "dir"].into_iter().for_each(learn);
        assert_eq!(export.handles.known_count(), 3);
        let at = |name: &'static str| Diropargs3 { dir, name: Filename3(name.as_bytes()) };
        assert!(call.rename(Rename3Args { from: at("file"), to: at("other") }).is_ok());
        assert_eq!(export.handles.known_count(), 2, "{n}: the replaced file has no name");
        assert!(call.remove(Remove3Args { object: at("other") }).is_ok());
        assert!(call.rmdir(Rmdir3Args { object: at("dir") }).is_ok());
        assert_eq!(export.handles.known_count(), 0, "{n}");
    }
}

/// A symbolic link may lead out of the export.
#[test]
fn paths_of_known_names_do_not_follow_symbolic_links() {
    let (names, directory) = export();
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("file"), "").expect("a file");
    std::os::unix::fs::symlink(outside.path(), directory.path().join("link")).expect("a link");
    let link = fs::symlink_metadata(directory.path().join("link")).expect("a link");
    let (ino, birth) = identity(&outside.path().join("file"));
    names.learn(names.root_ino, b"link", link.ino());
    names.learn(link.ino(), b"file", ino);
    assert_eq!(find(&names, (ino, birth)).0, Err(Nfsstat3::ErrStale));
    let (ino, birth) = identity(&directory.path().join("link"));
    assert_eq!(find(&names, (ino, birth)).0, Ok(link.ino()), "the link itself is a file");
}
