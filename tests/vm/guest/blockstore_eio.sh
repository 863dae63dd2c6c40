# The block store on a disk with one bad block. READ, WRITE and FLUSH of it fail with the protocol's error at the client
# and a log line at the server. Other blocks remain available, also to another client meanwhile.
source "$(dirname "$0")/../lib.sh"
program BLOCKSTORE blockstore "cargo build -p rpcrdma-blockstore --features verbs"
modprobe ext4 && modprobe null_blk nr_devices=0 || { echo "no ext4 or null_blk in this kernel"; exit 77; }
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
disk=/sys/kernel/config/nullb/broken
place=/srv/broken
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    umount -l $place 2>/dev/null || true
    echo 0 >$disk/power 2>/dev/null && rmdir $disk || true' EXIT
mkdir -p $disk $place
echo 1 >$disk/memory_backed
echo 64 >$disk/size
echo 1 >$disk/power
mkfs.ext4 -q -b 4096 -O ^has_journal /dev/broken
mount /dev/broken $place

# The bad block is the 101st of 256. /run/old is the store's initial contents, /run/new the data written to it.
head -c 1M /dev/urandom >/run/old
head -c 1M /dev/urandom >/run/new
good=$((100 * 4096))
at=verbs:10.0.0.1:20050

# serve OPTION…: starts a server. $server: its process. Its errors are in /run/errors.
serve() {
    : >/run/store
    "$BLOCKSTORE" serve --file $place/store --size 1M --listen $at --io uring "$@" >/run/store 2>/run/errors &
    server=$!
    await grep -q '^listening' /run/store
}
quit() {
    kill -TERM "$server"
    wait "$server" || fail "the server ended with $?: $(</run/errors)"
    grep -q '^drained; .* 0 refused' /run/store || fail "unexpected end of the server: $(</run/store)"
    # The emulated processors may leave the server's thread without its core for a second.
    ! grep -v -E '^memory: [0-9]|^WARN: shard was blocked|^[a-z]*: Input/output error \(os error 5\)$' /run/errors ||
        fail "the server logged more lines"
}
client() { "$BLOCKSTORE" "$1" "$2" $at --block 4K "${@:3}"; }
# served SOURCE [OPTION…]: checks that the store begins with the contents of this file.
served() { client verify "$@" >/run/said 2>&1 || fail "verify $*: $(</run/said)"; }
# complaints CALL: prints the number of the server's log lines about a failed system call.
complaints() { grep -c "^$1: " /run/errors || true; }
# broken CALL WHERE COMMAND…: checks that the command fails at this place with the protocol's error, and that the server
# logs a line.
broken() {
    local call=$1 where=$2 before status=0
    shift 2
    before=$(complaints "$call")
    "$@" >/run/said 2>&1 || status=$?
    ((status == 1)) || fail "$*: exit status $status: $(</run/said)"
    grep -q "$where: input/output error at the server$" /run/said || fail "$*: $(</run/said)"
    (($(complaints "$call") > before)) || fail "$*: the server logged no cause: $(</run/errors)"
    echo "- $(</run/said)"
}

echo "- past the page cache"
serve
grep -q ', O_DIRECT$' /run/store || fail "$(</run/store)"
client copy /run/old >/run/said 2>&1 || fail "copy: $(</run/said)"
first=$(filefrag -b4096 -v $place/store | sed -n 's/^ *0: *0\.\. *255: *\([0-9]*\)\.\..*/\1/p')
[[ -n $first ]] || fail "the file is in pieces: $(filefrag -b4096 -v $place/store)"
sectors=$(((first + 100) * 8))-$(((first + 100) * 8 + 7))
echo "+$sectors" >$disk/badblocks

# Another client, of good blocks, runs from before the first error until after the last.
head -c $good /run/old >/run/before
# This client waits between its runs, because all processes poll and the machine has two processors.
until [[ -e /run/enough ]]; do client verify /run/before --depth 4 && sleep 1 || exit; done >/run/other 2>&1 &
other=$!
await grep -q "equal to the source's" /run/other
broken read "at $good" client verify /run/old --depth 1
broken read "65536 bytes at $((good / 65536 * 65536))" "$BLOCKSTORE" verify /run/old $at
# With this seed the bad block is the last, after all others were read.
broken read "READ stopped after 255 of 256 blocks: 4096 bytes at $good" client verify /run/old --depth 1 --seed 49
touch /run/enough
wait $other || fail "the other client: $(</run/other)"

broken write "WRITE stopped after 100 of 256 blocks: 4096 bytes at $good" client copy /run/new --depth 1
head -c $good /run/new >/run/before
served /run/before
# Unwritten blocks are unchanged, and so are those after the bad one.
echo "-$sectors" >$disk/badblocks
{ cat /run/before; tail -c +$((good + 1)) /run/old; } >/run/both
served /run/both
client copy /run/new >/run/said 2>&1 || fail "copy to a repaired disk: $(</run/said)"
served /run/new
quit

echo "- through the page cache"
echo "+$sectors" >$disk/badblocks
echo 3 >/proc/sys/vm/drop_caches
serve --buffered
broken read "at $good" client verify /run/new --depth 1
served /run/before
# The server accepts all data but cannot write some of it to the disk.
broken fdatasync FLUSH client copy /run/old
head -c $good /run/old >/run/before
served /run/before
echo "-$sectors" >$disk/badblocks
client copy /run/new >/run/said 2>&1 || fail "copy to a repaired disk: $(</run/said)"
echo 3 >/proc/sys/vm/drop_caches
served /run/new
quit
