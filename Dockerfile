# flashlab with JupyterLab, for machines with an NVIDIA GPU and without.
#
#   docker build -t flashlab .
#   docker run --rm -p 127.0.0.1:8888:8888 flashlab                          JupyterLab; open the address it prints
#   docker run --rm --gpus all -p 127.0.0.1:8888:8888 flashlab               the same, on a GPU
#
# What is measured and built stays only where two folders are mounted, which user 1000 must be able to write:
#
#   mkdir -p build
#   docker run --rm --gpus all -v "$PWD/data:/home/ubuntu/flashlab/data" -v "$PWD/build:/home/ubuntu/flashlab/build" \
#       flashlab make report
#
# The `base` image, because compiler, headers and disassembler come from the wheels that constraints.txt pins; it tells the
# container runtime to bring the driver in.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton builds its launchers with g++ and Python's headers. Versions are the release's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# `ubuntu`, the release's own unprivileged user.
USER 1000
WORKDIR /home/ubuntu/flashlab

# `--build-arg GPU=` leaves torch, CuPy and Triton out: several gigabytes less, for reading and compiling alone.
ARG GPU=gpu
COPY --chown=1000:1000 pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY --chown=1000:1000 scripts scripts
COPY --chown=1000:1000 src src
RUN make GPU="${GPU}" .venv/.installed/lab && rm -rf /home/ubuntu/.cache/pip
COPY --chown=1000:1000 . .

ENV PATH="/home/ubuntu/flashlab/.venv/bin:${PATH}"
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--notebook-dir=.", "--LabApp.default_url=/lab/tree/notebooks"]
