//! The control groups that this process is in.

use crate::tree::Tree;

/// Which of the kernel's two kinds a group is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// The groups that a controller has this process in.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    pub(crate) version: Version,
    /// Their directories, from its own group up to the topmost that can be seen.
    pub(crate) directories: Vec<String>,
}

/// Where one kind of groups, or one controller, is mounted.
struct Mount {
    /// The group that is seen there: a container's own, if it is not `/`.
    root: String,
    point: String,
}

impl Groups {
    /// Those of a controller; `None` where it is not mounted. Of the two kinds version 1 has it where both are mounted.
    pub(crate) fn of(tree: &Tree, controller: &str) -> Option<Self> {
        let mounts = tree.text("/proc/self/mountinfo").ok()?;
        let groups = tree.text("/proc/self/cgroup").ok()?;
        let path = |wanted: &dyn Fn(&str) -> bool| {
            groups.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let (controllers, path) = (parts.next()?, parts.next()?);
                wanted(controllers).then(|| path.to_owned())
            })
        };
        let first = mount(&mounts, "cgroup", |options| options.split(',').any(|word| word == controller));
        if let Some(mount) = first {
            let path = path(&|controllers| controllers.split(',').any(|word| word == controller))?;
            return Some(Self { version: Version::V1, directories: mount.directories(&path) });
        }
        let mount = mount(&mounts, "cgroup2", |_| true)?;
        let directories = mount.directories(&path(&str::is_empty)?);
        Some(Self { version: Version::V2, directories })
    }

    /// The topmost group, as far as it can be seen.
    pub(crate) fn top(&self) -> &str {
        self.directories.last().map_or("", String::as_str)
    }
}

/// The first mount of this type whose options are so.
fn mount(mounts: &str, fstype: &str, wanted: impl Fn(&str) -> bool) -> Option<Mount> {
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        if kind.next()? != fstype || !wanted(kind.nth(1)?) {
            return None;
        }
        let mut place = place.split(' ').skip(3);
        Some(Mount { root: place.next()?.to_owned(), point: place.next()?.to_owned() })
    })
}

impl Mount {
    /// From the group at this path upwards.
    fn directories(&self, path: &str) -> Vec<String> {
        let below = path.strip_prefix(self.root.as_str()).unwrap_or(path).trim_matches('/');
        // A group outside of what a container may see.
        let below = if below.split('/').any(|step| step == "..") { "" } else { below };
        let mut directories = vec![self.point.clone()];
        for step in below.split('/').filter(|step| !step.is_empty()) {
            directories.push(format!("{}/{step}", directories[directories.len() - 1]));
        }
        directories.reverse();
        directories
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_upwards() {
        let mount = |root: &str| Mount { root: root.to_owned(), point: "/m".to_owned() };
        assert_eq!(mount("/").directories("/a/b"), ["/m/a/b", "/m/a", "/m"]);
        assert_eq!(mount("/").directories("/"), ["/m"]);
        // A container without a namespace of its own: it is told the host's path, and sees its group alone.
        assert_eq!(mount("/docker/x").directories("/docker/x/y"), ["/m/y", "/m"]);
        assert_eq!(mount("/").directories("/../../a"), ["/m"]);
    }
}
