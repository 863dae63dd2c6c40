# The example nfs3d, mounted by the Linux kernel's client over RDMA: files of all lengths, and parts of them.
# limit: 120
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
storage
serve
nfs

echo "- a file, and its bytes by RDMA"
head -c 3000001 /dev/urandom >/run/file
cp /run/file /mnt/file
cmp /run/file $export/file || fail "the server has another file than was written"
umount /mnt
nfs
cmp /run/file /mnt/file || fail "another file was read than the server has"
(($(xprt /mnt 15) >= 3000001)) || fail "the file did not come by RDMA: $(grep xprt: /proc/self/mountstats)"

echo "- all lengths, which differ in form: inline, with a chunk, with one that is no multiple of 4 bytes long"
mkdir /mnt/lengths
for len in 0 1 2 3 4 5 3751 3752 3753 3780 3781 4095 4096 4097 65537 1048575 1048576 1048579; do
    head -c "$len" /run/file >/mnt/lengths/$len
done
umount /mnt
nfs
for len in $(ls /mnt/lengths); do
    cmp <(head -c "$len" /run/file) /mnt/lengths/$len || fail "a file of $len bytes is read as another"
    cmp <(head -c "$len" /run/file) $export/lengths/$len || fail "a file of $len bytes was written as another"
done

echo "- parts of files, at odd places"
# parts COMMAND…: runs it with an offset and a length, for some.
parts() {
    local at len
    for at in 1 3 4093 1048573; do
        for len in 1 5 4099 70001; do "$@" $at $len; done
    done
}
same() {
    cmp <(tail -c +$(($1 + 1)) /run/file | head -c "$2") \
        <(dd if=/mnt/file iflag=skip_bytes,count_bytes,direct skip="$1" count="$2" bs=1M status=none) ||
        fail "$2 bytes at $1 are others"
}
change() {
    dd if=/run/file of="$1" iflag=skip_bytes,count_bytes oflag=seek_bytes conv=notrunc \
        skip=$(($2 + 7)) seek="$2" count="$3" bs=1M status=none
}
parts same
parts change /mnt/file
umount /mnt
nfs
cp /run/file /run/expected
parts change /run/expected
cmp /run/expected /mnt/file || fail "a file that was changed in places is another"

umount /mnt
quit
