# A client of the example nfs3d waits for a slow disk, and another one for nothing: one shard, one export on a device
# that takes 100 ms for whatever it is asked, but what the second client reads is in the server's memory. Its calls must
# not wait for those of the first one, which has more of them under way than it may hold threads.
# limit: 200
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
echo 100000000 >$disk/completion_nsec
power 1
mount -o noatime $device $export
blocks_read() { awk '{ print $1 }' /sys/block/slow/stat; }

serve "$@"
nfs
# time_reads: how long the second client's reads take; sets $median, in microseconds.
time_reads() {
    local line
    line=$("$NFS3C" verbs:10.0.0.1:20049 $export --mount 10.0.0.1:20148 --block 4096 time fast --calls 2000)
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
await 30 bash -c "(( \$(awk '{ print \$9 }' /sys/block/slow/stat) > 0 ))"
before=$(blocks_read) began=$(date +%s%N)
time_reads "the other client waits for the disk"
slow=$median
took=$((($(date +%s%N) - began) / 1000000)) reads=$(($(blocks_read) - before))
echo "- the disk read $reads blocks in $took ms meanwhile"
echo "- ratio of the medians: $((slow * 100 / idle)) %"
kill -TERM "$first"
wait "$first" || fail "the first client ended with $?"
# At 100 ms each, by no more threads than one client may hold.
((reads > 0 && reads <= took / 100 * 4 + 8)) || fail "$reads blocks in $took ms"
# Behind one read of the disk they would take twice as long at least, however busy this machine is.
((slow < 50000)) || fail "calls wait for another client's disk: $slow µs"
umount /mnt
quit
