# This project's clients on the iWARP fabric, without an RDMA device, and the Linux kernel's NFS server over soft-iWARP.
# Covers chunks both ways, with and without permission to invalidate, callbacks and negotiation, by the steps of the
# soft-RoCE scripts.
export DEVICE=siw0
for steps in nfsd_client nfsd_callback nfsd_negotiation; do
    echo "-- $steps"
    bash "$(dirname "$0")/$steps.sh" || exit
done
