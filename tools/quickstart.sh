#!/usr/bin/env bash
# From a fresh clone to a trained model: makes .venv and trains the handwritten digits under MirroredStrategy with
# two logical CPU devices. Safe to run again, and quick the second time.
#
#     tools/quickstart.sh                                     # needs Python 3.11, 3.12 or 3.13
#     tools/quickstart.sh --gin_param='train.epochs = 3'      # arguments go to tfdist.main
#     PYTHON=/opt/python3.12/bin/python3 tools/quickstart.sh  # which Python makes .venv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment quickstart

cd "$root"
run_dir="runs/digits-$(date +%Y%m%d-%H%M%S)-$$"
for argument in "$@"; do
    [[ "$argument" != --run_dir=* ]] || run_dir="${argument#--run_dir=}"
done

"$python" -m tfdist.main \
    --gin_file=configs/experiments/digits.gin \
    --gin_file=configs/strategies/mirrored.gin \
    --gin_param='mirrored.Mirrored.num_cpu_devices = 2' \
    --run_dir="$run_dir" \
    "$@"

cat <<EOM

The run is in $run_dir (below $root)
  what came out:    cat $run_dir/result.json
  how it got there: .venv/bin/tensorboard --logdir=$run_dir/tensorboard
  run it again:     .venv/bin/tfdist train $run_dir/config.gin --run_dir=runs/again
EOM
