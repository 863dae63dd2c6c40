#!/bin/sh
# Checks the unit of nfs3d with systemd. The package neither enables nor starts it.
set -eux
warnings=$(systemd-analyze verify nfs3d.service 2>&1)
test -z "$warnings"
systemd-analyze security --offline=true --no-pager --threshold=40 nfs3d.service
test ! -e /etc/systemd/system/multi-user.target.wants/nfs3d.service
