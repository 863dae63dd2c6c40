# A client of the example nfs3d waits for a slow disk, and another one for nothing: one shard, one export on a device
# that takes a second for whatever it is asked, but what the second client reads is in the server's memory. Its calls
# must not wait for those of the first one, which has more of them under way than it may hold threads.
# limit: 300
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
program NFS3C examples/nfs3c "cargo build -p rpcrdma --features verbs --example nfs3c"
modprobe ext4 && modprobe null_blk nr_devices=0 || { echo "no ext4 or null_blk in this kernel"; exit 77; }
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
disk=/sys/kernel/config/nullb/slow
trap 'kill $(jobs -p) 2>/dev/null || true
    umount -l /mnt $export 2>/dev/null || true
    echo 0 >$disk/power 2>/dev/null && rmdir $disk || true' EXIT

# A disk in memory, which keeps what is in it while its power is off: slow only when it has been filled.
mkdir $disk
echo 1 >$disk/memory_backed
echo 256 >$disk/size
echo 4096 >$disk/blocksize
power() { echo "$1" >$disk/power; }
power 1
device=/dev/slow
mkfs.ext4 -q -O ^has_journal $device
mount $device $export
head -c 100M /dev/zero >$export/slow
head -c 4096 /dev/zero >$export/fast
umount $export
power 0
echo 2 >$disk/irqmode
echo 1000000000 >$disk/completion_nsec
power 1
mount -o noatime $device $export
blocks_read() { awk '{ print $1 }' /sys/block/slow/stat; }
in_flight() { awk '{ print $9 }' /sys/block/slow/stat; }

serve "$@"
nfs
# time_reads: how long the second client's reads take; sets $median, in microseconds.
calls=500
time_reads() {
    local line
    line=$("$NFS3C" verbs:10.0.0.1:20049 $export --mount 10.0.0.1:20148 --block 4096 time fast --calls $calls)
    echo "- $1: $line"
    median=$(sed 's/.*median \([0-9]*\).*/\1/' <<<"$line")
}
time_reads "the server is idle"
idle=$median

# The first client: eight processes, each of which has a block read past the client's memory, then another one.
perl -MFcntl -e '
    my @readers;
    for (1 .. 8) {
        my $reader = fork;
        if ($reader) { push @readers, $reader; next }
        sysopen(my $file, "/mnt/slow", O_RDONLY | O_DIRECT) or die "open: $!";
        srand($$);
        while (1) {
            sysseek($file, 4096 * int(rand(25600)), 0);
            sysread($file, my $block, 4096) == 4096 or die "read: $!";
        }
    }
    $SIG{TERM} = sub { kill "TERM", @readers };
    1 while wait > 0;
    exit' &
first=$!
busy() { (($(in_flight) > 0)); }
await 30 busy
began=$(date +%s) before=$(blocks_read)
time_reads "the other client waits for the disk"
await 30 busy
reads=$(($(blocks_read) - before)) took=$(($(date +%s) + 1 - began))
echo "- the disk read $reads blocks in $took s meanwhile"
echo "- ratio of the medians: $((median * 100 / idle)) %"
kill -TERM "$first"
wait "$first" || fail "the first client ended with $?"
# A second each, by no more threads than one client may hold.
((reads <= took * 4)) || fail "$reads blocks in $took s"
# Each call would let one read of the disk go first at least, if it waited for a thread that reads; with none free for it
# it would be all of eight. However slow this machine is, far fewer end while the other client asks and is answered.
((reads < calls / 2)) || fail "calls wait for another client's disk: it read $reads blocks within $calls of them"
# What was asked for is answered before the client disconnects.
umount /mnt
gone() { (($(connections) == 0)); }
await 60 gone
quit
