# Makes the repository's environment .venv; sourced by quickstart.sh and test.sh.
#
#     ensure_environment examples    # .venv with `pip install -e '.[examples]'`, quick when nothing changed
#     "$python" …                    # its interpreter
#
# What it keeps inside .venv: `.unfinished` while something is being installed (found at the start, it means that a
# run was killed, and the environment is made anew), and `.installed`, a line for each extra with a digest of
# pyproject.toml and of where the repository lies. Two runs at once wait for each other.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

is_python_3_11() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 </dev/null
}

# Prints a Python 3.11 that can make environments. $PYTHON, where set, is the only one tried.
find_python() {
    local candidate candidates=(python3.11 python3 python)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        is_python_3_11 "$candidate" || continue
        "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null ||
            fail "$candidate cannot make environments. Install its venv module (on Debian or Ubuntu: apt install python3.11-venv)."
        echo "$candidate"
        return
    done
    fail "Python 3.11 was not found (tried: ${candidates[*]}). Install it, or set PYTHON to its path."
}

# What the installed packages depend on; a repository that was moved needs its scripts written anew.
environment_digest() {
    "$1" - "$root" <<'EOP'
import hashlib, pathlib, sys

text = (pathlib.Path(sys.argv[1]) / "pyproject.toml").read_bytes()
print(hashlib.sha256(b"\0".join([text, sys.argv[1].encode(), sys.version.encode()])).hexdigest()[:16])
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

install_extra() {
    local extra="$1" status=0
    echo "Installing tfdist[$extra] into $venv (a minute or two the first time)"
    touch "$venv/.unfinished"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -e "$root[$extra]" </dev/null || status=$?
    ((status <= 128)) || exit "$status" # killed: .unfinished stays
    rm "$venv/.unfinished"
    ((status == 0)) || fail "pip could not install tfdist[$extra]; its message is above."
}

ensure_environment() {
    local extra="$1" digest
    trap 'exit 130' INT # pip ends with an ordinary status on Ctrl-C; without the trap bash would go on
    if command -v flock >/dev/null; then
        exec 9<"$root/tools/environment.sh"
        flock 9
    fi
    if [[ -e "$venv" ]]; then
        if [[ -e "$venv/.unfinished" ]] || ! "$python" -c '' 2>/dev/null; then
            echo "$venv is incomplete: making it anew"
            remove_environment
        elif ! is_python_3_11 "$python"; then
            fail "$venv is of $("$python" --version), tfdist needs 3.11. Remove that folder and start again."
        elif [[ -e "$venv/.root" && "$(cat "$venv/.root")" != "$root" ]]; then
            echo "$venv was made in $(cat "$venv/.root"): making it anew"
            remove_environment
        fi
    fi
    [[ -e "$venv" ]] || create_environment
    digest="$(environment_digest "$python")"
    if ! grep -qsx "$digest $extra" "$venv/.installed"; then
        install_extra "$extra"
        grep -s "^$digest " "$venv/.installed" >"$venv/.installed.new" || true
        echo "$digest $extra" >>"$venv/.installed.new"
        mv "$venv/.installed.new" "$venv/.installed"
        echo "$root" >"$venv/.root"
    fi
    exec 9<&-
    trap - INT
}
