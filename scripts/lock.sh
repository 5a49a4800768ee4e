#!/bin/sh
# Resolve pyproject.toml with all its extras into constraints.txt: one version a package, for Linux on x86-64 and
# aarch64 and every supported Python. Takes metadata only, no wheels. `scripts/lock.sh --upgrade` takes newer versions,
# without it a version stays as long as it fits.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
new=$(mktemp)
trap 'rm -f "$new"' EXIT
[ ! -f constraints.txt ] || cp constraints.txt "$new"
"$uv" pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 --all-extras --no-annotate --no-header \
    "$@" --output-file "$new" pyproject.toml
# A constraint binds only what is being installed, so the markers that say where a package is needed add nothing.
{
    echo '# Every package flashlab installs, at the version it was tried with. Made by `make lock`; used by every install:'
    echo '#   pip install -c constraints.txt -e .'
    sed -E 's/ ; .*//' "$new"
} > constraints.txt
