# File errors through the Linux kernel's client of nfs3d: a full disk, a read-only export, permissions, stale handles,
# names and paths that are too long, two concurrent mounts.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
mount_storage 20M
serve
mount_nfs

# assert_refused MESSAGE COMMAND…: checks that the command fails with this message.
assert_refused() {
    local what=$1
    shift
    ! "$@" 2>/run/error || fail "not refused with '$what': $*"
    grep -q "$what" /run/error || fail "$*: $(cat /run/error)"
}

echo "- a server without workers, whose shards would need the rights of users"
assert_refused 'use --workers 1 or more' "$nfs3d" $export --listen verbs:$ours:20050 --workers 0 --key /run/nfs3d.key

echo "- a full disk"
assert_refused 'No space left' dd if=/dev/zero of=/mnt/full bs=1M count=40 conv=fsync status=none
rm /mnt/full
head -c 10000000 /dev/zero >/mnt/half
[[ $(stat -c %s $export/half) == 10000000 ]] || fail "freed space cannot be used"
rm /mnt/half

echo "- users"
install -d -m 755 -o 1000 -g 1000 /mnt/home
install -m 600 -o 1000 -g 1000 /dev/null /mnt/home/mine
run_as() { setpriv --reuid "$1" --regid "$1" --clear-groups "${@:2}"; }
run_as 1000 bash -c 'echo text >/mnt/home/mine; echo more >/mnt/home/new; umask 377; echo read-only >/mnt/home/sealed'
[[ $(stat -c '%u:%g %a' $export/home/new) == '1000:1000 644' ]] || fail "$(stat $export/home/new)"
[[ $(cat $export/home/sealed) == read-only ]] || fail "the owner cannot write to his new read-only file"
assert_refused 'Permission denied' run_as 1001 cat /mnt/home/mine
assert_refused 'Permission denied' run_as 1001 touch /mnt/home/theirs
assert_refused 'Operation not permitted' run_as 1001 chmod 666 /mnt/home/new
assert_refused 'Permission denied' run_as 1001 rm -f /mnt/home/new
run_as 1001 cat /mnt/home/new >/dev/null
chown :2000 /mnt/home/mine
chmod 640 /mnt/home/mine
assert_refused 'Permission denied' run_as 1001 cat /mnt/home/mine
setpriv --reuid 1001 --regid 1001 --groups 2000 cat /mnt/home/mine >/dev/null ||
    fail "a group of the user is not honoured"

echo "- paths"
cd /mnt
for i in {1..5}; do mkdir "$(printf 'd%.0s' {1..200})" && cd "$(printf 'd%.0s' {1..200})"; done
echo deep >file
[[ $(cat file) == deep && ${#PWD} -gt 1000 ]] || fail "a path of ${#PWD} bytes does not work"
cd /
[[ $(find /mnt -name file | wc -l) == 1 ]] || fail "a deep file is not found"
ln -s "$(printf 'p%.0s' {1..4095})" /mnt/link
[[ $(readlink /mnt/link | wc -c) == 4096 ]] || fail "a link of 4095 bytes does not work"

echo "- stale handles"
mkdir /mnt/dir
echo x >/mnt/dir/file
exec 5</mnt/dir/file
rm -r $export/dir
echo y >$export/other
assert_refused 'Stale file handle' cat /proc/self/fd/5
exec 5<&-
[[ $(cat /mnt/other) == y ]] || fail "a file of another client is not visible"

echo "- two mounts see each other's work"
mount_nfs /mnt2 actimeo=0
echo first >/mnt/shared
[[ $(cat /mnt2/shared) == first ]] || fail "the second mount does not see the first one's file"
echo second >>/mnt2/shared
[[ $(cat /mnt/shared) == $'first\nsecond' ]] || fail "the first mount does not see the second one's work"
(for i in {1..20}; do echo $i >"/mnt/a-$i"; done) &
one=$!
(for i in {1..20}; do echo $i >"/mnt2/b-$i"; done) &
wait $one $! || fail "one of two writers failed"
[[ $(ls $export | grep -c '^[ab]-') == 40 ]] || fail "files of two writers are missing"
umount /mnt2 /mnt
stop_server

echo "- read-only"
serve --read-only
mount_nfs
[[ $(cat /mnt/shared) == $'first\nsecond' ]] || fail "a file of a read-only export cannot be read"
for change in 'touch /mnt/x' 'rm -f /mnt/shared' 'mkdir /mnt/d' 'chmod 0 /mnt/shared' \
    'ln -s a /mnt/b' 'mv /mnt/shared /mnt/c'; do
    assert_refused 'Read-only file system' $change
done
umount /mnt
stop_server

echo "- root is squashed"
chmod 755 $export
serve --squash root
mount_nfs
assert_refused 'Permission denied' touch /mnt/x
[[ $(cat /mnt/shared) == $'first\nsecond' ]] || fail "nobody cannot read a file"
umount /mnt
stop_server

# The guest's root is an overlay, where device and inode do not identify a file. nfs3d warns the operator.
mkdir -p /srv/overlay
"$nfs3d" /srv/overlay --listen soft:/run/overlay --mount-port 0 --key /run/overlay.key >/run/overlaid 2>&1 &
await grep -q '^listening' /run/overlaid
grep -q '/srv/overlay: on overlayfs' /run/overlaid || fail "no warning about the overlay: $(cat /run/overlaid)"
kill -TERM $!
