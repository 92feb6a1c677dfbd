# Makes the repository's environment .venv; sourced by quickstart.sh and test.sh.
#
#     ensure_environment quickstart    # .venv with what requirements/quickstart.txt pins, quick when nothing changed
#     "$python" …                      # its interpreter
#
# What it keeps inside .venv: `.unfinished` while something is being installed (found at the start, it means that a
# run was killed, and the environment is made anew), and `.installed`, a line for each set of requirements with a digest
# of what they are and of where the repository lies. Two runs at once wait for each other.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

is_usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 </dev/null
}

# Prints a Python that can make environments. $PYTHON, where set, is the only one tried.
find_python() {
    local candidate candidates=(python3.11 python3.12 python3.13 python3 python)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        is_usable "$candidate" || continue
        "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null ||
            fail "$candidate cannot make environments. Install its venv module (on Debian or Ubuntu: apt install python3-venv)."
        echo "$candidate"
        return
    done
    fail "Python 3.11, 3.12 or 3.13 was not found (tried: ${candidates[*]}). Install it, or set PYTHON to its path."
}

# What the installed packages depend on; a repository that was moved needs its scripts written anew.
environment_digest() {
    "$1" - "$root" <<'EOP'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
files = [root / "pyproject.toml", root / "setup.cfg", *sorted((root / "requirements").glob("*.txt"))]
texts = [*(file.read_bytes() for file in files), sys.argv[1].encode(), sys.version.encode()]
print(hashlib.sha256(b"\0".join(texts)).hexdigest()[:16])
EOP
}

create_environment() {
    local base
    base="$(find_python)"
    echo "Creating $venv with $("$base" --version)"
    mkdir "$venv"
    touch "$venv/.unfinished"
    "$base" -m venv "$venv"
}

# Takes an environment out of the way first, so that one half deleted is never taken for a whole one.
remove_environment() {
    rm -rf "$venv-removed"
    mv "$venv" "$venv-removed"
    rm -rf "$venv-removed"
}

# Exactly what is pinned, each file checked against its digest, and tfdist itself on top.
install_requirements() {
    local name="$1" status=0 pip=("$python" -m pip install --quiet --disable-pip-version-check --no-input)
    echo "Installing requirements/$name.txt into $venv (a minute or two the first time)"
    touch "$venv/.unfinished"
    "${pip[@]}" --require-hashes -r "$root/requirements/$name.txt" </dev/null &&
        "${pip[@]}" --no-deps --no-build-isolation -e "$root" </dev/null || status=$?
    ((status <= 128)) || exit "$status" # killed: .unfinished stays
    rm "$venv/.unfinished"
    ((status == 0)) || fail "pip could not install requirements/$name.txt; its message is above."
}

ensure_environment() {
    local name="$1" digest
    trap 'exit 130' INT # pip ends with an ordinary status on Ctrl-C; without the trap bash would go on
    if command -v flock >/dev/null; then
        exec 9<"$root/tools/environment.sh"
        flock 9
    fi
    if [[ -e "$venv" ]]; then
        if [[ -e "$venv/.unfinished" ]] || ! "$python" -c '' 2>/dev/null; then
            echo "$venv is incomplete: making it anew"
            remove_environment
        elif ! is_usable "$python"; then
            fail "$venv is of $("$python" --version), tfdist needs 3.11 to 3.13. Remove that folder and start again."
        elif [[ -e "$venv/.root" && "$(cat "$venv/.root")" != "$root" ]]; then
            echo "$venv was made in $(cat "$venv/.root"): making it anew"
            remove_environment
        fi
    fi
    [[ -e "$venv" ]] || create_environment
    digest="$(environment_digest "$python")"
    if ! grep -qsx "$digest $name" "$venv/.installed"; then
        install_requirements "$name"
        grep -s "^$digest " "$venv/.installed" >"$venv/.installed.new" || true
        echo "$digest $name" >>"$venv/.installed.new"
        mv "$venv/.installed.new" "$venv/.installed"
        echo "$root" >"$venv/.root"
    fi
    exec 9<&-
    trap - INT
}
