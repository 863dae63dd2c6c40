# nfs3d, mounted by the Linux kernel's client over RDMA: files of all lengths.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
mount_storage
serve
mount_nfs

echo "- a file, and its bytes by RDMA"
head -c 3000001 /dev/urandom >/run/file
cp /run/file /mnt/file
cmp /run/file $export/file || fail "the server's file differs from the written one"
umount /mnt
mount_nfs
cmp /run/file /mnt/file || fail "the read file differs from the server's"
(($(print_xprt_figure /mnt 15) >= 3000001)) || fail "the file did not come by RDMA: $(grep xprt: /proc/self/mountstats)"

echo "- files of all lengths: inline, in a chunk, in a chunk whose length is not a multiple of 4"
mkdir /mnt/lengths
for len in 0 1 2 3 4 5 3751 3752 3753 3780 3781 4095 4096 4097 65537 1048575 1048576 1048579; do
    head -c "$len" /run/file >/mnt/lengths/$len
done
umount /mnt
mount_nfs
for len in $(ls /mnt/lengths); do
    cmp <(head -c "$len" /run/file) /mnt/lengths/$len || fail "a file of $len bytes: the read data differs"
    cmp <(head -c "$len" /run/file) $export/lengths/$len || fail "a file of $len bytes: the written data differs"
done

umount /mnt
stop_server
