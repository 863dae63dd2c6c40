# git works on a mount of nfs3d: a clone, its check, a commit, and a clone of the clone.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
command -v git >/dev/null || { echo "no git"; exit 77; }
mount_storage
serve
mount_nfs
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@example.org
export GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@example.org
git config --global --add safe.directory '*'

# A few hundred files, some of them large and incompressible.
echo "- a repository of a part of this tree"
mkdir -p /run/git-tree/{engine,tests,tools}
cp -r "$(dirname "$0")"/../../../mempool /run/git-tree/
cp -r "$(dirname "$0")"/../../../engine/README.md /run/git-tree/engine/
cp -r "$(dirname "$0")"/../../../tools/{nfs3d,blockstore} /run/git-tree/tools/
cp -r "$(dirname "$0")"/../../../tests/{data,vm} /run/git-tree/tests/
cd /run/git-tree
find . -type d -empty -delete # git does not track empty directories
git init -q
git add -A
git commit -qm first
echo "- cloned to the mount"
git clone -q --no-hardlinks "file:///run/git-tree" /mnt/clone
cd /mnt/clone
git fsck --full --strict
diff -r --no-dereference --exclude=.git /run/git-tree /mnt/clone # some links point to files that were not copied
echo "- changed there"
git mv engine/README.md moved
echo change >>moved
git rm -rq tests
git commit -qam second
git gc -q
git fsck --full --strict
[[ -z $(git status --porcelain) ]] || fail "$(git status --porcelain)"
cd /
umount /mnt
mount_nfs
echo "- cloned back"
git clone -q file:///mnt/clone /run/git-back
cd /run/git-back
git fsck --full --strict
[[ $(git rev-parse HEAD) == "$(git -C $export/clone rev-parse HEAD)" && ! -e tests ]] ||
    fail "the clone of the clone has another commit"
cd /
umount /mnt
stop_server
