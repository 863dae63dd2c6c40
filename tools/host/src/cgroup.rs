//! Control groups of this process.

use crate::tree::Tree;

/// The kernel's two versions of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// The control groups of this process that a controller manages.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    pub(crate) version: Version,
    /// Their directories, from the process's own group up to the topmost visible one.
    pub(crate) directories: Vec<String>,
}

/// Mount point of one version of groups, or of one controller.
struct Mount {
    /// The group mounted there: `/`, or in a container without a cgroup namespace, the container's group.
    root: String,
    point: String,
}

impl Groups {
    /// Returns the groups of a controller, or `None` if it is not mounted. Version 1 is used if both are mounted.
    pub(crate) fn read(tree: &Tree, controller: &str) -> Option<Self> {
        let mounts = tree.read_text("/proc/self/mountinfo").ok()?;
        let groups = tree.read_text("/proc/self/cgroup").ok()?;
        let path = |wanted: &dyn Fn(&str) -> bool| {
            groups.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let (controllers, path) = (parts.next()?, parts.next()?);
                wanted(controllers).then(|| path.to_owned())
            })
        };
        let v1 = find_mount(&mounts, "cgroup", |options| options.split(',').any(|word| word == controller));
        if let Some(mount) = v1 {
            let path = path(&|controllers| controllers.split(',').any(|word| word == controller))?;
            return Some(Self { version: Version::V1, directories: mount.directories(&path) });
        }
        let mount = find_mount(&mounts, "cgroup2", |_| true)?;
        let directories = mount.directories(&path(&str::is_empty)?);
        Some(Self { version: Version::V2, directories })
    }

    /// The topmost visible group.
    pub(crate) fn top(&self) -> &str {
        self.directories.last().map_or("", String::as_str)
    }
}

/// The first mount of this type whose options match.
fn find_mount(mounts: &str, fstype: &str, wanted: impl Fn(&str) -> bool) -> Option<Mount> {
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
    /// Returns the directories from the group at this path upwards.
    fn directories(&self, path: &str) -> Vec<String> {
        let below = path.strip_prefix(self.root.as_str()).unwrap_or(path).trim_matches('/');
        // A path with `..` leads to a group that is not visible in the container.
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
    fn directories_lead_from_the_group_to_the_topmost() {
        let mount = |root: &str| Mount { root: root.to_owned(), point: "/m".to_owned() };
        assert_eq!(mount("/").directories("/a/b"), ["/m/a/b", "/m/a", "/m"]);
        assert_eq!(mount("/").directories("/"), ["/m"]);
        // Without a namespace of its own, a container gets the host's path, but sees only its own group.
        assert_eq!(mount("/docker/x").directories("/docker/x/y"), ["/m/y", "/m"]);
        assert_eq!(mount("/").directories("/../../a"), ["/m"]);
    }
}
