#!/bin/bash
# Trains under horovodrun on hosts that this one, the first, reaches by ssh: bash horovodrun.sh
#
# Change:
#   - `hosts`, as HOST:SLOTS; a slot is one process, one for each GPU. This host is the first;
#   - `min_slots`: with fewer than all, a start leaves out the hosts that do not answer;
#   - `arguments`. All hosts must see the repository, the environment and the run directory.
#
# horovodrun ends with 1, whatever its workers ended with. So a mistake of the user's is looked for before the first
# start, and whatever fails later is tried again from the newest checkpoint, a training that diverged, too.

hosts=(host1:4 host2:4)
min_slots=8
max_restarts=3
arguments=(--gin_file=configs/experiments/digits.gin --run_dir=/shared/digits)
python=python
options=(--gloo) # add --network-interfaces eth0 where the hosts' common network is not found

set -uo pipefail

# A mistake in the configuration would be the same on every host and at every start.
"$python" -m tfdist.main "${arguments[@]}" --mode=validate >/dev/null || exit

answers() { timeout 5 ssh -o BatchMode=yes -o ConnectTimeout=4 "$1" true 2>/dev/null; }

running=
trap '[[ -z "$running" ]] || kill -TERM "$running"; wait; exit 143' TERM INT
pause=2
status=1
for ((start = 0; start <= max_restarts; start++)); do
    if ((start > 0)); then
        echo "ended with status $status; start $((start + 1)) in $pause s" >&2
        sleep "$pause"
        pause=$((pause < 30 ? 2 * pause : 60))
    fi
    slots="${hosts[0]##*:}"
    there="${hosts[0]}"
    for host in "${hosts[@]:1}"; do
        if answers "${host%:*}"; then
            slots=$((slots + ${host##*:}))
            there+=",$host"
        fi
    done
    if ((slots < min_slots)); then
        echo "only $there answered: $slots slots of $min_slots" >&2
        status=1
        continue
    fi
    horovodrun "${options[@]}" -np "$slots" -H "$there" "$python" -m tfdist.main "${arguments[@]}" &
    running=$!
    status=0
    wait "$running" || status=$?
    running=
    ((status == 0)) && break
done
exit "$status"
