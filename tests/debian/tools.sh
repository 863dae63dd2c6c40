#!/bin/sh
# Uses the programs of rpcrdma-tools, in a root where the package is installed.
#
#   tools.sh COMMIT FABRICS
set -eux
test "$(rpcrdma -V)" = "rpcrdma 0.1.0"
rpcrdma --version | grep -x "commit: $1"
rpcrdma --version | grep -x "fabrics: $2"
man -w rpcrdma-doctor nfs3d rpcperf-lat
man rpcrdma-doctor | grep -q 'rpcrdma.doctor .* Check  *this  *host'
nfs3d --help | grep -q 'Export a directory'
bash -c '. /usr/share/bash-completion/completions/rpcrdma; complete -p rpcrdma'
rpcperf lat --loopback -n 100
rpcrdma doctor | grep 'ok *library: 0.1.0'
