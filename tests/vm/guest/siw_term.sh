# nfs3d on the iWARP fabric is asked to end, and started again, amid fio of the Linux kernel's client over
# soft-iWARP: the steps of the same script over soft-RoCE.
DEVICE=siw0 bash "$(dirname "$0")/nfs3d_term.sh"
