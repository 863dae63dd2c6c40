# The device meets the engine's requirements: active, with shared receive queues, memory windows of type 2, and the GIDs
# of the guest's addresses.
source "$(dirname "$0")/../lib.sh"

devinfo=$(ibv_devinfo -v -d rxe0)
echo "$devinfo"

# assert_device_has PATTERN: checks that the description of the device matches.
assert_device_has() { grep -qE "$1" <<<"$devinfo" || fail "the device has no $1"; }

assert_device_has 'state:[[:space:]]+PORT_ACTIVE'
assert_device_has 'link_layer:[[:space:]]+Ethernet'
assert_device_has 'MEM_MGT_EXTENSIONS'
assert_device_has 'MEM_WINDOW_TYPE_2B'
assert_device_has 'GID\[ *1\]:[[:space:]]+::ffff:10\.0\.0\.1, RoCE v2'
assert_device_has 'GID\[ *2\]:[[:space:]]+fd00::1, RoCE v2'

# assert_at_least N FIELD: checks the value of a field in the description of the device.
assert_at_least() {
    local value
    value=$(awk -v field="$2:" '$1 == field { print $2 }' <<<"$devinfo")
    ((${value:-0} >= $1)) || fail "$2 is ${value:-missing}, expected at least $1"
}

assert_at_least 64 max_srq
assert_at_least 4096 max_srq_wr
assert_at_least 1024 max_mw
assert_at_least 16 max_qp_rd_atom
assert_at_least 2 max_sge

[[ -c /dev/infiniband/rdma_cm && -c /dev/infiniband/uverbs0 ]] || fail "device nodes are missing: $(ls /dev/infiniband)"
[[ $(ulimit -l) == unlimited ]] || fail "the limit of locked memory is $(ulimit -l) KiB"
