# rpcperf beside perftest on one device: both work and print figures. Also counts the engine's savings. With 32
# outstanding calls a doorbell covers 4 work requests or more, on average of both sides. On each side at most one work
# request in 8 is signaled. Bulk data arrives unchanged.
# pair
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"

# check_savings: checks these counts. The batch size of a side depends on scheduling: the slower side finds and sends
# larger batches, and the other side smaller ones. Therefore the check gets several attempts.
check_savings() {
    "$rpcperf" rate --loopback=verbs:10.0.0.1:20049 -s 64 -t 32 -n 5000 -d rxe0 -x 1 >/run/rate
    sed -n '/a call of/p' /run/rate
    awk '/a call of/ { sides++; for (i = 2; i <= NF; i++) {
                if ($i == "per") doorbell = $(i - 1)
                if ($i == "signaled;") signaled = $(i - 1) }
            doorbells += 1 / doorbell
            if (signaled < 8) bad = 1 }
        END { exit !(sides == 2 && sides / doorbells >= 4 && !bad) }' /run/rate
}
attempts=0
until check_savings; do ((++attempts < 8)) || fail "doorbells and completions: $(</run/rate)"; done
for op in read write; do
    "$rpcperf" bw --loopback=verbs:10.0.0.1:20049 --op $op -s 64K -n 100 >/run/bw || fail "bw --op $op: $(</run/bw)"
done
"$(dirname "$0")/../compare-perftest" --rounds 1 --brief
