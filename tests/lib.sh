# Functions for the scripts of this directory, which source it in bash. For apt_install, the caller sets $logs to a
# directory.

# run_interruptibly COMMAND…: runs a command in the background and waits for it, so that this script handles signals
# immediately.
run_interruptibly() {
    "$@" &
    wait $!
}

# A command line for `bash -c`, which runs "$2"… and writes its exit status to the file "$1". Bash forgets the status of
# a background command when a later child gets the same process number, which happens within half an hour of builds.
# `timeout` sends SIGTERM to the command and to this shell, which then waits for the command.
# shellcheck disable=SC2016,SC2034
recorded='trap : TERM; "${@:2}"; status=$?; echo "$status" >"$1"; exit "$status"'

# wait_for_recorded PROCESS FILE: waits for a command that was started through $recorded, and returns its exit status.
wait_for_recorded() {
    local status=0
    wait "$1" 2>/dev/null || status=$?
    ((status != 127)) || [[ ! -e $2 ]] || status=$(<"$2")
    return "$status"
}

# apt_install PACKAGE…: installs packages if that needs no password. Otherwise prints the reason.
apt_install() {
    local as=()
    if ((EUID != 0)); then as=(sudo -n); fi
    if ! command -v apt-get >/dev/null || { ((EUID != 0)) && ! sudo -n true 2>/dev/null; }; then
        echo "cannot install $* (no apt-get, or neither root nor sudo)"
        return 1
    fi
    echo "installing $*"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@")
    if ! run_interruptibly timeout 300 "${as[@]}" "${install[@]}" >"$logs/apt.log" 2>&1; then
        run_interruptibly timeout 120 "${as[@]}" apt-get update >>"$logs/apt.log" 2>&1 || true
        run_interruptibly timeout 300 "${as[@]}" "${install[@]}" >>"$logs/apt.log" 2>&1 ||
            { echo "apt-get failed: see $logs/apt.log"; return 1; }
    fi
}

# apt_update: updates the package lists if that needs no password.
apt_update() {
    local as=()
    if ((EUID != 0)); then as=(sudo -n); fi
    timeout 120 "${as[@]}" apt-get update
}

# Features of the verbs fabric. Always build the whole workspace with them, so that each build enables the same features
# of all crates and no crate is built twice.
# shellcheck disable=SC2034
verbs='--features rpcrdma/verbs,rpcrdma-fabric/verbs,rpcrdma-bench/verbs,rpcrdma-tools/verbs,rpcrdma-tests/verbs'
