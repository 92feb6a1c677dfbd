#!/usr/bin/env bash
# Runs the tests, then prints for each room of tfdist/ how many of its lines some process of the tests ran.
#
#     tools/coverage.sh               # arguments go to tools/test.sh
#     tools/coverage.sh tests/data
#
# Afterwards, for each file, or for each line in build/coverage/html:
#
#     .venv/bin/python -m coverage report --data-file=build/coverage/lines
#     .venv/bin/python -m coverage html --data-file=build/coverage/lines --directory=build/coverage/html
#
# What a process ran that was killed does not count, nor what autograph rewrote. Ends with the status of tools/test.sh.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
rm -rf build/coverage
mkdir -p build/coverage
export COVERAGE_FILE="$root/build/coverage/lines"

status=0
COVERAGE_PROCESS_START="$root/pyproject.toml" tools/test.sh "$@" || status=$?
.venv/bin/python -m coverage combine --quiet
.venv/bin/python -m coverage report --no-skip-covered | awk '
    /^tfdist\// {
        split($1, parts, "/")
        room = parts[2] ~ /\.py$/ ? "tfdist" : parts[2]
        lines[room] += $2; run[room] += $2 - $3
        lines["whole package"] += $2; run["whole package"] += $2 - $3
    }
    END {
        for (room in lines) if (lines[room])
            printf "%-14s %6d of %6d lines: %5.1f %%\n", room, run[room], lines[room], 100 * run[room] / lines[room]
    }' | sort
exit "$status"
