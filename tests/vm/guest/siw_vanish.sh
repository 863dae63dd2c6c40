# A client machine of nfs3d on the iWARP fabric vanishes: the steps of the soft-RoCE script.
# idle
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_vanish.sh"
