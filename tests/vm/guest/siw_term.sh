# nfs3d on the iWARP fabric is stopped and restarted during fio of the Linux kernel's client over soft-iWARP: the steps
# of the soft-RoCE script.
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_term.sh"
