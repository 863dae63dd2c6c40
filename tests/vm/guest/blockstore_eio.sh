# The block store on a disk with one bad block. READ, WRITE and FLUSH of it fail with the protocol's error at the client
# and a log line at the server. Other blocks remain available, even to another client at that time.
source "$(dirname "$0")/../lib.sh"
find_program BLOCKSTORE blockstore "cargo build -p rpcrdma-blockstore --features verbs"
modprobe ext4 && modprobe null_blk nr_devices=0 || { echo "no ext4 or null_blk in this kernel"; exit 77; }
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
disk=/sys/kernel/config/nullb/broken
mount_point=/srv/broken
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    umount -l $mount_point 2>/dev/null || true
    echo 0 >$disk/power 2>/dev/null && rmdir $disk || true' EXIT
mkdir -p $disk $mount_point
echo 1 >$disk/memory_backed
echo 64 >$disk/size
echo 1 >$disk/power
mkfs.ext4 -q -b 4096 -O ^has_journal /dev/broken
mount /dev/broken $mount_point

# The bad block is the 101st of 256. /run/old is the store's initial contents, /run/new the data written to it.
head -c 1M /dev/urandom >/run/old
head -c 1M /dev/urandom >/run/new
good=$((100 * 4096))
at=verbs:10.0.0.1:20050

# serve OPTION…: starts a server. $server: its process. Its errors are in /run/errors.
serve() {
    : >/run/store
    "$BLOCKSTORE" serve --file $mount_point/store --size 1M --listen $at --io uring "$@" >/run/store 2>/run/errors &
    server=$!
    await grep -q '^listening' /run/store
}
stop_server() {
    kill -TERM "$server"
    wait "$server" || fail "the server ended with $?: $(</run/errors)"
    grep -q '^drained; .* 0 refused' /run/store || fail "unexpected end of the server: $(</run/store)"
    # The emulated processors may leave the server's thread without its core for a second.
    ! grep -v -E '^memory: [0-9]|^WARN: shard was blocked|^[a-z]*: Input/output error \(os error 5\)$' /run/errors ||
        fail "the server logged more lines"
}
run_client() { "$BLOCKSTORE" "$1" "$2" $at --block 4K "${@:3}"; }
# assert_store_begins_with SOURCE [OPTION…]: checks that the store begins with the contents of this file.
assert_store_begins_with() { run_client verify "$@" >/run/output 2>&1 || fail "verify $*: $(</run/output)"; }
# count_log_lines CALL: prints the number of the server's log lines about a failed system call.
count_log_lines() { grep -c "^$1: " /run/errors || true; }
# assert_fails_on_bad_block CALL WHERE COMMAND…: checks that the command fails with the protocol's error for WHERE, and
# that the server logs a line.
assert_fails_on_bad_block() {
    local call=$1 where=$2 before status=0
    shift 2
    before=$(count_log_lines "$call")
    "$@" >/run/output 2>&1 || status=$?
    ((status == 1)) || fail "$*: exit status $status: $(</run/output)"
    grep -q "$where: input/output error at the server$" /run/output || fail "$*: $(</run/output)"
    (($(count_log_lines "$call") > before)) || fail "$*: the server logged no cause: $(</run/errors)"
    echo "- $(</run/output)"
}

echo "- past the page cache"
serve
grep -q ', O_DIRECT$' /run/store || fail "$(</run/store)"
run_client copy /run/old >/run/output 2>&1 || fail "copy: $(</run/output)"
first=$(filefrag -b4096 -v $mount_point/store | sed -n 's/^ *0: *0\.\. *255: *\([0-9]*\)\.\..*/\1/p')
[[ -n $first ]] || fail "the file is fragmented: $(filefrag -b4096 -v $mount_point/store)"
sectors=$(((first + 100) * 8))-$(((first + 100) * 8 + 7))
echo "+$sectors" >$disk/badblocks

# Another client, of good blocks, runs from before the first error until after the last.
head -c $good /run/old >/run/before
# This client waits between its runs, because all processes poll and the machine has two processors.
until [[ -e /run/enough ]]; do run_client verify /run/before --depth 4 && sleep 1 || exit; done >/run/other 2>&1 &
other=$!
await grep -q "equal to the source's" /run/other
assert_fails_on_bad_block read "at $good" run_client verify /run/old --depth 1
assert_fails_on_bad_block read "65536 bytes at $((good / 65536 * 65536))" "$BLOCKSTORE" verify /run/old $at
# With this seed the bad block is read last.
assert_fails_on_bad_block read "READ stopped after 255 of 256 blocks: 4096 bytes at $good" \
    run_client verify /run/old --depth 1 --seed 49
touch /run/enough
wait $other || fail "the other client: $(</run/other)"

assert_fails_on_bad_block write "WRITE stopped after 100 of 256 blocks: 4096 bytes at $good" \
    run_client copy /run/new --depth 1
head -c $good /run/new >/run/before
assert_store_begins_with /run/before
# Blocks that were not written, such as those after the bad one, are unchanged.
echo "-$sectors" >$disk/badblocks
{ cat /run/before; tail -c +$((good + 1)) /run/old; } >/run/both
assert_store_begins_with /run/both
run_client copy /run/new >/run/output 2>&1 || fail "copy to a repaired disk: $(</run/output)"
assert_store_begins_with /run/new
stop_server

echo "- through the page cache"
echo "+$sectors" >$disk/badblocks
echo 3 >/proc/sys/vm/drop_caches
serve --buffered
assert_fails_on_bad_block read "at $good" run_client verify /run/new --depth 1
assert_store_begins_with /run/before
# The server accepts all data but cannot write some of it to the disk.
assert_fails_on_bad_block fdatasync FLUSH run_client copy /run/old
head -c $good /run/old >/run/before
assert_store_begins_with /run/before
echo "-$sectors" >$disk/badblocks
run_client copy /run/new >/run/output 2>&1 || fail "copy to a repaired disk: $(</run/output)"
echo 3 >/proc/sys/vm/drop_caches
assert_store_begins_with /run/new
stop_server
