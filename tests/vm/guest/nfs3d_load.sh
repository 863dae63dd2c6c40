# nfs3d under load of the Linux kernel's client: fio with verification, storms of renames and removals, many small
# files, two concurrent mounts, a remount, an unmount under load. Also a client with thresholds of 1024 bytes.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
mount_storage
# Buffers for few calls, so that some calls always wait for memory.
serve --clients 1
mount_nfs
mount_nfs /mnt2

echo "- random and sequential, written and verified"
if command -v fio >/dev/null; then
    run_fio() {
        fio --directory="$1" --verify=crc32c --verify_fatal=1 --output-format=terse --minimal "${@:2}" >/run/fio ||
            fail "fio: $(cat /run/fio)"
    }
    run_fio /mnt --name=random --rw=randwrite --bsrange=512-20k --bs_unaligned --size=3m --io_size=2m --ioengine=psync &
    one=$!
    run_fio /mnt2 --name=direct --rw=randwrite --bs=4k --size=4m --direct=1 --ioengine=libaio --iodepth=32 &
    two=$!
    wait $one $two
    run_fio /mnt --name=sequential --rw=write --bs=1m --size=16m --direct=1 --ioengine=libaio --iodepth=16 --numjobs=2
    rm /mnt/{random,direct,sequential}.*
else
    echo "fio is missing: this part is left out"
fi

echo "- many small files, from two concurrent mounts"
write_small_files() { for i in {1..60}; do echo "$1 $i" >"$1/$2-$i"; done; }
write_small_files /mnt a &
one=$!
write_small_files /mnt2 b &
wait $one $! || fail "small files cannot be written"
[[ $(cat $export/a-* | sort -u | wc -l) == 60 && $(cat $export/b-* | sort -u | wc -l) == 60 ]] ||
    fail "small files are missing"

echo "- a storm of renames and removals"
mkdir /mnt/storm
rename_and_remove() {
    local i
    for i in {1..40}; do
        mv -T "$1/$2-$i" "$1/storm/$2-$((i % 7))"
        # At 10, 15, 25, 30 and 35 there is a file to remove.
        if ((i % 5 == 0)); then rm "$1/storm/$2-0" 2>>/run/storm || true; fi
    done
}
: >/run/storm
rename_and_remove /mnt a &
one=$!
rename_and_remove /mnt2 b &
wait $one $! || fail "renames or removals failed"
[[ $(wc -l </run/storm) == 6 ]] || fail "$(cat /run/storm)"
[[ $(ls $export/storm | wc -l) == 12 ]] || fail "unexpected files after the storm: $(ls $export/storm)"
[[ $(ls $export | grep -c '^[ab]-') == 40 ]] || fail "unexpected other files after the storm: $(ls $export)"
ln -s storm /mnt/way && [[ $(ls /mnt2/way | wc -l) == $(ls $export/storm | wc -l) ]] ||
    fail "a link to a directory does not work"

echo "- remounted"
mount -o remount,ro /mnt
! touch /mnt/x 2>/run/error || fail "a write to a read-only mount succeeded"
mount -o remount,rw /mnt
touch /mnt/x

echo "- unmounted under load"
# Writes until /run/stop exists, at any speed.
(
    n=0
    until [[ -e /run/stop ]]; do
        head -c 65536 /dev/zero
        n=$((n + 1))
    done
    echo $n >/run/blocks
) | dd of=/mnt2/endless bs=64k iflag=fullblock oflag=direct status=none &
load=$!
file_size() { stat -c %s $export/endless 2>/dev/null || echo 0; }
is_longer_than() { (($(file_size) > $1)); }
await is_longer_than 0
! umount /mnt2 2>/run/error || fail "umount succeeded during writes"
grep -q busy /run/error || fail "$(cat /run/error)"
umount -l /mnt2
await is_longer_than "$(file_size)"
touch /run/stop
wait $load || fail "the writer failed after the unmount"
[[ $(file_size) == $(($(</run/blocks) * 65536)) ]] ||
    fail "$(</run/blocks) blocks were written: $(stat $export/endless)"
rm /mnt/endless
umount /mnt

echo "- thresholds of 1024 bytes"
for way in read write; do echo 1024 >/proc/sys/sunrpc/rdma_max_inline_$way; done
mount_nfs
head -c 200001 /dev/urandom >/run/file
for len in 0 1 200 500 600 700 708 709 800 1000 1024 4096 200001; do
    head -c $len /run/file >/mnt/short-$len
    cmp <(head -c $len /run/file) $export/short-$len || fail "$len bytes: the written data differs"
done
umount /mnt
mount_nfs
for len in 0 1 200 500 600 700 708 709 800 1000 1024 4096 200001; do
    cmp <(head -c $len /run/file) /mnt/short-$len || fail "$len bytes: the read data differs"
done
# Long names make calls long, long listings make replies long, and long links make both long.
long=$(printf 'n%.0s' {1..255})
touch "/mnt/${long}" && mv "/mnt/$long" "/mnt/${long::254}m" && rm "/mnt/${long::254}m"
[[ $(ls -l /mnt | grep -c short-) == 13 ]] || fail "$(ls -l /mnt)"
ln -s "$(printf 'p%.0s' {1..1024})" /mnt/link && [[ $(readlink /mnt/link | wc -c) == 1025 ]] ||
    fail "a link of 1024 bytes does not work"
umount /mnt
stop_server
