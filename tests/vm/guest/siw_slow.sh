# A client of nfs3d on the iWARP fabric waits for a slow disk, and another one for nothing: the steps of the
# same script over soft-RoCE. The first is the Linux kernel's, over soft-iWARP.
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_slow.sh"
