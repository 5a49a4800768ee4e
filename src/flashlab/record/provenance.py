"""Provenance of records: code, software and machine start.

In a git checkout, the commit comes from git. A copy without `.git` (a GPU machine that received the tree and a bundle
of wheels) reads it from `build/bundle/provenance.json`, written by `make bundle`, with a digest of the files that
affect results, which reveals later edits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flashlab._version import __version__
from flashlab.core.errors import OutputError, ParameterError
from flashlab.core.paths import ROOT
from flashlab.kernels.peers import DISTRIBUTIONS
from flashlab.record.schema import Source, Start

DECIDING = ("kernels", "src", "notebooks", "pyproject.toml", "constraints.txt")
"""Files and folders that affect results; changes elsewhere (pages, tests, data) leave a record clean."""
_BYPRODUCTS = ("__pycache__", ".ipynb_checkpoints")
_BUNDLED = Path("build/bundle/provenance.json")

PACKAGES = (
    "flashlab",
    "numpy",
    "torch",
    "triton",
    "cupy-cuda13x",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    *DISTRIBUTIONS,
    "nvidia-cutlass-dsl",
    "cuda-bench",
    "papermill",
)
"""Distributions whose versions are recorded, if installed."""
UNUSED = "nvidia-cuda-cuobjdump"
"""Distribution that older records name and no code used: its version changes no result."""


RENTED = {"instance": "FLASHLAB_INSTANCE", "usd_per_gpu_hour": "FLASHLAB_USD_PER_GPU_HOUR"}
"""Environment variables that describe a rented machine, by field of `Start`. No others are recorded."""

UNKNOWN = Source(commit="unknown", dirty=True)


def source(root: Path = ROOT) -> Source:
    """Return the commit of the tree at `root`, and whether files that affect results differ from it.

    From git, else from the bundle, else `UNKNOWN`. Never raises.
    """
    # A `.git` without a commit says nothing: some tools make an empty one around a copied tree.
    return _from_git(root) or _from_bundle(root) if (root / ".git").exists() else _from_bundle(root)


def write(path: Path, root: Path = ROOT) -> None:
    """Write the commit and digest of the tree at `root`, for a copy without `.git`.

    Raises:
        OutputError: `path` is not writable.
    """
    content = {**source(root).model_dump(), "sha256": digest(root), "files": list(DECIDING)}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"wanted to write {path}, got: {error.strerror or error}") from error


def digest(root: Path = ROOT) -> str:
    """SHA-256 over paths and contents of all files under `root` that affect results."""
    total = hashlib.sha256()
    for path in sorted(_deciding_files(root), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        total.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n".encode())
    return total.hexdigest()


def software() -> dict[str, str]:
    """Versions of Python and of installed `PACKAGES`, from metadata, without importing them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "flashlab":
                versions[name] = __version__  # a copy run with PYTHONPATH=src has no metadata of its own
    return versions


def start(proc: Path = Path("/proc")) -> dict[str, Any] | None:
    """Return the start of this machine, as fields of `schema.Start`; None if unknown.

    Includes the variables of `RENTED`.

    Raises:
        ParameterError: one of them is not a valid name or price.
    """
    try:
        boot_id = (proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="utf-8").strip()
        stat = (proc / "stat").read_text(encoding="utf-8").splitlines()
        seconds = next(int(line.split()[1]) for line in stat if line.startswith("btime "))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    fields: dict[str, str] = {
        "boot": hashlib.sha256(boot_id.encode()).hexdigest()[:8],
        "at": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
    }
    fields |= {field: os.environ[variable] for field, variable in RENTED.items() if os.environ.get(variable)}
    try:
        return Start.model_validate(fields).model_dump(exclude_none=True)
    except ValidationError as error:
        # What came is not repeated: it may be anything that somebody took for a name.
        wrong = ", ".join(RENTED.get(str(detail["loc"][0]), str(detail["loc"][0])) for detail in error.errors())
        raise ParameterError(
            f"wanted a machine's name in {RENTED['instance']}, such as p5.48xlarge, and US dollars an hour of one GPU "
            f"in {RENTED['usd_per_gpu_hour']}, such as 2.5, got something else in {wrong}"
        ) from None


def _deciding_files(root: Path) -> Iterable[Path]:
    for name in DECIDING:
        top = root / name
        if top.is_file():
            yield top
            continue
        for path in top.rglob("*"):
            parts = path.relative_to(root).parts
            if path.is_file() and not any(part in _BYPRODUCTS or part.endswith(".egg-info") for part in parts):
                yield path


def _from_git(root: Path) -> Source | None:
    try:
        commit = git(root, "rev-parse", "--verify", "HEAD").strip()
        status = git(root, "status", "--porcelain", "--untracked-files=all", "--", *DECIDING)
    except (OSError, subprocess.CalledProcessError):
        return None
    return Source(commit=commit, dirty=bool(status.strip()))


def git(root: Path, *arguments: str, missing: str | None = None) -> str:
    """Run git in `root` and return its output, or `missing`, if given, on failure.

    Raises:
        OSError: git is not installed.
        subprocess.CalledProcessError: git failed.
    """
    # A container often runs as another user than the one who owns the checkout, which git refuses unless told.
    command = ["git", "-c", f"safe.directory={root}", "-c", "core.quotePath=false", "-C", str(root), *arguments]
    said = subprocess.run(command, check=missing is None, capture_output=True, text=True)
    return said.stdout if missing is None or said.returncode == 0 else missing


def _from_bundle(root: Path) -> Source:
    try:
        content = json.loads((root / _BUNDLED).read_text(encoding="utf-8"))
        commit, dirty, sha256 = content["commit"], content["dirty"], content["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return UNKNOWN
    return Source(commit=str(commit), dirty=bool(dirty) or sha256 != digest(root))
