# What the scripts of tests/vm/guest share. Sourced, by bash, in the guest.
set -euo pipefail

# What a script starts ends with it.
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

# fail WHY: ends the test.
fail() {
    echo "$*" >&2
    exit 1
}

# await COMMAND…: waits until the command succeeds. It has far more time than a slow host takes: what is never so is
# found, and not what is late. A file that a process in the background writes has to be emptied before that is started:
# else what is awaited may be what an earlier one has said.
await() {
    local end=$((SECONDS + 150))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS <= end)) || fail "not so within 150 s: $*"
        sleep 0.1
    done
}

# captured FILE ADDRESS [COMMAND…]: waits until a capture into this file has whatever has gone over the cable so far. A
# mark is sent behind it, to UDP port 9 of an address at the other end, which the capture's filter lets through.
# COMMAND…: runs a program where the address is reached that way.
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
# below target/PROFILE. The release build goes first; one without verbs, such as the README's first command makes, is
# none of those wanted.
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
