# A client machine of nfs3d on the iWARP fabric is gone from one moment to the next: the steps of the same
# script over soft-RoCE.
# idle
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_vanish.sh"
