# The kernel's soft-iWARP without programs of this project, as a baseline for tests with the iWARP fabric. Covers the
# connection manager and RDMA, and the kernel's NFS client and server over RDMA on TCP.
source "$(dirname "$0")/../lib.sh"
export DEVICE=siw0
source "$(dirname "$0")/../peers.sh"

devinfo=$(ibv_devinfo -v -d siw0)
echo "$devinfo"
# Differences from soft-RoCE: no memory windows, and one SGE for an RDMA Read's data.
for wanted in 'transport:[[:space:]]+iWARP' 'state:[[:space:]]+PORT_ACTIVE' 'max_mw:[[:space:]]+0' \
    'max_sge_rd:[[:space:]]+1'; do
    grep -qE "$wanted" <<<"$devinfo" || fail "the device has no $wanted"
done
# Programs at the other end of the cable have only TCP.
[[ $("${enter[@]}" ip -brief link show type veth | wc -l) == 1 ]] || fail "$("${enter[@]}" ip link)"

for steps in rdma_cm nfs; do
    echo "- $steps"
    bash "$(dirname "$0")/$steps.sh"
done
