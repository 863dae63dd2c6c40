# Short runs of the compare scripts, which must print figures. For compare-perftest see perftest.sh.
# pair
source "$(dirname "$0")/../lib.sh"
trap 'rpc.nfsd 0 2>/dev/null || true' EXIT

# assert_rows N PATTERN COMMAND…: checks that the command prints N rows that match PATTERN, which requires figures.
assert_rows() {
    local n=$1 pattern=$2 began=$SECONDS
    shift 2
    "$@" >/run/table || fail "$*: $(</run/table)"
    cat /run/table
    (($(grep -cE "$pattern" /run/table) == n)) || fail "$*: not $n rows with figures"
    echo "- ${1##*/}: $((SECONDS - began)) s"
}

# With one round, medians still have a range (minimum to maximum).
assert_rows 6 '^\| [0-9]+ \| [^|]+(\| [1-9][0-9.]* \([^|]*\) ){3}\|$' "$(dirname "$0")/../compare-mtu" 1 '-n 5'
assert_rows 2 '^\| [0-9]+ µs (\| [1-9][0-9.]* \([^|]*\) ){3}\|$' "$(dirname "$0")/../compare-busy-poll" 1 '-n 50'
export COMPARE_ROUNDS=1 COMPARE_SECONDS=1 COMPARE_MIB=8
assert_rows 4 ' [1-9][0-9]* +[1-9][0-9]* +[0-9.]+ ' "$(dirname "$0")/../compare-nfsd" '4k random read' stat
