# The compare scripts that a person runs work, and have figures: each in short. compare-perftest is in perftest.sh.
source "$(dirname "$0")/../lib.sh"
trap 'rpc.nfsd 0 2>/dev/null || true' EXIT

# rows N PATTERN COMMAND…: its output has so many rows, each with figures.
rows() {
    local n=$1 pattern=$2 began=$SECONDS
    shift 2
    "$@" >/run/table || fail "$*: $(</run/table)"
    cat /run/table
    (($(grep -cE "$pattern" /run/table) == n)) || fail "$*: not $n rows with figures"
    echo "- ${1##*/}: $((SECONDS - began)) s"
}

# Medians are of a round of one: (least to most) is there, too.
rows 6 '^\| [0-9]+ \| [^|]+(\| [1-9][0-9.]* \([^|]*\) ){3}\|$' "$(dirname "$0")/../compare-mtu" 1 '-n 20'
rows 2 '^\| [0-9]+ µs (\| [1-9][0-9.]* \([^|]*\) ){3}\|$' "$(dirname "$0")/../compare-busy-poll" 1 '-n 200'
export COMPARE_ROUNDS=1 COMPARE_SECONDS=1 COMPARE_MIB=8
rows 4 ' [1-9][0-9]* +[1-9][0-9]* +[0-9.]+ ' "$(dirname "$0")/../compare-nfsd" '4k random read' stat
