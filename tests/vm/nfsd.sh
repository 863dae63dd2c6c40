# Functions for tests of this project's clients with the Linux kernel's NFS server. Scripts source this file in bash in
# the guest, after lib.sh.
#
# The server exports /srv/nfs, a file system in memory, at $kernel (see peers.sh), RDMA port 20049; see nfsd-up. $at:
# its address for the clients. $target: the directory of built programs.
source "$(dirname "${BASH_SOURCE[0]}")/peers.sh"
at=$fabric:$kernel
target=$(realpath "$RPCRDMA_VM_RESULTS/../../..")

# start_nfsd: runs the server until the script ends. Other servers need its port afterwards.
start_nfsd() {
    trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; rpc.nfsd 0' EXIT
    "$(dirname "${BASH_SOURCE[0]}")/nfsd-up" /srv/nfs
}

# assert_value FILE KEY VALUE: checks a value in the JSON object of a file.
assert_value() {
    local value
    value=$(grep -o "\"$2\":[^,}]*" "$1" | head -n 1)
    [[ ${value#*:} == "$3" ]] || fail "$2 is ${value#*:}, not $3: $(cat "$1")"
}

# assert_at_least FILE KEY N: checks that a number in the JSON object of a file is N or more.
assert_at_least() {
    local value
    value=$(grep -o "\"$2\":[0-9]*" "$1" | head -n 1)
    ((${value#*:} >= $3)) || fail "$2 is ${value#*:}, less than $3: $(cat "$1")"
}
