# Two network namespaces, near (192.0.2.1) and far (192.0.2.2), joined by a cable like two hosts. Scripts source this
# file in bash in the guest, after lib.sh. The namespaces are deleted when the script ends.
ip netns add near
ip netns add far
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    ip netns delete near; ip netns delete far' EXIT
ip link add n0 netns near type veth peer name f0 netns far
ip -netns near address add 192.0.2.1/24 dev n0
ip -netns far address add 192.0.2.2/24 dev f0
ip -netns near link set n0 up
ip -netns far link set f0 up
# set_link_options OPTION…: sets link options at both ends of the cable.
set_link_options() {
    ip -netns near link set n0 "$@"
    ip -netns far link set f0 "$@"
}

