#!/bin/sh
# The C examples of librpcrdma-dev, built as by a user, and their Rust peers: the server of the examples and the clients
# kv-client and `rpcrdma ping`, the client of the examples and `rpcperf serve`.
#
#   served.sh PORT    PORT and the next one are free; kv-client of tests/embed is in /tmp
set -eux
cd /tmp
for program in kv_server bench_client; do
    cc -Wall -Wextra -Werror "/usr/share/doc/librpcrdma-dev/examples/$program.c" -o "$program" \
        $(pkg-config --cflags --libs rpcrdma) -pthread
done
# serve COMMAND…: starts a server, and waits until it listens. Its log is emptied before, because a line of an
# earlier server would end the wait.
serve() {
    : >server.log
    "$@" >>server.log 2>&1 &
    server=$!
    for try in $(seq 300); do
        ! grep '^listening' server.log || return 0
        kill -0 "$server"
        sleep 0.1
    done
    return 1
}
for fabric in soft:packages "iwarp:127.0.0.1:$1"; do
    serve ./kv_server -a "$fabric"
    timeout 60 rpcrdma ping --count 3 --interval 0 "$fabric" 0x20004b56 1
    timeout 120 ./kv-client "$fabric" fill 1
    timeout 120 ./kv-client "$fabric" verify 1
    # The store does not have the values of seed 2.
    if timeout 120 ./kv-client "$fabric" verify 2; then exit 1; fi
    kill -TERM "$server"
    wait "$server" # it drains
done
for fabric in soft:packages-2 "iwarp:127.0.0.1:$(($1 + 1))"; do
    serve rpcperf serve --listen "$fabric" --only calls
    timeout 60 ./bench_client -a "$fabric" -o read -s 65536 -t 4 -D 1
    kill "$server"
    wait "$server" || true
done
