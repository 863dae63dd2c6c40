# nfs3c and the Linux kernel's NFS server: files of all lengths in both directions by chunks, many concurrent calls;
# directories, links.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
start_nfsd
stats=/run/stats
rm -rf /srv/nfs/*

# nfs3c ARGUMENT…: runs nfs3c, which must succeed. Its output is in /run/out, the connection's statistics in $stats.
nfs3c() { "${enter[@]}" "$NFS3C" --stats $at /srv/nfs "$@" >/run/out 2>$stats || fail "nfs3c $*: $(cat $stats)"; }

echo "- files of all lengths"
head -c 5000001 /dev/urandom >/run/file
mkdir /srv/nfs/lengths /run/lengths
for len in 0 1 3 511 512 513 4097 65535 262143 262144 262147 1048579; do
    head -c "$len" /run/file >/run/lengths/$len
done
nfs3c --block 262144 put /run/lengths/* lengths
diff -r /run/lengths /srv/nfs/lengths || fail "the written files differ"
nfs3c --block 262144 sum lengths
diff <(sort /run/out) <(cd /run/lengths && sha256sum ./* | sort) || fail "the read files differ"

# check_transfers OPTION…: transfers a file in both directions, with 77 calls in each direction.
check_transfers() {
    nfs3c --block 65536 --depth 64 "$@" put /run/file big
    cmp /run/file /srv/nfs/big || fail "the server's file differs"
    assert_at_least $stats calls_with_chunks 77
    cp $stats /run/put
    nfs3c --block 65536 --depth 64 "$@" get big /run/nfsd-back
    cmp /run/file /run/nfsd-back || fail "the file that was read back differs"
    assert_at_least $stats replies_with_chunks 77
    for side in /run/put $stats; do
        assert_value $side rdma_version 1
        assert_value $side connections 1
        assert_value $side failed 0
        assert_value $side retransmitted 0
        assert_value $side rejected 0
    done
}

echo "- 64 concurrent calls; the server invalidates the handle of each"
check_transfers
for side in /run/put $stats; do
    assert_at_least $side invalidated_by_server 77
    assert_value $side invalidated_here 0
done
echo "- 64 concurrent calls, without remote invalidation"
check_transfers --no-invalidate
for side in /run/put $stats; do
    assert_value $side invalidated_by_server 0
    assert_at_least $side invalidated_here 77
done

if [[ $fabric == iwarp ]]; then
    echo "- with CRCs, and with FPDUs of nearly 64 KiB, which soft-iWARP takes as well"
    check_transfers --crc always
    check_transfers --fpdu longest
    check_transfers --crc always --fpdu longest
fi

echo "- messages too long for one Send: a Position Zero Read chunk there, a Reply chunk back"
head -c 200003 /run/file >/run/part
nfs3c --inline 20000 --block 20000 --depth 4 put /run/part part
cmp /run/part /srv/nfs/part || fail "long calls: the server's file differs"
assert_value $stats calls_in_chunks 10
nfs3c --inline 20000 --block 20000 --depth 4 --no-invalidate get part /run/nfsd-back
cmp /run/part /run/nfsd-back || fail "long replies: the file that was read back differs"
assert_value $stats replies_in_chunks 10

echo "- a tree: names that need several Reply chunks, links, sums"
mkdir -p /srv/nfs/tree/many
cp -r "$(dirname "$0")/../../../tools/nfs3d" /srv/nfs/tree/
touch /srv/nfs/tree/many/a-name-that-is-neither-short-nor-long-{1..400}
ln -s nfs3d/src/main.rs /srv/nfs/tree/link
ln -s "$(printf 'x%.0s' $(seq 1000))" /srv/nfs/tree/long-link
nfs3c ls tree/many
assert_at_least $stats replies_in_chunks 2
diff <(awk '{ print $NF }' /run/out) <(LC_ALL=C ls /srv/nfs/tree/many) || fail "the listed names differ from the directory"
nfs3c sum tree
assert_at_least $stats replies_in_chunks 4 # two of them for links
diff <(sort /run/out) \
    <(cd /srv/nfs/tree &&
        { find . -type f -print0 | xargs -0 sha256sum && find . -type l -printf '%p %l\n'; } | sort) ||
    fail "the checksums differ"
nfs3c stat tree/nfs3d/src/main.rs
grep -q " $(stat -c %s /srv/nfs/tree/nfs3d/src/main.rs) " /run/out || fail "the listing lacks the size: $(cat /run/out)"

echo "- errors"
! "${enter[@]}" "$NFS3C" $at /srv/nfs get absent /run/nfsd-back 2>$stats || fail "get of an absent file succeeded"
grep -q NFS3ERR_NOENT $stats || fail "$(cat $stats)"
! "${enter[@]}" "$NFS3C" $at /srv/elsewhere ls 2>$stats || fail "ls of an absent export succeeded"
grep -q MNT3ERR $stats || fail "$(cat $stats)"
rm -rf /srv/nfs/*
