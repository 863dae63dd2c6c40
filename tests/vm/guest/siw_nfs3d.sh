# nfs3d on the iWARP fabric, without an RDMA device, mounted by the Linux kernel's client over soft-iWARP: those steps of
# the soft-RoCE scripts that depend on the fabric.
export DEVICE=siw0
for steps in nfs3d nfs3d_load nfs3d_restart; do
    echo "-- $steps"
    bash "$(dirname "$0")/$steps.sh" || exit
done
