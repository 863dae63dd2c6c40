# Where the Linux kernel's NFS and this project's programs meet: sourced, by bash, in the guest, behind lib.sh. A script
# runs another one with DEVICE=siw0 to have its steps over soft-iWARP.
#
# DEVICE   $kernel and $kernel6   $ours      $fabric
# rxe0     10.0.0.1, fd00::1      10.0.0.1   verbs: this project's programs use the device, too
# siw0     10.1.0.1, fd01::1      10.1.0.2   iwarp: they are at the other end of a cable, over TCP; see siw-up
#
# "${enter[@]}" COMMAND runs a program of this project where it can have that address; or one that looks at it there.
# $near is the kernel's end of the cable, and $far, there, the other one, which has the address $across.
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${DEVICE:=rxe0} in
    rxe0) fabric=verbs kernel=10.0.0.1 kernel6=fd00::1 ours=10.0.0.1 enter=() near=v0 far=v1 across=10.0.0.2 ;;
    siw0)
        fabric=iwarp kernel=10.1.0.1 kernel6=fd01::1 ours=10.1.0.2 near=w0 far=w1 across=10.1.0.2
        enter=(nsenter --net=/run/netns/ours --)
        "$vm/siw-up"
        ;;
    *) fail "no DEVICE is called $DEVICE" ;;
esac

# wire [down]: has on the cable what goes from one end of it to the other. That to soft-RoCE's own address is not.
wire() { [[ $DEVICE == siw0 ]] || "$vm/wire-up" "$@"; }

# cut_off, mend: from here on nothing that is sent over the cable arrives; the other end notices nothing else.
cut_off() {
    tc qdisc add dev $near clsact && tc filter add dev $near ingress matchall action drop
    "${enter[@]}" tc qdisc add dev $far clsact && "${enter[@]}" tc filter add dev $far ingress matchall action drop
}
mend() {
    tc qdisc del dev $near clsact
    "${enter[@]}" tc qdisc del dev $far clsact
}
