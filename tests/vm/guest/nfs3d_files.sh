# nfs3d, mounted by the Linux kernel's client over RDMA: parts of files, a tree in and out, names, links, modes, times.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
mount_storage
serve
mount_nfs
head -c 3000001 /dev/urandom >/run/file
cp /run/file /mnt/file
umount /mnt
mount_nfs

echo "- parts of files, at odd offsets"
# for_each_part COMMAND…: runs a command with several offsets and lengths.
for_each_part() {
    local at len
    for at in 1 3 4093 1048573; do
        for len in 1 5 4099 70001; do "$@" $at $len; done
    done
}
assert_part_is_equal() {
    cmp <(tail -c +$(($1 + 1)) /run/file | head -c "$2") \
        <(dd if=/mnt/file iflag=skip_bytes,count_bytes,direct skip="$1" count="$2" bs=1M status=none) ||
        fail "$2 bytes at $1 differ"
}
change_part() {
    dd if=/run/file of="$1" iflag=skip_bytes,count_bytes oflag=seek_bytes conv=notrunc \
        skip=$(($2 + 7)) seek="$2" count="$3" bs=1M status=none
}
for_each_part assert_part_is_equal
for_each_part change_part /mnt/file
umount /mnt
mount_nfs
cp /run/file /run/expected
for_each_part change_part /run/expected
cmp /run/expected /mnt/file || fail "a file with changed parts differs"

echo "- a tree in and out"
mkdir -p /run/tree/src
cp -a "$(dirname "$0")"/../../../engine/src/{lib.rs,cross_thread,service} /run/tree/src/
cp -a "$(dirname "$0")/../../../tools/nfs3d" /run/tree/
ln -s src/lib.rs /run/tree/link
ln -s "$(printf 'x%.0s' $(seq 1000))" /run/tree/long-link
cp -a /run/tree /mnt/tree
umount /mnt
mount_nfs
cp -a /mnt/tree /run/back
diff <(print_checksums /run/tree) <(print_checksums /run/back) || fail "the copied tree differs"
diff <(print_checksums /run/tree) <(print_checksums $export/tree) || fail "the tree on the server differs"
(cd /run/tree && find . -printf '%p %y %m %s %T@\n' | grep -v ' d ' | sort) >/run/list1
(cd /mnt/tree && find . -printf '%p %y %m %s %T@\n' | grep -v ' d ' | sort) >/run/list2
diff /run/list1 /run/list2 || fail "modes, sizes or times differ"

echo "- names"
mkdir /mnt/names
cd /mnt/names
touch many-{1..300}
[[ $(ls | wc -l) == 300 && $(ls -U | sort -u | wc -l) == 300 ]] || fail "a directory of 300 names has $(ls | wc -l)"
rm many-*
for i in {1..30}; do echo "$i" >"file-$i"; done
for i in {1..30}; do mv "file-$i" "moved-$((i % 10))"; done
[[ $(ls | wc -l) == 10 && $(cat moved-7) == 27 ]] || fail "renamed over each other: $(ls | wc -l), $(cat moved-7)"
ln moved-1 hard
[[ $(stat -c %h hard) == 2 && $(stat -c %i hard) == $(stat -c %i moved-1) ]] || fail "hard link: $(stat hard)"
rm moved-1
[[ $(cat hard) == 21 ]] || fail "a file must keep its data when one of its two names is removed"
mkfifo fifo
mknod null c 1 3
[[ $(stat -c '%F %t:%T' null) == 'character special file 1:3' && -p fifo ]] || fail "$(stat null fifo)"
long=$(printf 'n%.0s' $(seq 255))
echo long >"$long"
[[ $(cat "$long") == long && -e $export/names/$long ]] || fail "a name of 255 bytes does not work"
! touch "${long}n" 2>/run/error || fail "a name of 256 bytes was accepted"
grep -q 'File name too long' /run/error || fail "$(cat /run/error)"
mkdir -p a/b/c
! rmdir a 2>/run/error || fail "rmdir removed a directory that is not empty"
grep -q 'Directory not empty' /run/error || fail "$(cat /run/error)"
mv a/b .
rmdir a b/c b
cd /
rm -r /mnt/names
[[ ! -e $export/names ]] || fail "rm -r did not remove everything"

echo "- an open file exists until it is closed"
exec 5<>/mnt/open
echo still here >&5
rm /mnt/open
[[ $(cat /proc/self/fd/5) == 'still here' ]] || fail "an open file was lost"
exec 5<&-
[[ -z $(ls -A /mnt | grep nfs) ]] || fail "a silly name was left: $(ls -A /mnt)"

echo "- attributes"
touch -d '2001-02-03 04:05:06.789' /mnt/file
chown 12:34 /mnt/file
chmod 4751 /mnt/file
[[ $(stat -c '%a %u %g %.3Y' /mnt/file $export/file | sort -u) == '4751 12 34 981173106.789' ]] ||
    fail "$(stat /mnt/file $export/file)"
truncate -s 5000000001 /mnt/large
printf end | dd of=/mnt/large bs=1 oflag=seek_bytes seek=5000000000 conv=notrunc status=none
[[ $(stat -c %s $export/large) == 5000000003 ]] || fail "a file beyond 4 GiB: $(stat $export/large)"
umount /mnt
mount_nfs
[[ $(tail -c 3 /mnt/large) == end ]] || fail "the end of a file beyond 4 GiB differs"
rm /mnt/large

echo "- df"
total_mib() { stat -f -c '%b %S' "$1" | awk '{ print int($1 * $2 / 1048576) }'; }
# The client rounds up.
(($(total_mib /mnt) - $(total_mib $export) <= 1 && $(total_mib /mnt) >= $(total_mib $export))) ||
    fail "$(stat -f $export /mnt)"
before=$(df --output=used /mnt | tail -n 1)
dd if=/dev/zero of=/mnt/big bs=1M count=20 conv=fsync status=none
(($(df --output=used /mnt | tail -n 1) - before >= 20400)) || fail "df does not count 20 MiB that were written"
rm /mnt/big
(($(df --output=used /mnt | tail -n 1) - before <= 1000)) || fail "df still counts 20 MiB that were removed"

umount /mnt
stop_server
