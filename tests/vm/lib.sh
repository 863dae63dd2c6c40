# Shared by the scripts of tests/vm/guest. Sourced by bash in the guest.
set -euo pipefail

# A script's processes end with it.
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

# fail WHY: ends the test.
fail() {
    echo "$*" >&2
    exit 1
}

# await COMMAND…: waits until the command succeeds. The limit far exceeds the time of a slow host, so it detects failure
# and not delay. Empty the file of a background process before its start: otherwise an earlier process's output may end
# the wait.
await() {
    local end=$((SECONDS + 150))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS <= end)) || fail "not so within 150 s: $*"
        sleep 0.1
    done
}

# captured FILE ADDRESS [COMMAND…]: waits until a capture into this file has all packets sent so far. For that it sends
# a mark to UDP port 9 of an address at the other end; the capture's filter accepts it. COMMAND…: runs a program where
# the address is reached that way.
captured() {
    local file=$1 address=$2
    shift 2
    marked() { "$@" bash -c "echo rpcrdma-mark >/dev/udp/$address/9" && grep -qa rpcrdma-mark "$file"; }
    await marked "$@"
}

# listening PORT: whether something accepts TCP connections there.
listening() { ss -Hltn "sport = :$1" | grep -q .; }

# listening_rdma PORT: whether something accepts RDMA connections there.
listening_rdma() { rdma resource show cm_id | grep -q "state LISTEN.*:$1 "; }

# program NAME PATH BUILD: sets the variable NAME to a program with the verbs fabric, built by the command BUILD at PATH
# below target/PROFILE. Prefers the release build. Ignores builds without verbs, such as those of the README's first
# command.
program() {
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
