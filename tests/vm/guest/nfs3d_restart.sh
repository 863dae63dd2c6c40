# nfs3d is killed and restarted while the Linux kernel's client writes, renames and removes. On a hard mount no
# acknowledged change is lost or repeated, and open files remain usable.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
mount_storage
serve
mount_nfs
mount_nfs /mnt2

head -c 16000000 /dev/urandom >/run/file
exec 5</run/file
mkdir /mnt/work
# These commands fail if a change is lost or repeated, because the file to rename is missing, or a file is left over.
(
    set +e # failures are checked below
    cd /mnt/work
    i=0
    until [[ -e /run/enough ]] && ((i >= 6)); do
        i=$((i + 1))
        echo "$i" >"new-$i"
        mv -T "new-$i" "done-$i"
        if ((i % 3 == 0)); then rm "done-$i"; fi
        mkdir "dir-$i"
        rmdir "dir-$i"
    done
    echo "$i" >/run/rounds
) 2>/run/errors &
names=$!
dd if=/run/file of=/mnt/copy bs=256k conv=fsync status=none &
first=$!
# Repeats, so that a write is in progress whenever the server is killed.
(
    until [[ -e /run/enough ]]; do
        dd if=/run/file of=/mnt2/copy2 bs=64k oflag=direct conv=notrunc status=none || exit
    done
) &
second=$!

print_copy_state() { stat -c '%s %y' $export/copy2 2>/dev/null || true; }
has_progressed() { [[ $(print_copy_state) != "$before" ]]; }
for round in 1 2; do
    before=$(print_copy_state)
    await has_progressed
    sleep 1 # for the progress of the other processes, which this loop does not check
    kill -KILL "$server"
    wait "$server" 2>/dev/null || true
    sleep 1
    serve
    echo "- killed and restarted"
done
touch /run/enough
wait $first || fail "the first copy failed"
wait $second || fail "the second copy failed"
wait $names || fail "renames or removals failed: $(cat /run/errors)"
# A call whose reply is lost when the server dies is retransmitted to a server without a duplicate request cache. It
# then fails, because its change was already made. Nothing else may fail, so there is at most one failure per kill.
(($(wc -l </run/errors) <= 2)) || fail "$(cat /run/errors)"
cat /run/errors

cmp /run/file $export/copy || fail "the first copy differs"
cmp /run/file $export/copy2 || fail "the second copy differs"
rounds=$(</run/rounds)
echo "- $rounds rounds of names"
for ((i = 1; i <= rounds; i++)); do
    if ((i % 3 == 0)); then
        [[ ! -e $export/work/done-$i ]] || fail "done-$i exists after its removal"
    else
        [[ $(<"$export/work/done-$i") == "$i" ]] || fail "done-$i is missing or has other contents"
    fi
done
[[ -z $(find $export/work -name 'new-*' -o -name 'dir-*') ]] ||
    fail "$(find $export/work -name 'new-*' -o -name 'dir-*')"

echo "- unmounted under load, by force"
dd if=/dev/zero of=/mnt2/endless bs=1M count=4000 status=none 2>/dev/null &
load=$!
await test -e $export/endless
sleep 0.5 # the client has cached it
umount -f /mnt2 2>/dev/null || true
umount -l /mnt2 2>/dev/null || true
kill -KILL $load 2>/dev/null || true
wait $load 2>/dev/null || true
ls /mnt >/dev/null || fail "the other mount does not work either"
umount /mnt
stop_server
