#!/bin/sh
# Builds and runs a program with the shared and with the static library of librpcrdma-dev.
set -eux
cd /tmp
cat >use.c <<'C'
#include <rpcrdma.h>
#include <stdio.h>
#include <string.h>
int main(void) { return puts(rpcrdma_version()) < 0 || strcmp(rpcrdma_version(), "0.1.0") != 0; }
C
cc -Wall -Werror use.c $(pkg-config --cflags --libs rpcrdma) -o use
./use
ldd use | grep 'librpcrdma\.so\.0'
cc -Wall -Werror use.c $(pkg-config --cflags rpcrdma) -Wl,-Bstatic -lrpcrdma -Wl,-Bdynamic \
    $(pkg-config --static --libs rpcrdma) -o use-static
./use-static
if ldd use-static | grep librpcrdma; then exit 1; fi
