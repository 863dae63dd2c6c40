# One client of nfs3d on the iWARP fabric waits for a slow disk without delaying another: the steps of the soft-RoCE
# script. The first is the Linux kernel's client over soft-iWARP.
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_slow.sh"
