#!/usr/bin/env bash
# What every example runs on the rented machine: install, prove that the GPU can be used, then the command.
#
#   cloud/run.sh make report [FULL=1]
#   cloud/run.sh .venv/bin/flashlab sweep run --ray local [--set NAME]      on all GPUs of the machine
#
# FLASHLAB_UPLOAD, FLASHLAB_INSTANCE and FLASHLAB_USD_PER_GPU_HOUR are read by flashlab: see README.md here.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -V | head -n 1); then
    echo "wanted an NVIDIA GPU, found none that nvidia-smi lists" >&2
    exit 1
fi
if ((${driver%%.*} < 580)); then
    echo "wanted NVIDIA driver 580 or newer, found $driver: take an image or a cloud with a newer one" >&2
    exit 1
fi

extras=(gpu)
if [[ " $* " == *" --ray "* ]]; then
    extras+=(sweep)
fi
scripts/install.sh "${extras[@]}"
case "${FLASHLAB_UPLOAD:-}" in
s3://*) .venv/bin/python -m pip install --quiet s3fs ;;
gs://*) .venv/bin/python -m pip install --quiet gcsfs ;;
esac

# Without a GPU a report replays what is on record and ends well: not what is paid for here.
.venv/bin/python -c 'import sys; from flashlab.run import gpu; sys.exit(gpu.available())'
exec "$@"
