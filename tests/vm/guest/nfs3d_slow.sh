# A client of nfs3d waits for a slow disk, and another one for nothing: one shard, one export on a device
# that takes half a second (DELAY_MS) for whatever it is asked, but what the second client reads is in the server's
# memory. Its calls must not wait for those of the first one, which has more of them under way than it may hold threads:
# reads, then writes.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
modprobe ext4 && modprobe null_blk nr_devices=0 || { echo "no ext4 or null_blk in this kernel"; exit 77; }
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
disk=/sys/kernel/config/nullb/slow
delay=${DELAY_MS:-500}
trap 'kill $(jobs -p) 2>/dev/null || true
    umount -l /mnt $export 2>/dev/null || true
    echo 0 >$disk/power 2>/dev/null && rmdir $disk || true' EXIT

# A disk in memory, which keeps what is in it while its power is off: slow only when it has been filled.
mkdir $disk
echo 1 >$disk/memory_backed
echo 120 >$disk/size # one block group, which is little to read at the mount
echo 4096 >$disk/blocksize
power() { echo "$1" >$disk/power; }
power 1
device=/dev/slow
mkfs.ext4 -q -O ^has_journal -E lazy_itable_init=0 $device
mount $device $export
head -c 100M /dev/zero >$export/slow
head -c 4096 /dev/zero >$export/fast
umount $export
power 0
echo 2 >$disk/irqmode
echo $((delay * 1000000)) >$disk/completion_nsec
power 1
# Told what it is, mount does not look.
mount -t ext4 -o noatime $device $export
blocks_read() { awk '{ print $1 }' /sys/block/slow/stat; }
echo "- mounted: $(blocks_read) blocks read"
in_flight() { awk '{ print $9 }' /sys/block/slow/stat; }

serve "$@"
nfs
# time_reads: how long the second client's reads take; sets $median, in microseconds.
calls=500
time_reads() {
    local line
    line=$("${enter[@]}" "$NFS3C" $fabric:$ours:20049 $export --mount $ours:20148 --block 4096 time fast --calls $calls)
    echo "- $1: $line"
    median=$(sed 's/.*median \([0-9]*\).*/\1/' <<<"$line")
}
time_reads "the server is idle"
idle=$median

# first WHAT: the first client, in $first: eight processes, each of which has a block moved past the client's memory and
# to or from the disk, then another one; of those that write every other one has two written anyhow, then committed.
# There is a line in /run/first for whatever has ended.
first() {
    : >/run/first
    perl -MFcntl -MIO::Handle -e '
        my $write = $ARGV[0] eq "write";
        my @processes;
        for my $n (1 .. 8) {
            my $process = fork;
            if ($process) { push @processes, $process; next }
            my $commit = $write && $n % 2;
            my $how = $write ? ($commit ? O_WRONLY : O_WRONLY | O_DSYNC | O_DIRECT) : O_RDONLY | O_DIRECT;
            sysopen(my $file, "/mnt/slow", $how) or die "open: $!";
            open(my $ended, ">>", "/run/first") or die "/run/first: $!";
            srand($$);
            my $seek = sub { sysseek($file, 4096 * int(rand(25600)), 0) };
            while (1) {
                for (0 .. $commit) {
                    $seek->();
                    if ($write) { syswrite($file, "x" x 4096) == 4096 or die "write: $!" }
                    else { sysread($file, my $block, 4096) == 4096 or die "read: $!" }
                }
                if ($commit) { $file->sync or die "fsync: $!" }
                syswrite($ended, ($commit ? "commit" : $ARGV[0]) . "\n");
            }
        }
        $SIG{TERM} = sub { kill "TERM", @processes };
        1 while wait > 0;
        exit' "$1" &
    first=$!
}
busy() { [[ -s /run/first ]] && (($(in_flight) > 0)); }

# hold WHAT…: the second client is answered while the first one has this done, and that ends, too.
hold() {
    first "$1"
    await busy
    local before ended what
    before=$(wc -l </run/first)
    time_reads "the other client waits for the disk to $1"
    await busy
    ended=$(($(wc -l </run/first) - before))
    echo "- meanwhile the other client had $ended calls answered; ratio of the medians: $((median * 100 / idle)) %"
    # Each call would let one of those of the disk go first at least, if it waited for a thread that they have; with
    # none free for it it would be all of eight. However slow this machine is, far fewer end while the other client
    # asks and is answered.
    ((ended < calls / 2)) || fail "calls wait for another client's disk: $ended of that were answered within $calls"
    for what; do await grep -qx "$what" /run/first; done
    kill -TERM "$first"
    wait "$first" || fail "the first client ended with $?"
}

began=$(date +%s) before=$(blocks_read)
hold read
reads=$(($(blocks_read) - before)) took=$(($(date +%s) + 1 - began))
echo "- the disk read $reads blocks in $took s"
# As long as that each, by no more threads than one client may hold.
((reads * delay <= took * 1000 * 4)) || fail "$reads blocks in $took s"
hold write commit
# What was asked for is answered before the client disconnects.
umount /mnt
gone() { (($(connections) == 0)); }
await gone
quit
