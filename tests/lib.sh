# What tests/run, tests/flakes and tests/vm/run share. Sourced, by bash. Whoever sources it sets $logs, a directory.

# attended COMMAND…: runs it so that a signal to this script is heard at once, and not when it ends.
attended() {
    "$@" &
    wait $!
}

# apt PACKAGE…: installs what is missing, if that is possible without asking; says so if not.
apt() {
    local as=()
    if ((EUID != 0)); then as=(sudo -n); fi
    if ! command -v apt-get >/dev/null || { ((EUID != 0)) && ! sudo -n true 2>/dev/null; }; then
        echo "cannot install $* (no apt-get, or neither root nor sudo)"
        return 1
    fi
    echo "installing $*"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@")
    if ! attended timeout 300 "${as[@]}" "${install[@]}" >"$logs/apt.log" 2>&1; then
        attended timeout 120 "${as[@]}" apt-get update >>"$logs/apt.log" 2>&1 || true
        attended timeout 300 "${as[@]}" "${install[@]}" >>"$logs/apt.log" 2>&1 ||
            { echo "apt-get failed: see $logs/apt.log"; return 1; }
    fi
}

# apt_update: gets the lists of packages, if that is possible without asking.
apt_update() {
    local as=()
    if ((EUID != 0)); then as=(sudo -n); fi
    timeout 120 "${as[@]}" apt-get update
}

# Features of the verbs fabric. Always with the whole workspace: what its crates ask of others' crates, and of each
# other, is then the same in each build, and nothing is built twice.
# shellcheck disable=SC2034
verbs='--features rpcrdma/verbs,rpcrdma-fabric/verbs,rpcrdma-bench/verbs,rpcrdma-tools/verbs,rpcrdma-tests/verbs'
