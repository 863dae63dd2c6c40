# This project's clients on the iWARP fabric, without an RDMA device, and the Linux kernel's NFS server over soft-iWARP:
# chunks both ways, with leave to invalidate and without, callbacks, negotiation; by the steps of the same scripts over
# soft-RoCE.
export DEVICE=siw0
for steps in nfsd_client nfsd_callback nfsd_negotiation; do
    echo "-- $steps"
    bash "$(dirname "$0")/$steps.sh" || exit
done
