#!/usr/bin/env bash
# Makes the environment of the other frameworks that benchmarks compare with, in .venv-peers: PyTorch, JAX,
# and grain, pinned.
#
#     tools/peers.sh          # once; some gigabytes
#     python benchmarks/peers.py
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-peers"
[[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$root/requirements/peers.txt"
"$venv/bin/python" -c "
import grain, jax, torch
print(*(f'{each.__name__} {each.__version__}' for each in (torch, jax, grain)))"
