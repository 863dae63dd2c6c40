# For tests of this project's clients with the Linux kernel's NFS server: sourced, by bash, in the guest, behind lib.sh.
#
# The server exports /srv/nfs, a file system in memory, at 10.0.0.1, RDMA port 20049; see nfsd-up. $target: where programs are built.
target=$(realpath "$RPCRDMA_VM_RESULTS/../../..")

# program NAME PATH BUILD: sets the variable NAME to a program with the verbs fabric, built by the command BUILD at PATH below target/PROFILE.
program() {
    local path profile
    path=${!1:-}
    for profile in release debug; do
        [[ -n $path || ! -x $target/$profile/$2 ]] || path=$target/$profile/$2
    done
    if [[ -z $path ]] || ! "$path" ping --help 2>/dev/null | grep -q verbs && ! "$path" --help | grep -q verbs; then
        echo "no ${2##*/} with verbs: $3"
        exit 77
    fi
    printf -v "$1" %s "$path"
}

# up: has the server running, until the script ends: other servers want its port then.
up() {
    trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; rpc.nfsd 0' EXIT
    "$(dirname "${BASH_SOURCE[0]}")/nfsd-up" /srv/nfs
}

# is FILE KEY VALUE: in the JSON object of a file.
is() {
    local value
    value=$(grep -o "\"$2\":[^,}]*" "$1" | head -n 1)
    [[ ${value#*:} == "$3" ]] || fail "$2 is ${value#*:}, not $3: $(cat "$1")"
}

# at_least FILE KEY N: as above, for numbers.
at_least() {
    local value
    value=$(grep -o "\"$2\":[0-9]*" "$1" | head -n 1)
    ((${value#*:} >= $3)) || fail "$2 is ${value#*:}, less than $3: $(cat "$1")"
}
