# Invalidation by nfs3d on the iWARP fabric for the Linux kernel's client over soft-iWARP: the steps of the soft-RoCE
# script.
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_invalidate.sh"
