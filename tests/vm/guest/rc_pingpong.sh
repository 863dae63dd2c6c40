# A reliable connection carries messages of four packets in both directions, unchanged.
source "$(dirname "$0")/../lib.sh"

options=(-d rxe0 -g 1 -s 4096 -n 200 -c) # -c: checks received bytes
ibv_rc_pingpong "${options[@]}" &
server=$!
await is_listening 18515
ibv_rc_pingpong "${options[@]}" 10.0.0.1
wait "$server"
