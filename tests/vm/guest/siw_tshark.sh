# Wireshark's tshark decodes the iWARP fabric's connections to the Linux kernel's NFS server and from its client,
# captured on the cable. It sees the MPA set-up frames, DDP and RDMAP with each expected kind of message, and RPC over
# RDMA in them. Nothing is malformed, no FPDU is longer than a segment, and rpcrdma decode finds as many messages in the
# same packets.
#
# tshark 4.0 mistakes the data of a READ for part of the reply, and calls each such reply malformed, also between two
# kernels. In version 2 it sees only a Send. It misses the second and later of several Sends within one segment.
source "$(dirname "$0")/../lib.sh"
export DEVICE=siw0
source "$(dirname "$0")/../nfsd.sh"
for tool in dumpcap tshark; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install tshark"; exit 77; }
done
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
start_nfsd
source "$vm/nfs3d.sh"
trap 'umount -l /mnt /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; rpc.nfsd 0' EXIT

# capture NAME COMMAND…: runs the command, and captures the packets on the cable. /run/NAME gets a line per packet, with
# all values of each field.
fields=(frame.number _ws.malformed iwarp_mpa.req iwarp_mpa.rep iwarp_rdma.opcode rpcordma.version rpcordma.msg_type
    nfs.procedure_v3 rpc.msgtyp ip.src iwarp_mpa.ulpdulength iwarp_ddp.last_flag tcp.options.mss_val)
capture() {
    local file=$RPCRDMA_VM_RESULTS/siw-$1.pcapng capturing checking
    : >/run/dumpcap
    dumpcap -q -i $near -f 'tcp port 20049 or udp port 9' -w "$file" 2>/run/dumpcap &
    capturing=$!
    await grep -q '^File: ' /run/dumpcap
    "${@:2}"
    wait_for_capture "$file" $across
    kill -INT $capturing
    wait $capturing
    chmod a+r "$file"
    # Two instances of tshark run in parallel, because tshark starts slowly.
    tshark -r "$file" -Y 'tcp && (_ws.expert.severity == error && !_ws.malformed || iwarp_mpa.bad_length)' >/run/wrong \
        2>/run/tshark-wrong &
    checking=$!
    tshark -r "$file" -Y tcp -T fields -E separator=/t "${fields[@]/#/-e}" >"/run/$1" 2>/run/tshark ||
        fail "$(</run/tshark)"
    wait $checking || fail "$(</run/tshark-wrong)"
    [[ ! -s /run/wrong ]] || fail "$1: tshark reports errors: $(</run/wrong)"
    echo "$1: $(wc -l <"/run/$1") packets"
}

# print_packets NAME CONDITION: prints the numbers of the packets for which the condition is true. In it, operations(N)
# is the number of RDMAP messages with this opcode in the packet (RFC 5040 §4.3).
print_packets() {
    awk -F '\t' "
        function operations(n,    values, count, total, i) {
            count = split(\$5, values, \",\")
            for (i = 1; i <= count; i++) if (values[i] == sprintf(\"0x%02x\", n)) total++
            return total + 0
        }
        {
            malformed = \$2; request = \$3; reply = \$4
            version = \$6; type = \$7; procedure = \$8; answer = \$9; from = \$10
        }
        $2 { print \$1 }" "/run/$1"
}

# assert_packets NAME N CONDITION: checks that at least N packets meet the condition.
assert_packets() {
    local found
    found=$(print_packets "$1" "$3" | wc -l)
    ((found >= $2)) || fail "$1: $found packets match, expected at least $2: $3"
    echo "$1: $found packets: $3"
}

# assert_fpdus_fill_segments NAME: checks that no FPDU exceeds the peer's segment size, less 12 bytes for TCP's time
# stamp option, and that some FPDUs reach it. An FPDU has 6 bytes besides the ULPDU, whose length tshark shows.
assert_fpdus_fill_segments() {
    awk -F '\t' -v name="$1" '
        $13 != "" && (!segment || $13 - 12 < segment) { segment = $13 - 12 }
        { count = split($11, ulpdus, ","); for (i = 1; i <= count; i++) if (ulpdus[i] > longest) longest = ulpdus[i] + 0 }
        END {
            print name ": FPDUs of up to " longest + 6 " bytes, segments of " segment
            exit !(segment > 0 && longest + 6 <= segment && longest + 6 > segment - 4)
        }' "/run/$1" || fail "$1: FPDUs do not fill their segments, or are longer"
}

# assert_decode_agrees NAME: checks that rpcrdma decode finds as many messages as tshark finds ends of Sends (opcodes 3
# to 6), and that both find messages of version 1 in the same packets.
assert_decode_agrees() {
    "$RPCRDMA" decode --json "$RPCRDMA_VM_RESULTS/siw-$1.pcapng" >/run/decoded || fail "rpcrdma decode"
    local theirs ours
    theirs=$(awk -F '\t' '{
        count = split($5, opcodes, ","); split($12, last, ",")
        for (i = 1; i <= count; i++) if (opcodes[i] ~ /^0x0[3-6]$/ && last[i] ~ /^(1|True)$/) total++
    } END { print total + 0 }' "/run/$1")
    ours=$(wc -l </run/decoded)
    echo "$1: $theirs messages for tshark, $ours for rpcrdma decode"
    ((theirs > 0 && ours == theirs)) || fail "$1: tshark sees $theirs messages, rpcrdma decode $ours"
    diff <(print_packets "$1" 'version ~ /1/' | sort -nu) \
        <(grep '"vers":1,' /run/decoded | grep -o '"frame":[0-9]*' | cut -d : -f 2 | sort -nu) ||
        fail "$1: tshark sees messages of version 1 in other packets than rpcrdma decode"
}

# assert_well_formed NAME: checks that only replies to READ are malformed, and that no Terminate (opcode 7) ended a
# connection.
assert_well_formed() {
    local odd
    odd=$(print_packets "$1" 'malformed != "" && !(procedure ~ /6/ && answer ~ /1/)')
    [[ -z $odd ]] || fail "$1: malformed packets other than replies to READ: $odd"
    odd=$(print_packets "$1" 'operations(7)')
    [[ -z $odd ]] || fail "$1: packets with a Terminate: $odd"
    assert_fpdus_fill_segments "$1"
    assert_decode_agrees "$1"
}

head -c 20001 /dev/urandom >/run/file
head -c 100 /run/file >/run/small
run_client() {
    local nfs3c=("${enter[@]}" "$NFS3C" --block 8192)
    "${nfs3c[@]}" $at /srv/nfs put /run/file /run/small . || fail "put"
    "${nfs3c[@]}" $at /srv/nfs get file /run/back || fail "get"
    cmp /run/file /run/back || fail "the file that was read back differs"
    "${nfs3c[@]}" --rdma-version 1 --no-invalidate $at /srv/nfs get file /run/back || fail "get"
    cmp /run/file /run/back || fail "the file that was read back differs"
}
capture client run_client
assert_well_formed client
assert_packets client 3 'request != ""'
assert_packets client 3 'reply != ""'
# The kernel reads the data of put, and writes the data of get.
assert_packets client 3 "operations(1) && from == \"$kernel\""
assert_packets client 3 "operations(2) && from == \"$ours\""
assert_packets client 6 "operations(0) && from == \"$kernel\""
# Send With Invalidate occurs only where it is permitted, which excludes the last connection.
assert_packets client 3 "operations(4) + operations(6) && from == \"$kernel\""
last=$(print_packets client 'request != ""' | tail -n 1)
[[ -z $(print_packets client "\$1 > $last && operations(4) + operations(6)") ]] ||
    fail "a handle was invalidated without permission"
assert_packets client 10 'version ~ /1/ && type != ""'

mount_storage
serve
run_server() {
    mount_nfs
    cp /run/file /run/small /mnt/
    umount /mnt
    mount_nfs
    cmp /run/file /mnt/file || fail "the file that was read differs"
    ls -l /mnt >/dev/null
    umount /mnt
}
capture server run_server
assert_well_formed server
assert_packets server 2 'request != ""'
assert_packets server 2 'reply != ""'
assert_packets server 1 "operations(1) && from == \"$ours\""
assert_packets server 1 "operations(2) && from == \"$kernel\""
assert_packets server 1 "operations(0) && from == \"$ours\""
assert_packets server 1 "operations(4) + operations(6) && from == \"$ours\""
assert_packets server 10 'version ~ /1/ && type != ""'
stop_server
