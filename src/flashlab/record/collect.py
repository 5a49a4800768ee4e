"""Imports records of other machines: complete, valid files, without duplicates.

Nothing that is read is executed or rendered. Files keep their names, which are run ids, so that a run imported twice
exists once.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashlab.core.errors import DamagedRecordError, NoDataError
from flashlab.core.paths import DATA, writable_dir
from flashlab.record import schema, store


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Result of importing one GPU's folder."""

    gpu: str
    folder: Path
    """The source folder."""
    taken: tuple[str, ...]
    """Imported files, relative to data/<gpu>."""
    known: tuple[str, ...]
    """Files that existed already."""


def collect(folders: Sequence[Path], data: Path = DATA, *, commit: str = "") -> tuple[Collected, ...]:
    """Import the records of other data folders into `data`; all of them, or none if one is rejected.

    Args:
        folders: data folders with GPU folders, or GPU folders.
        commit: only import runs of this commit, or commit prefix.

    Raises:
        NoDataError: a folder has no records.
        DamagedRecordError: records are damaged, a run exists here with other contents, or the new runs are of several
            commits or of a modified tree.
        OutputError: `data` is not writable.
    """
    collected = []
    plan: dict[Path, Path] = {}
    for source in (gpu for folder in folders for gpu in _gpus_in(folder)):
        gpu = source.name
        if damage := store.verify(gpu, source.parent):
            works = f"`flashlab repair --data {source.parent}` makes what a copy left out, and names what was changed"
            raise DamagedRecordError(f"{_refused(source, 'sound records', damage)}. {works}")
        files = [path for path in store.record_files(gpu, source.parent) if path.suffix == ".jsonl"]
        files = [path for path in files if path.stem.partition("-")[2].startswith(commit[:7])]
        here = {path: data / gpu / path.relative_to(source) for path in files}
        # Another folder may have another copy of a run.
        new = {path: target for path, target in here.items() if not _is_there(path, plan.get(target, target))}
        plan |= {target: path for path, target in new.items()}
        names = {path: path.relative_to(source).as_posix() for path in files}
        taken, known = ([names[path] for path in files if (path in new) == is_new] for is_new in (True, False))
        collected.append(Collected(gpu=gpu, folder=source, taken=tuple(taken), known=tuple(known)))
        if new and not (data / gpu / "machine.json").is_file():
            plan[data / gpu / "machine.json"] = source / "machine.json"
    if commit and not any(result.taken or result.known for result in collected):
        raise NoDataError(f"wanted runs of commit {commit} in {', '.join(map(str, folders))}, found none")
    _of_one_commit(", ".join(map(str, folders)), plan.values())
    _rehearse(plan, data)
    for target, path in plan.items():
        writable_dir(target.parent, "records")
        shutil.copyfile(path, target)
    for gpu in {result.gpu for result in collected if result.taken}:
        store.write_checksums(gpu, data)
    return tuple(collected)


def _gpus_in(folder: Path) -> list[Path]:
    """The GPU folders in a folder, or the folder itself.

    Raises:
        NoDataError: there is none.
    """
    folder = folder.resolve()
    single = (folder / store.CHECKSUMS).is_file()
    gpus = [folder] if single else [folder / name for name in store.folders(folder) if store.record_files(name, folder)]
    if not gpus:
        why = "has no records" if folder.is_dir() else "does not exist"
        raise NoDataError(
            f"wanted a data folder of another machine, or a GPU's folder in one, got {folder}, which {why}. "
            "`flashlab repair` completes one that was cut off"
        )
    return gpus


def _is_there(path: Path, target: Path) -> bool:
    """Whether the same records exist at `target`; False if `path` has additional lines.

    Raises:
        DamagedRecordError: `target` has other records.
    """
    if not target.is_file():
        return False
    old, new = target.read_bytes(), path.read_bytes()
    if old == new or old.startswith(new):
        return True
    if new.startswith(old):
        return False
    raise DamagedRecordError(f"wanted {path} as it is at {target}, or longer, got other lines: one of them was changed")


def _of_one_commit(source: str, new: Iterable[Path]) -> None:
    runs = {path.stem: match for path in new if (match := re.match(schema.RUN, path.stem))}
    if dirty := [run for run, match in runs.items() if match["dirty"]]:
        raise DamagedRecordError(_refused(source, "runs of a commit as it is", dirty))
    if len(commits := sorted({match["commit"] for match in runs.values()})) > 1:
        raise DamagedRecordError(
            _refused(source, "new runs of one commit; `--commit` takes those of one at a time", [", ".join(commits)])
        )


def _rehearse(plan: Mapping[Path, Path], data: Path) -> None:
    """Raise `DamagedRecordError` if the new files would make the folder invalid, e.g. by duplicating a run."""
    with tempfile.TemporaryDirectory(prefix="flashlab-") as name:
        for gpu in {target.relative_to(data).parts[0] for target in plan}:
            scratch = Path(name) / gpu
            scratch.mkdir()
            if (data / gpu).is_dir():
                shutil.copytree(data / gpu, scratch, dirs_exist_ok=True)
            before = {str(fault.path) + fault.reason for fault in store.verify(gpu, Path(name))}
            for target, path in plan.items():
                if data / gpu in target.parents:
                    copy = Path(name) / target.relative_to(data)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)
            store.write_checksums(gpu, Path(name))
            after = store.verify(gpu, Path(name))
            if damage := [fault for fault in after if str(fault.path) + fault.reason not in before]:
                raise DamagedRecordError(_refused(data / gpu, "sound records with the new ones", damage))


def _refused(folder: Path | str, wanted: str, problems: Iterable[object]) -> str:
    listed = "\n  ".join(map(str, problems))
    return f"{folder}: wanted {wanted}, found:\n  {listed}\nNothing was taken over"
