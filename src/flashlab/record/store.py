"""The files that hold records: appended to, read once a process, sealed and verified; schema.py has the lines.

    data/<gpu>/machine.json         the machine the runs were made on
    data/<gpu>/runs/<run>.jsonl     records of one run; never rewritten
    data/<gpu>/tuning/<run>.jsonl   stages with other values of their tunables, `flashlab tune`
    data/<gpu>/tuned.json           which stage and tunables a problem gets, `flashlab tuned` (tuned.py)
    data/<gpu>/chip/<run>.jsonl     what one SM does in a clock, `flashlab chip` (chip.py)
    data/<gpu>/ablations/           stages with one tunable changed, `flashlab ablate`
    data/<gpu>/parts/               stages with a part of their work left out, `flashlab split`
    data/<gpu>/readings/            other timers, inputs and cache states beside ours, `flashlab method`
    data/<gpu>/calls/               wall time of single calls, launch included, `flashlab claims --measure`
    data/<gpu>/verdicts.json        what the records say of the claims in data/claims.csv, `flashlab claims --write`
    data/<gpu>/checks/              comparisons that are not timings; see checks.py for the lines
    data/<gpu>/random/              the same over random problems and layouts, `flashlab check --random`
    data/<gpu>/flash-attention/     the same over flash-attention's own cases, `flashlab check --suite flash-attention`
    data/<gpu>/sanitizer/           what compute-sanitizer found, scripts/sanitize.py
    data/<gpu>/counters/            what Nsight Compute counted, scripts/counters_ncu.py
    data/<gpu>/profiles/<run>.jsonl what Nsight Compute saw of each stage, `flashlab profile`
    data/<gpu>/CHECKSUMS            sha256 of every file above, `sha256sum -c` reads it

A record carries everything needed to judge it: every sample, the verdict, the machine code's digest and resources,
clocks, software versions, the commit and whether the tree differed from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from pydantic import BaseModel, TypeAdapter, ValidationError

from flashlab.core.errors import DamagedRecordError, NoDataError
from flashlab.core.paths import DATA, writable_dir
from flashlab.record import checks, schema
from flashlab.record.schema import COUNTERS, Ceiling, Choices, Judged, Machine, Measurement, Record, Sanitized

T = TypeVar("T", bound=BaseModel)
FOLDERS: Mapping[type[BaseModel], str] = {
    Measurement: "runs",
    Ceiling: "runs",
    schema.Tuning: "tuning",
    schema.Ablation: "ablations",
    schema.Part: "parts",
    schema.Reading: "readings",
    schema.ChipReading: "chip",
    schema.Call: "calls",
    Sanitized: "sanitizer",
    schema.StageProfile: "profiles",
    schema.StageCounters: "counters",
    schema.PatternCounters: "counters",
}
"""The folder under data/<gpu> whose files hold lines of a kind."""
CHECKSUMS = "CHECKSUMS"
_CHECKS = ("checks", "random", "flash-attention")
_DOCUMENTS: dict[str, TypeAdapter[Any]] = {
    "machine.json": TypeAdapter(Machine),
    "tuned.json": TypeAdapter(Choices),
    "verdicts.json": TypeAdapter(tuple[Judged, ...]),
}
_PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    **{folder: TypeAdapter(kind).validate_json for kind, folder in FOLDERS.items()},
    "runs": TypeAdapter(Record).validate_json,
    "counters": COUNTERS.validate_json,
}


@dataclass(frozen=True)
class Damage:
    """A line or file that cannot be trusted."""

    path: Path
    line: int | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class Run:
    """The records of one run file, with what could not be read."""

    path: Path
    records: tuple[Measurement | Ceiling, ...]
    damage: tuple[Damage, ...]

    @property
    def id(self) -> str:
        """The run's name: the file's, without its suffix."""
        return self.path.stem

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Its stages and peers; no row `with_lse`."""
        return tuple(r for r in self.records if isinstance(r, Measurement) and not r.with_lse)

    @property
    def with_lse(self) -> tuple[Measurement, ...]:
        """Stages timed with the log-sum-exp on, beside their rows without."""
        return tuple(r for r in self.records if isinstance(r, Measurement) and r.with_lse)

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """Its readings of the GPU's limits."""
        return tuple(r for r in self.records if isinstance(r, Ceiling))


def append(path: Path, record: schema.AnyRecord) -> None:
    """Append one record to a file of its kind and flush it to disk, so that a crash later loses nothing."""
    with path.open("a+b") as file:
        # A line cut short by a crash must cost itself only, not the record after it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(schema.to_line(record).encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, kw_only=True)
class Line:
    """A record, and where it lies."""

    record: Any
    path: Path
    number: int
    """From 1."""


def signature(path: Path) -> tuple[int, ...]:
    """What changes whenever a file's content does: inode, size, and times of change in nanoseconds."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=256)
def _parsed(
    path: Path, parse: Callable[[bytes], Any], _: tuple[int, ...]
) -> tuple[tuple[Line, ...], tuple[Damage, ...]]:
    """A file's sound lines, and its others; parsed once a process while its `signature` stays."""
    lines: list[Line] = []
    damage: list[Damage] = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            lines.append(Line(record=parse(raw), path=path, number=number))
        except ValidationError as error:
            first = error.errors()[0]
            damage.append(Damage(path, number, f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}"))
    return tuple(lines), tuple(damage)


def read(path: Path, kind: type[T]) -> tuple[tuple[T, ...], tuple[Damage, ...]]:
    """The records of one kind in a file, and the lines that could not be read.

    Args:
        path: a file of that kind's folder, wherever it lies.
        kind: one of `FOLDERS`.
    """
    lines, damage = _parsed(path, _PARSERS[FOLDERS[kind]], signature(path))
    return tuple(line.record for line in lines if isinstance(line.record, kind)), damage


def records(gpu: str, kind: type[T], data: Path = DATA) -> tuple[T, ...]:
    """Every sound record of one kind, of `FOLDERS`, on a GPU, oldest file first; empty where there is none."""
    return tuple(line.record for line in lines(gpu, FOLDERS[kind], data) if isinstance(line.record, kind))


def lines(gpu: str, folder: str = "runs", data: Path = DATA) -> tuple[Line, ...]:
    """Every sound record in a GPU's folder, one of `FOLDERS`, oldest file first; empty where there is none."""
    paths = sorted((data / gpu / folder).glob("*.jsonl"))
    return tuple(line for path in paths for line in _parsed(path, _PARSERS[folder], signature(path))[0])


def read_run(path: Path) -> Run:
    """A run file; damaged lines are reported in `damage` and every sound one is kept."""
    lines, damage = _parsed(path, _PARSERS["runs"], signature(path))
    return Run(path, tuple(line.record for line in lines), damage)


def sanitized(gpu: str, data: Path = DATA) -> tuple[Sanitized, ...]:
    """The newest record of each of compute-sanitizer's tools and stage on a GPU; empty where there is none."""
    return tuple({(one.tool, one.stage): one for one in records(gpu, Sanitized, data)}.values())


def count_samples(gpu: str, data: Path = DATA) -> dict[str, int]:
    """Raw samples of stages and libraries on record for a GPU, by folder; those of ceilings are not counted."""
    counts: dict[str, int] = {}
    kinds: tuple[type[Any], ...] = (Measurement, schema.Tuning, schema.Ablation, schema.Part, schema.Reading)
    for kind in kinds:
        several = [record.samples for record in records(gpu, kind, data)]
        flat = [one for taken in several for one in (taken if isinstance(taken, tuple) else (taken,))]
        counts[FOLDERS[kind]] = sum(len(samples.time_us) for samples in flat)
    return counts


def gpus(data: Path = DATA, folder: str = "runs") -> tuple[str, ...]:
    """GPUs that have at least one file of runs, or of another folder of records; the one with the most files first."""
    if not data.is_dir():
        return ()
    files = {p.name: len(list((p / folder).glob("*.jsonl"))) for p in data.iterdir()}
    return tuple(sorted((name for name, count in files.items() if count), key=lambda name: (-files[name], name)))


def folders(data: Path = DATA) -> tuple[str, ...]:
    """The folders of all GPUs, whatever they hold."""
    return tuple(sorted(p.name for p in data.iterdir() if p.is_dir())) if data.is_dir() else ()


def require_runs(gpu: str, data: Path = DATA) -> tuple[Path, ...]:
    """The run files of a GPU, oldest first.

    Raises:
        NoDataError: there is none.
    """
    files = tuple(sorted((data / gpu / "runs").glob("*.jsonl")))
    if not files:
        known = ", ".join(gpus(data)) or "none yet"
        raise NoDataError(
            f"wanted recorded runs of GPU {gpu!r} under {data}, found none. GPUs with data: {known}. "
            "`flashlab bench` on such a GPU makes some."
        )
    return files


def runs(gpu: str, data: Path = DATA) -> tuple[Run, ...]:
    """Every run of a GPU, oldest first.

    Raises:
        NoDataError: there is none.
    """
    return tuple(map(read_run, require_runs(gpu, data)))


def measurements(gpu: str, data: Path = DATA) -> tuple[Measurement, ...]:
    """Stages and libraries of every run of a GPU, oldest first; no row `with_lse`. Empty where there is none."""
    return tuple(row for row in records(gpu, Measurement, data) if not row.with_lse)


def newest_ceilings(gpu: str, data: Path = DATA) -> dict[str, Ceiling]:
    """The newest reading of each ceiling; raises as `require_runs`."""
    require_runs(gpu, data)
    return {ceiling.name: ceiling for ceiling in records(gpu, Ceiling, data)}


def _data_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and p.name != CHECKSUMS)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _listed(folder: Path) -> tuple[dict[str, str], tuple[Damage, ...]]:
    """The sums in CHECKSUMS, by file; none where it is missing."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}, (Damage(path, None, "missing"),)
    sums: dict[str, str] = {}
    damage: list[Damage] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if match:
            sums[match[2]] = match[1]
        else:
            damage.append(Damage(path, number, "not a checksum line"))
    return sums, tuple(damage)


@contextlib.contextmanager
def _sealing(folder: Path) -> Iterator[dict[str, str]]:
    """The sums of a GPU's folder, to be changed; nobody else changes them meanwhile, and they are written at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        sums, _ = _listed(folder)
        yield sums
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums, key=Path)]
        _write_at_once(folder / CHECKSUMS, "".join(lines))
    finally:
        os.close(handle)


def _write_at_once(path: Path, text: str) -> None:
    """Write a file whole: whoever reads meanwhile, or after a crash, sees the old content or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _has_grown(content: bytes, old: str) -> bool:
    """Whether the beginning of a file, up to the end of some line, has the old sum: it was appended to, and no more."""
    beginning = hashlib.sha256()
    for line in content.splitlines(keepends=True):
        beginning.update(line)
        if beginning.hexdigest() == old:
            return True
    return False


def write_checksums(gpu: str, data: Path = DATA) -> Path:
    """Bring data/<gpu>/CHECKSUMS, in the format of `sha256sum`, up to date with new files and lines that were appended.

    A file that was changed in any other way, or removed, keeps its old sum, so that `verify` names it. Only files
    that are new, or were written since CHECKSUMS was, are read.

    Raises:
        DamagedRecordError: such files, among those that were written since; everything else is up to date.
        OutputError: the folder cannot be written.
    """
    folder = writable_dir(data / gpu, "records")
    path = folder / CHECKSUMS
    damage: list[Damage] = []
    with _sealing(folder) as sums:
        sealed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        for file in _data_files(folder):
            name = file.relative_to(folder).as_posix()
            if file.is_symlink() or (name in sums and file.stat().st_mtime_ns < sealed_ns):
                continue
            content = file.read_bytes()
            grown = name not in sums or (file.suffix == ".jsonl" and _has_grown(content, sums[name]))
            if grown:
                sums[name] = _sum(content)
            elif _sum(content) != sums[name]:
                damage.append(Damage(file, None, "differs from CHECKSUMS"))
    if damage:
        raise DamagedRecordError("wanted sound records, found:\n" + "\n".join(f"  {one}" for one in damage))
    return path


def rewrite(gpu: str, name: str, text: str, data: Path = DATA) -> Path:
    """Write a file that is made anew as a whole, `machine.json` for example, and its line in CHECKSUMS.

    Raises:
        DamagedRecordError: the file that is there is not what CHECKSUMS lists; it is left as it is.
        OutputError: the folder cannot be written.
    """
    folder = writable_dir(data / gpu, "records")
    path = folder / name
    with _sealing(folder) as sums:
        if path.is_symlink() or (path.is_file() and name in sums and _sum(path.read_bytes()) != sums[name]):
            raise DamagedRecordError(
                f"wanted {path} as CHECKSUMS lists it before writing a new one, got another. Restore it with git, or "
                "delete it to have it made anew."
            )
        path.parent.mkdir(exist_ok=True)
        _write_at_once(path, text)
        sums[name] = _sum(path.read_bytes())
    return path


def verify(gpu: str, data: Path = DATA) -> tuple[Damage, ...]:
    """All that is wrong with a GPU's data of every kind.

    Wrong checksums, files missing, unlisted, of no known kind or in truth links, lines and documents that are none.
    """
    folder = data / gpu
    sums, reported = _listed(folder)
    damage = list(reported)
    present = {p.relative_to(folder).as_posix(): p for p in _data_files(folder)} if folder.is_dir() else {}
    for name in sorted(sums.keys() | present.keys() | {"machine.json"}):
        path = folder / name
        if name not in present:
            damage.append(Damage(path, None, "listed in CHECKSUMS, missing" if name in sums else "missing"))
        elif path.is_symlink():
            damage.append(Damage(path, None, "a link, where records are files"))
        else:
            if name not in sums:
                damage.append(Damage(path, None, "not listed in CHECKSUMS"))
            elif _sum(path.read_bytes()) != sums[name]:
                damage.append(Damage(path, None, "differs from CHECKSUMS"))
            damage.extend(_damage_within(name, path))
    return tuple(damage)


def _damage_within(name: str, path: Path) -> tuple[Damage, ...]:
    """What is wrong with the content of a file; `name` is relative to the GPU's folder."""
    kind, _, rest = name.partition("/")
    try:
        if kind in _DOCUMENTS and not rest:
            _DOCUMENTS[kind].validate_json(path.read_bytes())
        elif kind in _PARSERS and path.suffix == ".jsonl":
            return _parsed(path, _PARSERS[kind], signature(path))[1]
        elif kind in _CHECKS and path.suffix == ".jsonl":
            checks.read_lines(path)
        elif kind == "figures" and path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            return (Damage(path, None, "of no known kind"),)
    except ValidationError as error:
        return (Damage(path, None, str(error.errors()[0]["msg"])),)
    except DamagedRecordError as error:
        number, _, reason = str(error).removeprefix(f"{path}:").partition(": ")
        return (Damage(path, int(number), reason),)
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        return (Damage(path, None, str(error)),)
    return ()


def write_machine(machine: Machine, data: Path = DATA) -> Path:
    """Write data/<gpu>/machine.json; raises as `rewrite`."""
    text = json.dumps(machine.model_dump(mode="json"), indent=2) + "\n"
    return rewrite(machine.gpu.slug, "machine.json", text, data)
