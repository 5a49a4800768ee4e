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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar
from xml.etree import ElementTree

from pydantic import (
    BaseModel,
    TypeAdapter,
    ValidationError,
)

from flashlab.core.errors import DamagedRecordError, NoDataError
from flashlab.core.inputs import TRAINED
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.paths import slug as slug
from flashlab.core.problem import Cache as Cache
from flashlab.core.problem import Regime as Regime
from flashlab.record import checks
from flashlab.record.schema import COUNTERS, Choices, Judged
from flashlab.record.schema import RUN as RUN
from flashlab.record.schema import SCHEMA_VERSION as SCHEMA_VERSION
from flashlab.record.schema import Ablation as Ablation
from flashlab.record.schema import AnyRecord as AnyRecord
from flashlab.record.schema import Base as Base
from flashlab.record.schema import Call as Call
from flashlab.record.schema import Ceiling as Ceiling
from flashlab.record.schema import ChipReading as ChipReading
from flashlab.record.schema import Conditions as Conditions
from flashlab.record.schema import CubinFields as CubinFields
from flashlab.record.schema import Gpu as Gpu
from flashlab.record.schema import LineStalls as LineStalls
from flashlab.record.schema import Machine as Machine
from flashlab.record.schema import Measurement as Measurement
from flashlab.record.schema import Part as Part
from flashlab.record.schema import PatternCounters as PatternCounters
from flashlab.record.schema import ProblemFields as ProblemFields
from flashlab.record.schema import Reading as Reading
from flashlab.record.schema import Record as Record
from flashlab.record.schema import Samples as Samples
from flashlab.record.schema import Sanitized as Sanitized
from flashlab.record.schema import Source as Source
from flashlab.record.schema import StageCounters as StageCounters
from flashlab.record.schema import StageProfile as StageProfile
from flashlab.record.schema import Start as Start
from flashlab.record.schema import Status as Status
from flashlab.record.schema import Timed as Timed
from flashlab.record.schema import Tuning as Tuning
from flashlab.record.schema import Verdict as Verdict
from flashlab.record.schema import cycles_per_score as cycles_per_score
from flashlab.record.schema import parse_line as parse_line
from flashlab.record.schema import power_w as power_w
from flashlab.record.schema import run_id as run_id
from flashlab.record.schema import to_line as to_line

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_FOLDERS: dict[str, type[BaseModel]] = {
    "tuning": Tuning,
    "ablations": Ablation,
    "parts": Part,
    "readings": Reading,
    "chip": ChipReading,
    "calls": Call,
    "sanitizer": Sanitized,
    "profiles": StageProfile,
}
"""Folders whose files hold lines of one kind each."""
CHECKSUMS = "CHECKSUMS"
_CHECKS = ("checks", "random", "flash-attention")
_DOCUMENTS: dict[str, TypeAdapter[Any]] = {
    "machine.json": TypeAdapter(Machine),
    "tuned.json": TypeAdapter(Choices),
    "verdicts.json": TypeAdapter(tuple[Judged, ...]),
}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "runs": TypeAdapter(Record).validate_json,
    "counters": COUNTERS.validate_json,
    **{name: schema.model_validate_json for name, schema in _FOLDERS.items()},
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


@dataclass(frozen=True)
class Counters:
    """The lines of one file of Nsight Compute's counters, with what could not be read."""

    path: Path
    lines: tuple[StageCounters | PatternCounters, ...]
    damage: tuple[Damage, ...]

    @property
    def stages(self) -> tuple[StageCounters, ...]:
        """Launches of stages."""
        return tuple(line for line in self.lines if isinstance(line, StageCounters))

    @property
    def patterns(self) -> tuple[PatternCounters, ...]:
        """Single accesses."""
        return tuple(line for line in self.lines if isinstance(line, PatternCounters))


def append(path: Path, record: AnyRecord) -> None:
    """Append one record to a run file and flush it to disk, so that a crash later loses nothing."""
    with path.open("a+b") as file:
        # A line cut short by a crash must cost itself only, not the record after it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(to_line(record).encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def read_run(path: Path) -> Run:
    """A run file; damaged lines are reported in `damage` and every sound one is kept."""
    return Run(path, *_read_lines(path, _PARSERS["runs"]))


def read_tunings(path: Path) -> tuple[tuple[Tuning, ...], tuple[Damage, ...]]:
    """A file of tunings: what is sound, and what could not be read."""
    return _read_lines(path, _PARSERS["tuning"])


def tunings(gpu: str, data: Path = DATA) -> tuple[Tuning, ...]:
    """Every sound tuning record of a GPU, oldest file first; empty where there is none."""
    files = sorted((data / gpu / "tuning").glob("*.jsonl"))
    return tuple(record for path in files for record in read_tunings(path)[0])


def read_ablations(path: Path) -> tuple[tuple[Ablation, ...], tuple[Damage, ...]]:
    """A file of ablations: what is sound, and what could not be read."""
    return _read_lines(path, _PARSERS["ablations"])


def read_parts(path: Path) -> tuple[tuple[Part, ...], tuple[Damage, ...]]:
    """A file of stages with a part left out: what is sound, and what could not be read."""
    return _read_lines(path, _PARSERS["parts"])


def ablations(gpu: str, data: Path = DATA) -> tuple[Ablation, ...]:
    """Every sound ablation record of a GPU, oldest file first; empty where there is none."""
    files = sorted((data / gpu / "ablations").glob("*.jsonl"))
    return tuple(found for path in files for found in read_ablations(path)[0])


def parts(gpu: str, data: Path = DATA) -> tuple[Part, ...]:
    """Every sound record of a stage with a part left out, oldest file first; empty where there is none."""
    files = sorted((data / gpu / "parts").glob("*.jsonl"))
    return tuple(found for path in files for found in read_parts(path)[0])


def read_readings(path: Path) -> tuple[Reading, ...]:
    """The sound readings of a file."""
    return _read_lines(path, _PARSERS["readings"])[0]


def read_chip(path: Path) -> tuple[tuple[ChipReading, ...], tuple[Damage, ...]]:
    """A file of micro-benchmarks: what is sound, and what could not be read."""
    return _read_lines(path, _PARSERS["chip"])


def readings(gpu: str, data: Path = DATA) -> tuple[Reading, ...]:
    """Every sound reading that judges the method on a GPU, oldest file first; empty where there is none."""
    return tuple(found for path in sorted((data / gpu / "readings").glob("*.jsonl")) for found in read_readings(path))


def count_samples(gpu: str, data: Path = DATA) -> dict[str, int]:
    """Raw samples of stages and libraries on record for a GPU, by folder; those of ceilings are not counted."""
    found = [read_run(path) for path in sorted((data / gpu / "runs").glob("*.jsonl"))]
    several = {
        "runs": [samples for run in found for row in (*run.measurements, *run.with_lse) for samples in row.samples],
        "tuning": [samples for row in tunings(gpu, data) for samples in row.samples],
        "ablations": [samples for row in ablations(gpu, data) for samples in row.samples],
        "parts": [row.samples for row in parts(gpu, data)],
        "readings": [row.samples for row in readings(gpu, data)],
    }
    return {folder: sum(len(samples.time_us) for samples in taken) for folder, taken in several.items()}


def profiles(gpu: str, data: Path = DATA) -> tuple[StageProfile, ...]:
    """Every sound profile of a GPU, oldest file first; empty where there is none."""
    files = sorted((data / gpu / "profiles").glob("*.jsonl"))
    return tuple(found for path in files for found in _read_lines(path, _PARSERS["profiles"])[0])


def sanitized(gpu: str, data: Path = DATA) -> tuple[Sanitized, ...]:
    """The newest record of each of compute-sanitizer's tools and stage on a GPU; empty where there is none."""
    newest: dict[tuple[str, str], Sanitized] = {}
    for path in sorted((data / gpu / "sanitizer").glob("*.jsonl")):
        newest |= {(one.tool, one.stage): one for one in _read_lines(path, _PARSERS["sanitizer"])[0]}
    return tuple(newest.values())


def read_counters(path: Path) -> Counters:
    """A file of Nsight Compute's counters; damaged lines are reported in `damage` and every sound one is kept."""
    return Counters(path, *_read_lines(path, _PARSERS["counters"]))


@dataclass(frozen=True, kw_only=True)
class Line(Generic[T_co]):
    """A record, and where it lies."""

    record: T_co
    path: Path
    number: int
    """From 1."""


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    lines: tuple[Line[Any], ...]
    damage: tuple[Damage, ...]


def signature(path: Path) -> tuple[int, ...]:
    """What changes whenever a file's content does: inode, size, and times of change in nanoseconds."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=256)
def _parsed(path: Path, parse: Callable[[str], Any], _: tuple[int, ...]) -> _Parsed:
    """A file's lines; parsed once a process while its `signature` stays."""
    lines: list[Line[Any]] = []
    damage: list[Damage] = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            lines.append(Line(record=parse(raw.decode("utf-8")), path=path, number=number))
        except (ValidationError, UnicodeDecodeError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}" if first else str(error)
            damage.append(Damage(path, number, what))
    return _Parsed(lines=tuple(lines), damage=tuple(damage))


def _read_lines(path: Path, parse: Callable[[str], T]) -> tuple[tuple[T, ...], tuple[Damage, ...]]:
    parsed = _parsed(path, parse, signature(path))
    return tuple(line.record for line in parsed.lines), parsed.damage


def lines(gpu: str, folder: str = "runs", data: Path = DATA) -> tuple[Line[Any], ...]:
    """Every sound record of a kind on a GPU, oldest file first; empty where there is none.

    Args:
        gpu: folder under data/.
        folder: the kind: `runs`, `tuning`, `ablations`, `parts`, `readings`, `calls`, `sanitizer` or `profiles`.
        data: the folder that holds them all.
    """
    paths = sorted((data / gpu / folder).glob("*.jsonl"))
    return tuple(line for path in paths for line in _parsed(path, _PARSERS[folder], signature(path)).lines)


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


def newest_run(gpu: str, data: Path = DATA) -> Run:
    """The newest run that holds a measurement."""
    with_rows = [run for run in runs(gpu, data) if run.measurements]
    if not with_rows:
        raise NoDataError(f"wanted a run of GPU {gpu!r} with measurements, found none under {data / gpu / 'runs'}")
    return with_rows[-1]


def newest_ceilings(gpu: str, data: Path = DATA) -> dict[str, Ceiling]:
    """The newest reading of each ceiling."""
    return {ceiling.name: ceiling for run in runs(gpu, data) for ceiling in run.ceilings}


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
    _raise_if(tuple(damage))
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
    for name in sorted(sums.keys() | present.keys()):
        if name not in present:
            damage.append(Damage(folder / name, None, "listed in CHECKSUMS, missing"))
        elif present[name].is_symlink():
            damage.append(Damage(folder / name, None, "a link, where records are files"))
        elif name not in sums:
            damage.append(Damage(folder / name, None, "not listed in CHECKSUMS"))
        elif _sum(present[name].read_bytes()) != sums[name]:
            damage.append(Damage(folder / name, None, "differs from CHECKSUMS"))
    links = {folder / name for name in present if present[name].is_symlink()}
    for name, path in sorted(present.items()):
        if path not in links:
            damage.extend(_damage_within(name, path))
    if "machine.json" not in present:
        damage.append(Damage(folder / "machine.json", None, "missing"))
    damage.extend(
        Damage(p, None, "a link, where records are files") for p in folder.rglob("*") if p.is_symlink() and p.is_dir()
    )
    return tuple(dict.fromkeys(damage))


def _damage_within(name: str, path: Path) -> tuple[Damage, ...]:
    """What is wrong with the content of a file; `name` is relative to the GPU's folder."""
    kind, _, rest = name.partition("/")
    try:
        if kind in _DOCUMENTS and not rest:
            _DOCUMENTS[kind].validate_json(path.read_bytes())
        elif kind in _PARSERS and path.suffix == ".jsonl":
            return _read_lines(path, _PARSERS[kind])[1]
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


def _raise_if(damage: Sequence[Damage]) -> None:
    if damage:
        raise DamagedRecordError("wanted sound records, found:\n" + "\n".join(f"  {d}" for d in damage))


def require_sound(gpu: str, data: Path = DATA) -> None:
    """Raises `DamagedRecordError` naming every damaged file and line, where there is any."""
    _raise_if(verify(gpu, data))


def write_machine(machine: Machine, data: Path = DATA) -> Path:
    """Write data/<gpu>/machine.json; raises as `rewrite`."""
    text = json.dumps(machine.model_dump(mode="json"), indent=2) + "\n"
    return rewrite(machine.gpu.slug, "machine.json", text, data)


def flat(row: Measurement, regime: Regime = "burst", cache: Cache = "hot") -> dict[str, object]:
    """One row of `flashlab results`: the headline numbers of a measurement, None where it has no time."""
    samples = row.samples_of(regime, cache)
    problem = row.problem.problem()
    return {
        "name": row.name,
        "kind": row.kind,
        "layout": row.layout,
        "lse": row.lse,
        "shape": problem.shape,
        "dtype": problem.dtype,
        "mask": problem.mask,
        "inputs": problem.inputs,
        "status": row.status,
        "reason": row.reason,
        "median_us": samples.median_us if samples else None,
        "worst_layer_us": max(samples.time_us) if samples and problem.inputs == TRAINED else None,
        "tflops": problem.tflops(samples.median_us) if samples else None,
        "cv_percent": samples.cv_percent if samples else None,
        "samples": len(samples.time_us) if samples else 0,
        "sm_clock_mhz": median(samples.sm_clock_mhz) if samples and samples.sm_clock_mhz else None,
        "call_clock_mhz": median(samples.call_clock_mhz) if samples and samples.call_clock_mhz else None,
        "cycles_per_score": cycles_per_score(samples, problem, row.gpu.sm_count) if samples else None,
        "power_w": power_w(samples),
        "energy_j_per_call": samples.conditions.energy_j_per_call if samples and samples.conditions else None,
        "regime": regime,
        "cache": cache,
        "run": row.run,
        "commit": row.source.commit,
        "dirty": row.source.dirty,
    }


def by_name(measurements: Sequence[Measurement]) -> dict[str, Measurement]:
    """Measurements of one problem by name."""
    return {row.name: row for row in measurements}
