# Packets carry the configured settings. Tests the DSCP of both directions, over soft-RoCE and iWARP, alone and
# combined, and the path MTU by the length of packets. The service level is not tested: RoCEv2 carries it only in a VLAN
# tag, which soft-RoCE does not write. Alone it changes no header. Impossible settings are refused by name, and a server
# refuses longer packets than its own.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
for tool in dumpcap tshark; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install tshark"; exit 77; }
done
"$(dirname "$0")/../wire-up"
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    ip netns delete near 2>/dev/null || true; ip netns delete far 2>/dev/null || true
    "$(dirname "$0")/../wire-up" down' EXIT

# capture NAME INTERFACE FILTER FIELDS COMMAND…: runs the command, and captures the packets on the cable.
# `wait_for_fields` waits for the fields of each packet in /run/NAME. $enter: runs a program in the interface's
# namespace. $across: the address at the other end.
enter=() across=10.0.0.2
declare -A tshark_processes # by name of the capture
capture() {
    local file=$RPCRDMA_VM_RESULTS/packets-$1.pcapng capturing
    : >/run/dumpcap
    "${enter[@]}" dumpcap -q -i "$2" -f "$3 or udp port 9" -w "$file" 2>/run/dumpcap &
    capturing=$!
    await grep -q '^File: ' /run/dumpcap
    "${@:5}" >/run/output 2>&1 || fail "$1: ${*:5}: $(</run/output)"
    wait_for_capture "$file" $across "${enter[@]}"
    kill -INT $capturing
    wait $capturing
    chmod a+r "$file"
    # tshark starts slowly; more captures run meanwhile.
    tshark -r "$file" -T fields -E occurrence=f -E separator=' ' $4 >"/run/$1" 2>"/run/tshark-$1" &
    tshark_processes[$1]=$!
}

# wait_for_fields NAME…: waits for the fields of these captures.
wait_for_fields() {
    local name
    for name; do
        wait ${tshark_processes[$name]} || fail "$name: $(<"/run/tshark-$name")"
        (($(wc -l <"/run/$name") > 50)) || fail "$name: only $(wc -l <"/run/$name") packets"
    done
}

# print_dscps NAME ADDRESS: prints the DSCPs of packets from this address. The first field is the source address, the
# second the DSCP.
print_dscps() { awk -v from="$2" '$1 == from { print $2 }' "/run/$1" | sort -nu | xargs; }

# assert_equal WHAT ACTUAL EXPECTED: checks that two values are equal.
assert_equal() {
    [[ $2 == "$3" ]] || fail "$1: '$2', expected '$3'"
    echo "- $1: $2"
}

# Selects packets with data of an RDMA message, not of the connection manager (destination queue pair 1).
roce='-e ip.src -e ip.dsfield.dscp -e udp.length -Y infiniband.bth.destqp!=1'
at=verbs:10.0.0.1:20049
# The routing tables now assign that address to the other device.
serve plain $at --only calls -d rxe0 -x 1
longest_packet() { awk '{ if ($3 > max) max = $3 } END { print max }' "/run/$1"; }
# UDP's header, BTH, RETH, payload, ICRC.
packet_length() { echo $((8 + 12 + 16 + $1 + 4)); }

# The first request over a new cable is lost.
await "$rpcperf" lat $at -n 50
capture asked v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10 -T 104 -m 512
capture written v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10
capture alone v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10 -T 72
capture level v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10 -S 5
wait_for_fields asked written alone level
assert_equal "DSCP of the server's packets, as its client asked for (RoCE)" "$(print_dscps asked 10.0.0.1)" 26
assert_equal "longest packet with a path MTU of 512" "$(longest_packet asked)" "$(packet_length 512)"
assert_equal "DSCP without any setting" "$(print_dscps written 10.0.0.1)" 0
assert_equal "longest packet of the port's own MTU" "$(longest_packet written)" "$(packet_length 1024)"
assert_equal "DSCP of a client that sets nothing else" "$(print_dscps alone 10.0.0.2)" 18
assert_equal "DSCP of the server's packets to it" "$(print_dscps alone 10.0.0.1)" 18
assert_equal "longest packet of the port's own MTU then" "$(longest_packet alone)" "$(packet_length 1024)"
assert_equal "DSCPs with a service level alone" "$(print_dscps level 10.0.0.1) $(print_dscps level 10.0.0.2)" "0 0"
assert_fails "a path MTU that exceeds the port's" 'path_mtu = 2048: the active MTU of rxe1 port 1 is 1024' -- \
    "$rpcperf" lat $at -m 2048
kill "$server"
wait "$server" || true
await bash -c '! rdma resource show cm_id | grep -q LISTEN.*20049'

serve class $at --only calls -d rxe0 -x 1 -T 72
await "$rpcperf" lat $at -n 50
capture server v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10
wait_for_fields server
assert_equal "DSCP of a server that sets nothing else" "$(print_dscps server 10.0.0.1)" 18
assert_equal "DSCP of its client, which sets none" "$(print_dscps server 10.0.0.2)" 0
kill "$server"
wait "$server" || true
await bash -c '! rdma resource show cm_id | grep -q LISTEN.*20049'

serve own $at --only calls -d rxe0 -x 1 -T 32 -S 3 -m 512
await "$rpcperf" lat $at -n 50 -m 256
capture both v0 'udp port 4791' "$roce" "$rpcperf" bw $at --op read -s 64K -n 10 -T 104 -S 5 -m 256
wait_for_fields both
assert_equal "DSCP of a server that sets one" "$(print_dscps both 10.0.0.1)" 8
assert_equal "DSCP of its client" "$(print_dscps both 10.0.0.2)" 26
assert_equal "longest packet with a path MTU of 256" "$(longest_packet both)" "$(packet_length 256)"
assert_fails "longer packets than the server accepts" 'path MTU 1024 exceeds `path_mtu` 512 of this side' -- \
    "$rpcperf" lat $at
grep -q 'path MTU 1024 exceeds `path_mtu` 512 of this side' /run/own || fail "the server reports nothing: $(</run/own)"
assert_fails "a knob that iWARP does not have" 'path_mtu = 512: not supported by iwarp: addresses' -- \
    bash -c '"$0" lat iwarp:10.0.0.1:20051 -m 512 || exit 1' "$rpcperf"

ip netns add near
ip netns add far
ip link add n0 netns near type veth peer name f0 netns far
for end in near:n0:1 far:f0:2; do
    IFS=: read -r space link host <<<"$end"
    ip -netns $space address add 192.0.2.$host/24 dev $link
    ip -netns $space address add fd02::$host/64 dev $link nodad
    ip -netns $space link set $link up
done
enter=(ip netns exec near) across=192.0.2.2
serve_iwarp() { # NAME ADDRESS OPTION…
    "${enter[@]}" "$rpcperf" serve --listen "$2" --only calls "${@:3}" >"/run/$1" 2>&1 &
    await grep -q '^listening' "/run/$1"
}
# Packets with data only: the listener answers the first packet, before the settings apply.
tcp='-e ip.src -e ip.dsfield.dscp -Y tcp.len>0'
tcp6='-e ipv6.src -e ipv6.tclass.dscp -Y tcp.len>0'
serve_iwarp tcp 'iwarp:[::]:20049' -T 32
far=(ip netns exec far "$rpcperf" bw --op write -s 64K -n 20 -T 104)
capture four n0 'tcp port 20049' "$tcp" "${far[@]}" iwarp:192.0.2.1:20049
capture six n0 'tcp port 20049' "$tcp6" "${far[@]}" 'iwarp:[fd02::1]:20049'
wait_for_fields four six
assert_equal "DSCP of a server (iWARP, IPv4)" "$(print_dscps four 192.0.2.1)" 8
assert_equal "DSCP of its client" "$(print_dscps four 192.0.2.2)" 26
assert_equal "DSCP of a server (iWARP, IPv6)" "$(print_dscps six fd02::1)" 8
assert_equal "DSCP of its client" "$(print_dscps six fd02::2)" 26
