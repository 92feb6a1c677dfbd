#!/usr/bin/env bash
# Checks tfdist on this machine's GPUs, in some five minutes, and writes what it finds into one JSON file.
#
#     tools/gpu_check.sh                                # gpu_check.json: please attach it to a report
#     TFDIST_PYTHON=venv/bin/python tools/gpu_check.sh  # in an environment that has tfdist[gpu,examples]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-gpu"
python="${TFDIST_PYTHON:-$venv/bin/python}"
if [[ -z "${TFDIST_PYTHON:-}" ]]; then
    [[ -x "$python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -e "$root[gpu,examples]"
fi
exec "$python" "$root/tools/gpu_check.py" "$@"
