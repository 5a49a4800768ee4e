# flashlab with JupyterLab, for machines with an NVIDIA GPU and without.
#
#   docker build -t flashlab .
#   docker run --rm -p 127.0.0.1:8888:8888 flashlab                          JupyterLab; open the address it prints
#   docker run --rm --gpus all -p 127.0.0.1:8888:8888 flashlab               the same, on a GPU
#
# compose.yaml has the same with folders of the checkout mounted. What is measured and built stays only where two folders
# are mounted, which user 1000 must be able to write:
#
#   mkdir -p build
#   docker run --rm --gpus all -v "$PWD/data:/home/ubuntu/flashlab/data" -v "$PWD/build:/home/ubuntu/flashlab/build" \
#       flashlab make report
#
# The `base` image, because compiler, headers and disassembler come from the wheels that constraints.txt pins; it tells the
# container runtime to bring the driver in. This stage alone is what .devcontainer/ starts from.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS system

# Triton builds its launchers with g++ and Python's headers. Versions are the release's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM system

# Builders differ in whom a WORKDIR belongs to and whom the folders that COPY makes, so both `find` lines give what is not
# his to `ubuntu`, the release's own unprivileged user. A volume that is mounted on data or build takes their owner over.
RUN install --directory --owner=1000 --group=1000 /home/ubuntu/flashlab /home/ubuntu/flashlab/build
WORKDIR /home/ubuntu/flashlab
ENV HOME=/home/ubuntu
COPY --chown=1000:1000 pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY --chown=1000:1000 scripts scripts
COPY --chown=1000:1000 src src
RUN find . ! -user 1000 -exec chown --no-dereference 1000:1000 {} +

USER 1000
# `--build-arg GPU=` leaves torch, CuPy and Triton out: several gigabytes less, for reading and compiling alone.
ARG GPU=gpu
RUN make GPU="${GPU}" .venv/.installed/lab && rm -rf /home/ubuntu/.cache/pip

COPY --chown=1000:1000 . .
USER 0
RUN find . ! -user 1000 -exec chown --no-dereference 1000:1000 {} +
USER 1000
# The build ends here where something belongs to another user.
RUN test -z "$(find . ! -user 1000 -print -quit)" && test -w . && test -w build && test -w data

ENV PATH="/home/ubuntu/flashlab/.venv/bin:${PATH}"
EXPOSE 8888
# Of JupyterLab, and without a token: this address says its version alone. A command in its place has no health.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8888/api', timeout=4).read()"]
# All addresses of the container; `-p 127.0.0.1:…` above opens it to this machine alone. Jupyter makes a token.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--notebook-dir=.", "--LabApp.default_url=/lab/tree/notebooks/index.ipynb"]

# Last, because a change here makes every layer below anew: --build-arg COMMIT="$(git rev-parse HEAD)"
ARG COMMIT=""
LABEL org.opencontainers.image.title="flashlab" \
      org.opencontainers.image.description="How an attention kernel gets fast on a GPU, and what each step really buys" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04" \
      org.opencontainers.image.revision="${COMMIT}"
