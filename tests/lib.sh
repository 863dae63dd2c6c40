# Shared by tests/run, tests/flakes and tests/vm/run. Sourced by bash. The caller sets $logs, a directory.

# attended COMMAND…: runs it in the background, so that this script handles signals at once.
attended() {
    "$@" &
    wait $!
}

# apt PACKAGE…: installs packages if that needs no password. Otherwise prints the reason.
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

# apt_update: updates the package lists if that needs no password.
apt_update() {
    local as=()
    if ((EUID != 0)); then as=(sudo -n); fi
    timeout 120 "${as[@]}" apt-get update
}

# Features of the verbs fabric. Always build the whole workspace with them. Then each build enables the same features of
# all crates, and nothing is built twice.
# shellcheck disable=SC2034
verbs='--features rpcrdma/verbs,rpcrdma-fabric/verbs,rpcrdma-bench/verbs,rpcrdma-tools/verbs,rpcrdma-tests/verbs'
