# Addresses of the Linux kernel's NFS and of this project's programs. Scripts source this file in bash in the guest,
# after lib.sh. A script runs another script with DEVICE=siw0 to repeat its steps over soft-iWARP.
#
# DEVICE   $kernel and $kernel6   $ours      $fabric
# rxe0     10.0.0.1, fd00::1      10.0.0.1   verbs: this project's programs use the device too
# siw0     10.1.0.1, fd01::1      10.1.0.2   iwarp: the programs are at the other end of a cable, over TCP; see siw-up
#
# "${enter[@]}" COMMAND runs a command in the namespace of that address. $near is the kernel's end of the cable. $far,
# in that namespace, is the other end, with the address $across.
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${DEVICE:=rxe0} in
    rxe0) fabric=verbs kernel=10.0.0.1 kernel6=fd00::1 ours=10.0.0.1 enter=() near=v0 far=v1 across=10.0.0.2 ;;
    siw0)
        fabric=iwarp kernel=10.1.0.1 kernel6=fd01::1 ours=10.1.0.2 near=w0 far=w1 across=10.1.0.2
        enter=(nsenter --net=/run/netns/ours --)
        "$vm/siw-up"
        ;;
    *) fail "unknown DEVICE $DEVICE" ;;
esac

# run_wire_up [down]: routes packets between the ends of the cable over it, except those to soft-RoCE's own address.
run_wire_up() { [[ $DEVICE == siw0 ]] || "$vm/wire-up" "$@"; }

# cut_cable: drops all packets on the cable, which the ends do not notice. mend: delivers packets again.
cut_cable() {
    tc qdisc add dev $near clsact && tc filter add dev $near ingress matchall action drop
    "${enter[@]}" tc qdisc add dev $far clsact && "${enter[@]}" tc filter add dev $far ingress matchall action drop
}
mend_cable() {
    tc qdisc del dev $near clsact
    "${enter[@]}" tc qdisc del dev $far clsact
}
