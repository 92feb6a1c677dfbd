#!/usr/bin/env bash
# Makes what the tests need in .venv (Horovod included), then runs ruff and pytest. Arguments go to pytest.
#
#     tools/test.sh                          # everything, as in CI
#     tools/test.sh -m 'not slow' tests/data
#     TFDIST_SKIP_HOROVOD=1 tools/test.sh    # on a machine that cannot build Horovod
#
# Ends with pytest's closing line, and with pytest's status, or ruff's if pytest passed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment dev
cd "$root"
[[ "${TFDIST_SKIP_HOROVOD:-}" == 1 ]] || "$python" tools/build_horovod.py </dev/null

ruff_status=0
"$python" -m ruff check --quiet . || ruff_status=$?
((ruff_status == 0)) || echo "test.sh: ruff found the above; the tests run all the same, and the end will be status $ruff_status"

pytest_status=0
"$python" -m pytest "$@" </dev/null || pytest_status=$?
exit $((pytest_status ? pytest_status : ruff_status))
