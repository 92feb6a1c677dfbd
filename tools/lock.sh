#!/usr/bin/env bash
# Pins what pyproject.toml asks for, in requirements/*.txt: exact versions with the digests of their files, for every
# Python that tfdist runs on. Run it after a change there, or to take newer releases; then run the tests.
#
#     tools/lock.sh              # keeps the pins that still fit
#     tools/lock.sh --upgrade    # takes the newest releases; arguments go to uv
#
# Needs `uv` (pip install uv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build_requirements() {
    python3 - <<'EOP'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")
EOP
}

# $1: the file; the rest: more arguments of uv.
pin() {
    local file="requirements/$1.txt"
    shift
    build_requirements | uv pip compile --quiet --universal --python-version=3.11 --generate-hashes --no-emit-index-url \
        --no-annotate --custom-compile-command=tools/lock.sh --output-file="$file" "$@" pyproject.toml -
}

mkdir -p requirements
pin dev --extra=dev "$@"
pin quickstart --extra=cpu --extra=examples --constraints=requirements/dev.txt "$@"
