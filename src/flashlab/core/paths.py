"""Paths of the checkout and the cache.

flashlab works on its checkout (an editable install, as `make` sets up): users read and edit kernels, notebooks, data
and site, so these are not copied into the package. A wheel contains only what the public calls, the emulator and the
compilers read: the kernels and the tables of choices (scripts/wheel.py). Records, notebooks and the site need the
checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashlab.core.errors import MissingError, OutputError

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "installed").is_dir()
"""Whether the package was installed from a wheel, without a checkout."""
ROOT = _PACKAGE / "installed" if INSTALLED else _PACKAGE.parents[1]
KERNELS = ROOT / "kernels"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
SITE = ROOT / "site"


def cache_dir() -> Path:
    """Return the compile cache: `$FLASHLAB_CACHE`, else `$XDG_CACHE_HOME/flashlab`, else `~/.cache/flashlab`."""
    explicit = os.environ.get("FLASHLAB_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashlab"


BUILD = cache_dir() / "build" if INSTALLED else ROOT / "build"


def require_checkout(what: str) -> None:
    """Raise `MissingError` if the package was installed from a wheel, which does not contain `what`."""
    if INSTALLED:
        raise MissingError(f"needs the checkout: wanted {what}, got the package of a wheel, {_PACKAGE}, which has none")


def writable_dir(path: Path, purpose: str) -> Path:
    """Create `path` if necessary, test that it is writable, and return it.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"wanted a writable folder for {purpose}, got {path}: {error.strerror or error}. "
            "A folder under your home folder works."
        ) from error
    return path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """Lock a file for this process and the children it is passed to, released when the last of them ends.

    Raises:
        BlockingIOError: another process holds it.
    """
    with path.open("a+", encoding="utf-8") as file:
        for patience in (2, 1, 0):  # Somebody may but look whether it is held.
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                file.seek(0)
                if not patience:
                    raise BlockingIOError(f"process {file.read().strip() or 'unknown'} runs it") from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def table(module: str, name: str = "") -> dict[str, Any]:
    """Read the TOML file next to a module, given its `__file__`: `name`, by default the module's own name."""
    path = Path(module)
    return tomllib.loads(path.with_name(f"{name or path.stem}.toml").read_text(encoding="utf-8"))


def slug(gpu_name: str) -> str:
    """Convert a GPU product name to its folder name under data/: `NVIDIA H200` to `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")


def signature(path: str | Path) -> tuple[int, ...]:
    """Return a fingerprint that changes with a file's content: inode, size, mtime and ctime in nanoseconds."""
    status = os.stat(path)  # noqa: PTH116 - a Path object would cost more than the call
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest(content: bytes) -> str:
    """Return the SHA-256 digest, in hex."""
    return hashlib.sha256(content).hexdigest()
