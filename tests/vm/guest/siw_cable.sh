# The Linux kernel's client over soft-iWARP writes to and reads from nfs3d through a cable that is slow in both
# directions, with delay and loss. It keeps one connection, however long a call takes.
# idle
export DEVICE=siw0
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
modprobe -a sch_tbf sch_netem || { echo "no traffic control in this kernel"; exit 77; }

# set_cable_rate RATE: sets the rate of the cable in each direction.
set_cable_rate() {
    local end
    for end in "tc" "ip netns exec ours tc"; do
        local dev=w0
        [[ $end == tc ]] || dev=w1
        $end qdisc del dev $dev root 2>/dev/null || true
        $end qdisc add dev $dev root handle 1: tbf rate "$1" burst 64kb latency 2s
        $end qdisc add dev $dev parent 1:1 handle 2: netem delay 10ms loss 1% limit 1000
    done
}

mount_storage
serve
mount_nfs
connects=$(print_xprt_figure /mnt 3)
# All steps but the last take longer than progress_timeout.
for step in "256kbit 640" "1mbit 2560" "8mbit 16384" "100mbit 16384"; do
    read -r rate kbytes <<<"$step"
    head -c "${kbytes}K" /dev/urandom >/run/data
    set_cable_rate "$rate"
    began=$SECONDS
    dd if=/run/data of=/mnt/data bs=1M conv=fsync status=none
    cmp /run/data $export/data || fail "$rate: the server's file differs"
    wrote=$((SECONDS - began)) began=$SECONDS
    echo 3 >/proc/sys/vm/drop_caches
    cmp /run/data /mnt/data || fail "$rate: the data read by the client differs"
    echo "- $rate: $kbytes KiB written in $wrote s, read in $((SECONDS - began)) s"
    (($(print_xprt_figure /mnt 3) == connects)) || fail "$rate: the client reconnected: $(cat /run/nfs3d)"
done
set_cable_rate 1gbit
umount /mnt
stop_server
