# Functions for the scripts of tests/vm/guest, which source this file in bash in the guest.
set -euo pipefail

# The processes of a script end with the script.
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

# fail WHY: ends the test.
fail() {
    echo "$*" >&2
    exit 1
}

# await COMMAND…: waits until the command succeeds. The time-out is long enough for a slow host, so it detects failures
# and not delays. If the command searches a background process's output, empty that file before the start of the
# process: otherwise output of an earlier process may end the wait.
await() {
    local end=$((SECONDS + 150))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS <= end)) || fail "did not succeed within 150 s: $*"
        sleep 0.1
    done
}

# wait_for_capture FILE ADDRESS [COMMAND…]: waits until a capture file has all packets sent so far. It sends a mark to
# UDP port 9 of an address at the other end, which the capture's filter must accept, and waits for the mark. COMMAND… is
# the prefix that runs a program in a namespace from which packets to the address are captured.
wait_for_capture() {
    local file=$1 address=$2
    shift 2
    is_mark_captured() { "$@" bash -c "echo rpcrdma-mark >/dev/udp/$address/9" && grep -qa rpcrdma-mark "$file"; }
    await is_mark_captured "$@"
}

# is_listening PORT: succeeds if a process accepts TCP connections at this port.
is_listening() { ss -Hltn "sport = :$1" | grep -q .; }

# is_listening_rdma PORT: succeeds if a process accepts RDMA connections at this port.
is_listening_rdma() { rdma resource show cm_id | grep -q "state LISTEN.*:$1 "; }

# find_program NAME PATH BUILD: sets the variable NAME to a program with the verbs fabric, built by the command BUILD at
# PATH below target/PROFILE. Prefers the release build. Ignores builds without verbs, such as those of the README's
# first command.
find_program() {
    local path target
    target=$(realpath "$RPCRDMA_VM_RESULTS/../../..")
    for path in "${!1:-$target/release/$2}" "${!1:-$target/debug/$2}"; do
        if [[ -x $path ]] && ldd "$path" | grep libibverbs >/dev/null; then
            printf -v "$1" %s "$path"
            return
        fi
    done
    echo "no ${2##*/} with verbs: $3"
    exit 77
}
