# A client in C and the Linux kernel's NFS server, version 4.0: a file in both directions by chunks.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
find_program NFS_CLIENT ../c/verbs/nfs_client "tests/c/run --verbs"
start_nfsd
stats=/run/stats
rm -rf /srv/nfs/*

# nfs_client ARGUMENT…: runs nfs_client, which must succeed. The connection's statistics are in $stats.
nfs_client() { "${enter[@]}" "$NFS_CLIENT" $at "$@" 2>$stats || fail "nfs_client $*: $(cat $stats)"; }

# Five blocks. The length of the last one needs padding.
head -c 600001 /dev/urandom >/run/file
mkdir -p /srv/nfs/a/b

echo "- READ: a Write chunk for each block"
cp /run/file /srv/nfs/a/b/read
nfs_client get a/b/read >/run/nfsd-back
cmp /run/file /run/nfsd-back || fail "the file that was read back differs"
assert_at_least $stats chunked_messages_received 5
assert_value $stats calls_failed 0

echo "- WRITE: a Read chunk for each block"
: >/srv/nfs/a/b/written
nfs_client put a/b/written </run/file
cmp /run/file /srv/nfs/a/b/written || fail "the server's file differs"
assert_at_least $stats chunked_messages_sent 5
assert_value $stats calls_failed 0

echo "- errors"
! "${enter[@]}" "$NFS_CLIENT" $at get a/absent 2>$stats || fail "get of an absent file succeeded"
grep -q "status is 2" $stats || fail "$(cat $stats)" # NFS4ERR_NOENT
rm -rf /srv/nfs/*
