#!/bin/sh
# Make a virtual environment with a Python that supports MXNet.
#
#   make_venv.sh DIR
#
# Takes $PYTHON if it is set, else the first suitable interpreter found, else one from uv.
set -eu
dir=${1:?usage: make_venv.sh DIR}

suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

can_make_venv() {
    "$1" -c 'import venv, ensurepip' 2>/dev/null
}

without_venv=
for python in ${PYTHON:-python3 python3.11 python3.12 python3.10 python3.9}; do
    if suitable "$python"; then
        if can_make_venv "$python"; then
            echo "virtual environment in $dir with $("$python" --version)" >&2
            rm -rf "$dir"
            exec "$python" -m venv "$dir"
        fi
        without_venv=${without_venv:-$python}
    fi
done

if [ -n "${PYTHON:-}" ] && [ -z "$without_venv" ]; then
    echo "make_venv.sh: PYTHON=$PYTHON does not run or is not Python 3.9 to 3.12, which MXNet" \
        "needs; set it to one that is, or leave it out" >&2
    exit 1
fi
if command -v uv >/dev/null 2>&1; then
    echo "virtual environment in $dir with a Python 3.11 of uv's" >&2
    rm -rf "$dir"
    exec uv venv --quiet --seed --python 3.11 "$dir"
fi
if [ -n "$without_venv" ]; then
    echo "make_venv.sh: $without_venv cannot make virtual environments; install the package" \
        "python3-venv (Debian, Ubuntu: apt install python3-venv)" >&2
else
    echo "make_venv.sh: no Python from 3.9 to 3.12 found, which MXNet needs; install one (uv," \
        "https://docs.astral.sh/uv, brings it: pip install uv), or set PYTHON to it" >&2
fi
exit 1
