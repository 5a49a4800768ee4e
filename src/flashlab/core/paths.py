"""Where things are: the checkout's folders and the cache.

flashlab works on its checkout (an editable install, which is what `make` sets up): kernels, notebooks, data and site
are files a user reads and edits, so they are not copied into the package. A wheel has copies of what the public calls,
the emulation and the compilers read: the kernels and the tables of choices (scripts/wheel.py). Records, notebooks and
the site need the checkout.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from flashlab.core.errors import MissingError, OutputError

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "installed").is_dir()
"""Whether this is a wheel's package, away from any checkout."""
ROOT = _PACKAGE / "installed" if INSTALLED else _PACKAGE.parents[1]
KERNELS = ROOT / "kernels"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
SITE = ROOT / "site"


def cache_dir() -> Path:
    """The compile cache: `$FLASHLAB_CACHE`, else `$XDG_CACHE_HOME/flashlab`, else `~/.cache/flashlab`."""
    explicit = os.environ.get("FLASHLAB_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashlab"


BUILD = cache_dir() / "build" if INSTALLED else ROOT / "build"


def require_checkout(what: str) -> None:
    """Raises `MissingError` where this is a wheel's package, which does not have `what`."""
    if INSTALLED:
        raise MissingError(f"needs the checkout: wanted {what}, got the package of a wheel, {_PACKAGE}, which has none")


def writable_dir(path: Path, purpose: str) -> Path:
    """`path`, created if need be and proven writable by writing to it.

    Raises:
        OutputError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"wanted a writable folder for {purpose}, got {path}: {error.strerror or error}. "
            "Name one that you may write to, for example one under your home folder."
        ) from error
    return path


def table(module: str, name: str = "") -> dict[str, Any]:
    """What a TOML file beside a module, its `__file__`, holds: the one of that name, else of the module's."""
    path = Path(module)
    return tomllib.loads(path.with_name(f"{name or path.stem}.toml").read_text(encoding="utf-8"))


def slug(gpu_name: str) -> str:
    """Folder name under data/ for a GPU's product name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def signature(path: str | Path) -> tuple[int, ...]:
    """What changes whenever a file's content does: inode, size, and times of change in nanoseconds."""
    status = os.stat(path)  # noqa: PTH116 - a Path object would cost more than the call
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest(content: bytes) -> str:
    """Its sha256, in hex."""
    return hashlib.sha256(content).hexdigest()
