#!/usr/bin/env bash
# Makes what the tests need in .venv (Horovod included), then runs ruff, mypy and pytest. Arguments go to pytest.
#
#     tools/test.sh                          # everything, as in CI
#     tools/test.sh --quick                  # without the slow ones
#     tools/test.sh -m 'not slow' tests/data
#     tools/test.sh -n 0 -x tests/data       # in one process
#     TFDIST_SKIP_HOROVOD=1 tools/test.sh    # on a machine that cannot build Horovod
#
# Ends with pytest's closing line, and with pytest's status, or that of ruff or mypy if pytest passed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment dev
unset PYTHONDONTWRITEBYTECODE  # else each of some thousand processes compiles tfdist anew
cd "$root"
[[ "${TFDIST_SKIP_HOROVOD:-}" == 1 ]] || "$python" -m tfdist.build_horovod </dev/null

checked=0
"$python" -m ruff check --quiet . || checked=$?
"$python" -m mypy --no-error-summary || checked=$?
"$python" -m mypy --no-error-summary --config-file tests/mypy.ini || checked=$?
((checked == 0)) || echo "test.sh: ruff or mypy found the above; the tests run all the same, and the end will be status $checked"

# Three processes for two cores, each with whole files: tests wait for processes that they start. Each may need 5 GiB.
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))' 2>/dev/null || getconf _NPROCESSORS_ONLN)
gibibytes=$(($(getconf _PHYS_PAGES) / 1024 * $(getconf PAGESIZE) / 1024 / 1024))
jobs=$(((3 * cores + 1) / 2))
((jobs * 5 <= gibibytes)) || jobs=$((gibibytes / 5 > 1 ? gibibytes / 5 : 1))
# A process that crashes ends the run: pytest-xdist would hang where it gave the crashed one's files to another.
arguments=(-n "$jobs" --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
for argument; do
  [[ "$argument" == --quick ]] && arguments+=(-m "not slow") || arguments+=("$argument")
done
pytest_status=0
"$python" -m pytest "${arguments[@]}" </dev/null || pytest_status=$?
exit $((pytest_status ? pytest_status : checked))
