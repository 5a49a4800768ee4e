#!/bin/sh
# install.sh EXTRA...: flashlab, editable, with these extras of pyproject.toml, in .venv at the versions of
# constraints.txt. Makes .venv where there is none that runs. Says what is missing and the command that installs it.
set -eu
cd "$(dirname "$0")/.."

sudo=
[ "$(id -u)" = 0 ] || sudo="sudo "

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
    without_venv=
    for python in python3.13 python3.12 python3.11 python3; do
        command -v "$python" >/dev/null || continue
        new_enough "$python" || continue
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "making .venv with $("$python" --version)"
            rm -rf .venv
            "$python" -m venv .venv
            return
        fi
        without_venv=${without_venv:-$("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')}
    done
    if [ -n "$without_venv" ]; then
        echo "missing: Python's venv module. Install it with: ${sudo}apt-get install $without_venv" >&2
    else
        found=$(python3 --version 2>/dev/null || echo none)
        echo "missing: Python 3.11 or newer, found: $found. Install it with: ${sudo}apt-get install python3 python3-venv" >&2
        echo "On a release whose python3 is older (Ubuntu 22.04): ${sudo}apt-get install python3.11 python3.11-venv" >&2
    fi
    exit 1
}

new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv

extras=$(echo "$*" | tr ' ' ',')
echo "installing flashlab${extras:+ with $extras} into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
    --editable ".${extras:+[$extras]}"
