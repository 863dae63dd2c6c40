# One client of nfs3d waits for a slow disk without delaying another. Both share a shard, and an export on a device with
# a latency of half a second (DELAY_MS). The second client reads data from the server's memory. Its calls must not wait
# for the calls of the first client, which makes more concurrent reads, and later more concurrent writes, than it may
# hold threads.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
modprobe ext4 && modprobe null_blk nr_devices=0 || { echo "no ext4 or null_blk in this kernel"; exit 77; }
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
disk=/sys/kernel/config/nullb/slow
delay=${DELAY_MS:-500}
trap 'kill $(jobs -p) 2>/dev/null || true
    umount -l /mnt $export 2>/dev/null || true
    echo 0 >$disk/power 2>/dev/null && rmdir $disk || true
    [[ $second == "$ours" ]] || ip address delete $second/24 dev $near || true' EXIT

# Clients at one address share the threads of one host. Over verbs both clients run on this host, which connects from
# the first address of the called address' subnet. Therefore the second client calls an address of another subnet.
second=$ours
if [[ $fabric == verbs ]]; then
    second=10.3.0.1 address=verbs:$DEVICE@0.0.0.0
    ip address add $second/24 dev $near
fi

# An in-memory disk that keeps its contents while its power is off. It becomes slow after it is filled.
mkdir $disk
echo 1 >$disk/memory_backed
echo 120 >$disk/size # one block group, so that the mount reads little
echo 4096 >$disk/blocksize
set_power() { echo "$1" >$disk/power; }
set_power 1
device=/dev/slow
mkfs.ext4 -q -O ^has_journal -E lazy_itable_init=0 $device
mount $device $export
head -c 100M /dev/zero >$export/slow
head -c 4096 /dev/zero >$export/fast
umount $export
set_power 0
echo 2 >$disk/irqmode
echo $((delay * 1000000)) >$disk/completion_nsec
set_power 1
# With an explicit type, mount does not probe the device.
mount -t ext4 -o noatime $device $export
count_blocks_read() { awk '{ print $1 }' /sys/block/slow/stat; }
echo "- mounted: $(count_blocks_read) blocks read"
count_in_flight() { awk '{ print $9 }' /sys/block/slow/stat; }

serve "$@"
mount_nfs
# time_reads: measures the second client's reads. Sets $median, in microseconds.
calls=500
time_reads() {
    local line
    line=$("${enter[@]}" "$NFS3C" $fabric:$second:20049 $export --mount $second:20148 --block 4096 time fast --calls $calls)
    echo "- $1: $line"
    median=$(sed 's/.*median \([0-9]*\).*/\1/' <<<"$line")
}
time_reads "the server is idle"
idle=$median

# start_first_client WHAT: starts the first client, $first. Each of its eight processes moves one block after another
# between the disk and its memory, bypassing the client's cache. Every other writer instead writes two blocks through
# the cache and commits. Each completion adds a line to /run/first.
start_first_client() {
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
is_first_client_waiting() { [[ -s /run/first ]] && (($(count_in_flight) > 0)); }

# check_other_client WHAT…: checks that the second client gets replies while the first waits for the disk, and that
# calls of the first complete.
check_other_client() {
    start_first_client "$1"
    await is_first_client_waiting
    local before ended what
    before=$(wc -l </run/first)
    time_reads "the other client waits for the disk to $1"
    await is_first_client_waiting
    ended=$(($(wc -l </run/first) - before))
    echo "- meanwhile $ended calls of the other client were answered; ratio of the medians: $((median * 100 / idle)) %"
    # If calls waited for a thread that the first client holds, at least one disk operation would complete before each
    # call, or all eight if no thread were free. Far fewer complete, whatever the speed of the machine.
    ((ended < calls / 2)) ||
        fail "calls wait for another client's disk: $ended of its calls were answered during $calls calls"
    for what; do await grep -qx "$what" /run/first; done
    kill -TERM "$first"
    wait "$first" || fail "the first client ended with $?"
}

began=$(date +%s) before=$(count_blocks_read)
check_other_client read
reads=$(($(count_blocks_read) - before)) took=$(($(date +%s) + 1 - began))
echo "- the disk read $reads blocks in $took s"
# Each block takes the delay, on no more threads than one client may hold.
((reads * delay <= took * 1000 * 4)) || fail "$reads blocks in $took s"
check_other_client write commit
# All calls complete before the client disconnects.
umount /mnt
has_no_connections() { (($(count_connections) == 0)); }
await has_no_connections
stop_server
