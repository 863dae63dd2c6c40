# Wireshark's tshark decodes this project's messages to the Linux kernel's NFS server, captured on the cable. It
# understands all of them, sees the expected chunk lists, and as many messages as rpcrdma decode.
#
# Limits of tshark 4.0: it does not decode version 2, because its heuristics require version 1, and shows only a Send.
# It does not reassemble the data of a READ from the Write chunk, and calls every such reply malformed, also between two
# Linux kernels (tests/data/nfs3-linux61.pcap). It needs the start of the connection in the capture, to pair the queue
# pairs by the CM exchange.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
for tool in dumpcap tshark; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install tshark"; exit 77; }
done
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
start_nfsd
"$(dirname "$0")/../wire-up"
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    "$(dirname "$0")/../wire-up" down; rpc.nfsd 0' EXIT

capture=$RPCRDMA_VM_RESULTS/nfsd.pcapng
dumpcap -q -i v0 -f 'udp port 4791 or udp port 9' -w "$capture" 2>/run/dumpcap &
capturing=$!
await grep -q '^File: ' /run/dumpcap

rm -rf /srv/nfs/*
mkdir /run/files
head -c 20001 /dev/urandom >/run/files/file
head -c 100 /run/files/file >/run/files/small
nfs3c() { "$NFS3C" --block 8192 verbs:10.0.0.1 /srv/nfs "$@" || fail "nfs3c $*"; }
nfs3c put /run/files/* .
ln -s "$(printf 'x%.0s' {1..100})" /srv/nfs/link
nfs3c sum >/run/sums
cmp /run/files/file /srv/nfs/file
grep -q "$(sha256sum </run/files/file | cut -d ' ' -f 1)" /run/sums || fail "another file was read"
nfs3c --rdma-version 1 --no-invalidate get file /run/tshark-back
cmp /run/files/file /run/tshark-back
wait_for_capture "$capture" $across
kill -INT $capturing
wait $capturing
chmod a+r "$capture"

# Prints a line per packet, with the first value of each field. There is only one pass, because each takes long under
# emulation.
fields=(frame.number _ws.malformed rpcordma.version rpcordma.msg_type rpcordma.flow_control
    rpcordma.reads_count rpcordma.writes_count rpcordma.reply_count rpcordma.position rpcordma.segment_count
    rpcordma.rdma_length rpc.msgtyp nfs.procedure_v3 nfs.count3 nfs.name
    infiniband.bth.opcode infiniband.bth.destqp infiniband.bth.psn)
tshark -r "$capture" -Y 'udp.dstport == 4791' -T fields -E occurrence=f -E separator=/t "${fields[@]/#/-e}" \
    >/run/all 2>/run/tshark || fail "$(cat /run/tshark)"
# A device retransmits packets that this slow machine acknowledges late. The capture contains them again.
awk -F '\t' '$18 == "" || !seen[$16, $17, $18]++' /run/all >/run/packets
echo "$(wc -l </run/all) packets, $(wc -l </run/packets) of them sent once"
(($(wc -l </run/packets) > 50)) || fail "only $(wc -l </run/packets) packets were captured"

# print_fields FIELD CONDITION: prints this field of the packets for which the condition is true.
print_fields() {
    awk -F '\t' "{
        frame = \$1; malformed = \$2; version = \$3; type = \$4; credit = \$5
        reads = \$6; writes = \$7; reply = \$8; position = \$9
        segments = \$10; len = \$11; answer = \$12; procedure = \$13; count = \$14; name = \$15; opcode = \$16
        call = answer == \"0\"
        if ($2) print $1
    }" /run/packets
}

# assert_packets N CONDITION: checks that at least N packets meet the condition.
assert_packets() {
    local found
    found=$(print_fields frame "$2" | wc -l)
    ((found >= $1)) || fail "$found packets match, expected at least $1: $2"
    echo "$found packets: $2"
}

odd=$(print_fields frame 'malformed != "" && !(procedure == 6 && answer == 1 && writes == 1)')
[[ -z $odd ]] || fail "malformed packets other than replies to READ with a chunk: $odd"

# Calls with data have a Read list at the data's position. tshark shows a call's contents only after its data was read.
assert_packets 3 'reads >= 1 && type == 0'
assert_packets 3 'procedure == 7 && call && count > 3000'
for position in $(print_fields position 'reads >= 1'); do
    ((position > 0 && position % 4 == 0)) || fail "a Read chunk at position $position"
done
# Short data is inline.
assert_packets 1 'procedure == 7 && call && count == 100 && reads == 0'
# Calls for data have a Write list, as do their replies, with the written lengths.
assert_packets 6 'procedure == 6 && call && writes == 1 && segments == 1'
lengths=$(print_fields len 'procedure == 6 && answer == 1 && writes == 1' | sort -n | uniq -c | xargs)
[[ $lengths == '2 3617 4 8192' ]] || fail "READ has written other lengths: $lengths"
# Directory listings and link targets come in Reply chunks.
assert_packets 1 'procedure == 17 && call && reply == 1'
assert_packets 1 'procedure == 5 && call && reply == 1'
assert_packets 2 'type == 1 && reply == 1'
assert_packets 1 'procedure == 17 && answer == 1'
# Send With Invalidate (23) occurs where the client permits it. On the last connection it does not.
assert_packets 5 'opcode == 23'
last=$(print_fields frame 'opcode == 23' | tail -n 1)
assert_packets 3 "frame > $last && procedure == 6 && answer == 1"
# Every reply grants 64.
[[ $(print_fields credit 'answer == 1 && version == 1' | sort -u) == 64 ]] ||
    fail "the server grants $(print_fields credit 'answer == 1' | xargs)"

# rpcrdma decode sees the same messages of version 1. It also sees those of version 2: the first of each of two
# connections, and their replies.
"$RPCRDMA" decode --json "$capture" >/run/decoded || fail "rpcrdma decode"
theirs=$(print_fields frame 'version == 1' | wc -l)
ours=$(grep -c '"vers":1,' /run/decoded)
echo "$theirs messages for tshark, $ours for rpcrdma decode"
((ours == theirs)) || fail "tshark sees $theirs messages, rpcrdma decode $ours"
[[ $(grep -c '"htype":"CONNPROP"' /run/decoded) == 2 ]] || fail "$(grep '"vers":2' /run/decoded)"
[[ $(grep '"vers":2' /run/decoded | grep -c '"low":1,"high":1') == 2 ]] || fail "$(grep '"vers":2' /run/decoded)"
