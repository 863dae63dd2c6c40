#!/bin/sh
# nfs3d as a service of systemd: started, called, stopped; and removed while it runs and is enabled.
set -eux
mkdir /srv/data
echo 'NFS3D_OPTIONS=/srv/data --listen iwarp:127.0.0.1:20049' >/etc/default/nfs3d
test "$(systemctl is-enabled nfs3d)" = disabled
is_served() { timeout 60 rpcrdma ping --count 3 --interval 0 iwarp:127.0.0.1:20049; }
# nfs3d does not notify systemd when it listens.
wait_until_served() { for try in $(seq 100); do ! is_served || return 0; sleep 0.1; done; return 1; }

systemctl start nfs3d
wait_until_served
test -e /var/lib/nfs3d/key
systemctl stop nfs3d
test "$(systemctl show --property Result --property ExecMainStatus nfs3d)" = 'Result=success
ExecMainStatus=0'

systemctl enable --now nfs3d
wait_until_served
test -e /etc/systemd/system/multi-user.target.wants/nfs3d.service
apt-get remove -y rpcrdma-tools
if pidof nfs3d; then exit 1; fi
test ! -L /etc/systemd/system/multi-user.target.wants/nfs3d.service
test -e /var/lib/nfs3d/key
dpkg --purge rpcrdma-tools
test ! -e /var/lib/nfs3d
