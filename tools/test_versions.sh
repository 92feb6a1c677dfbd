#!/usr/bin/env bash
# Runs the quick tests, and the core of those that compare the strategies, on other releases of Python and TensorFlow
# than .venv's. Takes some ten minutes for a pair on two cores, half of them to install it.
#
#     tools/test_versions.sh                         # every pair that there is a Python for
#     tools/test_versions.sh 3.12:2.20 3.13:2.21     # these (PYTHON:TENSORFLOW)
#     tools/test_versions.sh --has 3.12              # whether there is such a Python, by the status
#
# Each pair has an environment of its own, .venv-3.12-2.20, with the newest packages that pyproject.toml admits. Pythons
# are looked for on the PATH and among pyenv's. Ends with a line for each pair, and with status 1 if one failed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

RELEASES=(2.20 2.21)
CORE="sgd or adam_clipped or accumulation or uneven or batch_norm or two_outputs or embedding or overflow or ema"

python_of() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3; do
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

test_pair() {
    local release="${1#*:}" venv="$root/.venv-${1/:/-}" python
    if ! python="$(python_of "${1%:*}")"; then
        echo "There is no Python ${1%:*}."
        return 1
    fi
    [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv" || return
    python="$venv/bin/python"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -e ".[dev]" "tensorflow==$release.*" \
        </dev/null || return
    [[ "${TFDIST_SKIP_HOROVOD:-}" == 1 ]] || "$python" -m tfdist.build_horovod </dev/null || return
    local status=0
    "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" </dev/null || status=1
    "$python" -m pytest -k "$CORE" tests/equivalence </dev/null || status=1
    return "$status"
}

if [[ "${1:-}" == --has ]]; then
    python_of "$2" >/dev/null || exit 1
    exit 0
fi

pairs=("$@")
if ((${#pairs[@]} == 0)); then
    for version in 3.11 3.12 3.13; do
        if python_of "$version" >/dev/null; then
            for release in "${RELEASES[@]}"; do pairs+=("$version:$release"); done
        else
            echo "There is no Python $version on this machine: not tested with it."
        fi
    done
fi

status=0
said=()
for pair in "${pairs[@]}"; do
    echo "== Python ${pair%:*}, TensorFlow ${pair#*:}"
    if test_pair "$pair"; then said+=("passed  $pair"); else said+=("FAILED  $pair"); status=1; fi
done
printf '%s\n' "${said[@]}"
exit "$status"
