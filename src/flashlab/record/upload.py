"""Synchronises a GPU's records with a bucket or folder, so that none are lost with a rented machine.

`FLASHLAB_UPLOAD` names the place as fsspec does: `s3://bucket/folder`, `gs://bucket/folder` or the path of a folder.
Below it lies the same as below data/<gpu>: the folder is one that other commands read. Credentials belong in the
cloud's own configuration; nothing here reads, prints or stores them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashlab.core.errors import FlashlabError, MissingPackageError, OutputError, ParameterError
from flashlab.core.paths import DATA, writable_dir
from flashlab.record import schema, store

VARIABLE = "FLASHLAB_UPLOAD"
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""What fsspec needs beside itself, by the place's scheme. Not in the lock: botocore holds other packages back."""
_RECORDS = re.compile(rf"[a-z-]+/{schema.RUN[1:-1]}\.jsonl|[a-z]+\.json")
"""Names below data/<gpu> that are fetched: the files of runs, and documents such as tuned.json."""


def sync(gpu: str, data: Path = DATA, place: str | None = None) -> tuple[int, int]:
    """Download the records that `data` lacks, then upload those that the place lacks; returns both numbers.

    If both have a file, that in `data`, which may have grown, wins. CHECKSUMS is written last and keeps other entries,
    so that an interrupted call is completed by the next one. Machines that measure concurrently need separate places,
    because a bucket has no lock for CHECKSUMS.

    Args:
        place: default: `FLASHLAB_UPLOAD`; does nothing if that is empty.

    Raises:
        ParameterError: fsspec does not support the place, or it contains credentials.
        MissingPackageError: fsspec, or its backend for the place, is not installed.
        DamagedRecordError: a record in `data` was changed; it is not uploaded.
        OutputError: the place or `data` cannot be read or written.
    """
    place = os.environ.get(VARIABLE, "") if place is None else place
    if not place:
        return 0, 0
    files, root = _opened(place)
    remote = f"{root.rstrip('/')}/{gpu}"
    # Two processes that wrote CHECKSUMS there would each drop what the other listed.
    with store.locked(writable_dir(data, f"the records that go to {place}")), _named(place):
        fetched = _fetch(files, remote, data / gpu)
        if (data / gpu).is_dir():  # nothing of a GPU that was not measured yet
            store.write_checksums(gpu, data)
        return fetched, _send(files, remote, data / gpu)


def attempt(gpu: str, data: Path = DATA) -> str:
    """Call `sync` and return the error message, or an empty string. The next call copies the rest."""
    try:
        sync(gpu, data)
    except FlashlabError as error:
        return f"records not copied yet: {error}"
    return ""


def _opened(place: str) -> tuple[Any, str]:
    """Open the fsspec file system of a place; returns it with the path."""
    if "://" in place and re.search(r"[@?]|::", place):
        # Not shown: what stands before the @ may be a secret.
        raise ParameterError(
            f"{VARIABLE}: wanted s3://bucket/folder, gs://bucket/folder or a folder's path, got one with '@', '::' or "
            "'?' in it. Credentials belong in the configuration of the cloud's own tools"
        )
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(place)
    except ImportError as error:
        raise MissingPackageError(
            f"wanted what copies records to {place}, got: {error}. Install it with: .venv/bin/pip install "
            f"{_PACKAGES.get(place.partition('://')[0], 'fsspec')}"
        ) from error
    except ValueError as error:
        raise ParameterError(f"{VARIABLE}: wanted s3://, gs:// or a folder's path, got {place!r}: {error}") from error
    return files, root


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Convert exceptions of cloud libraries to `OutputError`s that name the place."""
    try:
        yield
    except FlashlabError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise OutputError(f"wanted records to go to {place}, got: {type(error).__name__}: {said}") from error


def _fetch(files: Any, remote: str, folder: Path) -> int:
    """Download the files of records below `remote` that `folder` lacks; returns their number."""
    files.invalidate_cache()
    if not files.exists(remote):
        return 0
    count = 0
    for path in files.find(remote):
        name = path.removeprefix(f"{remote}/")
        target = folder / name
        if _RECORDS.fullmatch(name) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Beside the GPU's folder: whoever writes its CHECKSUMS meanwhile would list the part.
            part = folder.with_name(f".{target.name}.{os.getpid()}")
            try:
                part.write_bytes(files.cat_file(path))
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            count += 1
    return count


def _send(files: Any, remote: str, folder: Path) -> int:
    """Upload files that are missing or differ according to CHECKSUMS, then CHECKSUMS; returns their number."""
    listing = f"{remote}/{store.CHECKSUMS}"
    old = files.cat_file(listing) if files.exists(listing) else None
    known = store.checksums_in(old or b"")[0]
    sums = store.checksums_in((folder / store.CHECKSUMS).read_bytes())[0] if folder.is_dir() else {}
    changed = [name for name, digest in sums.items() if known.get(name) != digest and (folder / name).is_file()]
    for name in changed:
        _put(files, f"{remote}/{name}", (folder / name).read_bytes())
        known[name] = sums[name]
    new = "".join(f"{known[name]}  {name}\n" for name in sorted(known, key=Path)).encode()
    if new != old:
        _put(files, listing, new)
    return len(changed)


def _put(files: Any, path: str, content: bytes) -> None:
    if "file" in files.protocol:  # A bucket has no folders, and s3fs would make a bucket that is not there.
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
    files.pipe_file(path, content)
