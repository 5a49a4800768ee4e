"""Files of records: appending, cached reading, checksums, verification and repair. schema.py defines the lines.

    data/main_gpu                   the GPU that pages show by default
    data/<gpu>/machine.json         the machine the runs were made on
    data/<gpu>/runs/<run>.jsonl     records of one run; never rewritten
    data/<gpu>/tuning/<run>.jsonl   stages with other values of their tunables, `flashlab tune`
    data/<gpu>/tuned.json           which stage and tunables a problem gets, `flashlab tuned` (tuned.py)
    data/<gpu>/chip/<run>.jsonl     per-SM throughput and latencies, `flashlab chip` (chip.py)
    data/<gpu>/ablations/           stages with one tunable changed, `flashlab ablate`
    data/<gpu>/parts/               stages with a part of their work left out, `flashlab split`
    data/<gpu>/readings/            other timers, inputs and cache states beside ours, `flashlab method`
    data/<gpu>/models/              a whole language model with each attention, `flashlab llama`
    data/<gpu>/packed/              sequences of different lengths, packed, `flashlab packed`
    data/<gpu>/calls/               wall time of single calls, launch included, `flashlab claims --measure`
    data/<gpu>/verdicts.json        what the records say of the claims in data/claims.csv, `flashlab claims --write`
    data/<gpu>/withdrawn.json       timings that are not of what they say, by run and kind of inputs, and why
    data/<gpu>/checks/              comparisons that are not timings; see checks.py for the lines
    data/<gpu>/random/              the same over random problems and layouts, `flashlab check --random`
    data/<gpu>/flash-attention/     the same over flash-attention's own cases, `flashlab check --suite flash-attention`
    data/<gpu>/sanitizer/           what compute-sanitizer found, scripts/sanitize.py
    data/<gpu>/counters/            what Nsight Compute counted, scripts/counters_ncu.py
    data/<gpu>/profiles/<run>.jsonl what Nsight Compute saw of each stage, `flashlab profile`
    data/<gpu>/aside/<run>.jsonl    lines that were cut short, and where they stood, `flashlab repair`
    data/<gpu>/CHECKSUMS            sha256 of every file above, `sha256sum -c` reads it

A record contains everything needed to judge it: all samples, the verdict, digest and resources of the machine code,
clocks, software versions, the commit, and whether the tree differed from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar
from xml.etree import ElementTree

from pydantic import BaseModel, TypeAdapter, ValidationError

from flashlab.core.arithmetic import several
from flashlab.core.errors import DamagedRecordError, NoDataError
from flashlab.core.inputs import TRAINED
from flashlab.core.paths import DATA, digest, signature, writable_dir
from flashlab.kernels import registry
from flashlab.record import checks, provenance, schema
from flashlab.record.schema import Ceiling, Choices, Judged, Machine, Measurement, Record, Samples, Sanitized

T = TypeVar("T", bound=BaseModel)
FOLDERS: Mapping[type[BaseModel], str] = {
    Measurement: "runs",
    Ceiling: "runs",
    schema.Tuning: "tuning",
    schema.Ablation: "ablations",
    schema.Part: "parts",
    schema.Reading: "readings",
    schema.ModelRun: "models",
    schema.PackedRun: "packed",
    schema.ChipReading: "chip",
    schema.Call: "calls",
    Sanitized: "sanitizer",
    schema.StageProfile: "profiles",
    schema.StageCounters: "counters",
    schema.PatternCounters: "counters",
}
"""Folder below data/<gpu> of each kind of line."""
CHECKSUMS = "CHECKSUMS"
MAIN = "main_gpu"
"""The file under data/ that names the main GPU: see `gpus`."""
_CHECKS = ("checks", "random", "flash-attention")
_DOCUMENTS: dict[str, TypeAdapter[Any]] = {
    "machine.json": TypeAdapter(Machine),
    "tuned.json": TypeAdapter(Choices),
    "verdicts.json": TypeAdapter(tuple[Judged, ...]),
    "withdrawn.json": TypeAdapter(tuple[schema.Withdrawn, ...]),
}
_PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    **{folder: TypeAdapter(kind).validate_json for kind, folder in FOLDERS.items()},
    "runs": TypeAdapter(Record).validate_json,
    "counters": TypeAdapter(schema.StageCounters | schema.PatternCounters).validate_json,
    "aside": TypeAdapter(schema.Aside).validate_json,
}


@dataclass(frozen=True)
class Damage:
    """A damaged line or file."""

    path: Path
    line: int | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{where}: {self.reason}"


def append(path: Path, record: BaseModel) -> None:
    """Append a record to a file of its kind, as `append_lines` does."""
    append_lines(path, schema.to_line(record))


def append_lines(path: Path, lines: str) -> None:
    """Append whole lines to a file of records and flush them to disk.

    Locks the folder of the GPU, so that no process that writes CHECKSUMS reads a partial line.
    """
    with locked(path.parents[1]):
        _append(path, lines)


def _append(path: Path, lines: str) -> None:
    with path.open("a+b") as file:
        # A line cut short by a crash must cost itself only, not the record after it.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(lines.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, kw_only=True)
class Line:
    """A record with its file and line."""

    record: Any
    path: Path
    number: int
    """From 1."""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, which would walk the growing heap of records, all in use, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1024)
@_uncollected()
def _parsed(
    path: Path, parse: Callable[[bytes], Any], _: tuple[int, ...]
) -> tuple[tuple[Line, ...], tuple[Damage, ...]]:
    """The valid lines of a file, and its damage; cached while the `signature` is unchanged."""
    lines: list[Line] = []
    damage: list[Damage] = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            record = parse(raw)
        except ValidationError as error:
            damage.append(Damage(path, number, registry.reason(error.errors()[0])))
            continue
        run = getattr(record, "run", path.stem)
        if run != path.stem:
            damage.append(Damage(path, number, f"run: wanted {path.stem}, the file's name, got {run}"))
        else:
            lines.append(Line(record=record, path=path, number=number))
    return tuple(lines), tuple(damage)


_AHEAD = timedelta(days=1)
"""Maximum clock skew between the recording and the reading machine."""


def _in_future(record: Any) -> str:
    """Describe a record that is dated in the future; empty otherwise."""
    for name, said in (("time", getattr(record, "time", "")), ("run", getattr(record, "run", "")[:16])):
        at = datetime.fromisoformat(said) if said else datetime.now(UTC)
        if (at if at.tzinfo else at.replace(tzinfo=UTC)) > datetime.now(UTC) + _AHEAD:
            return f"{name}: {said} is in the future, by the clock here"
    return ""


def _series(record: Any) -> tuple[Samples, ...]:
    """Samples of a record, in all states; may be empty."""
    samples = getattr(record, "samples", ())
    return samples if isinstance(samples, tuple) else (samples,) if isinstance(samples, Samples) else ()


def _impossible(record: Any) -> str:
    """Describe samples that exceed the tensor-core peak at the maximum clock; empty if there are none."""
    gpu = getattr(record, "gpu", None)
    peak = gpu.tensor_tflops(gpu.max_sm_clock_mhz) if isinstance(gpu, schema.Gpu) else None
    if peak is None or not hasattr(record, "samples"):
        return ""
    if isinstance(record, Ceiling):
        rates = [record.value] if record.unit == "TFLOP/s" else []
    else:
        of = getattr(record, "problem", record)
        rates = [of.tflops(samples.median_us) for samples in _series(record)]
    name = getattr(record, "stage", getattr(record, "name", ""))
    peak *= registry.peak_factor(name)
    fastest = max(rates, default=0.0)
    return f"{fastest:.0f} TFLOP/s, above the {peak:.0f} that its GPU can reach" if fastest > peak else ""


def read(path: Path, kind: type[T]) -> tuple[tuple[T, ...], tuple[Damage, ...]]:
    """Read the records of one kind in a file, and its damage.

    Args:
        path: a file in a folder of that kind, anywhere.
    """
    lines, damage = _parsed(path, _PARSERS[FOLDERS[kind]], signature(path))
    return tuple(line.record for line in lines if isinstance(line.record, kind)), damage


def records(gpu: str, kind: type[T], data: Path = DATA) -> tuple[T, ...]:
    """Read all valid records of one kind, of `FOLDERS`, on a GPU, the oldest file first; may be empty."""
    return tuple(line.record for line in lines(gpu, FOLDERS[kind], data) if isinstance(line.record, kind))


def files(folder: Path) -> tuple[Path, ...]:
    """Files of a folder that are named by a run id, the oldest first, without links."""
    return tuple(p for p in sorted(folder.glob("*.jsonl")) if re.match(schema.RUN, p.stem) and not p.is_symlink())


def record_files(gpu: str, data: Path = DATA) -> tuple[Path, ...]:
    """All files of a GPU of known kinds: records, documents and CHECKSUMS."""
    folder = data / gpu
    single = [folder / name for name in (CHECKSUMS, *_DOCUMENTS)]
    paths = [
        path for kind in (*_PARSERS, *_CHECKS) if not (folder / kind).is_symlink() for path in files(folder / kind)
    ]
    return tuple(path for path in (*single, *paths) if path.is_file() and not path.is_symlink())


def lines(gpu: str, folder: str = "runs", data: Path = DATA) -> tuple[Line, ...]:
    """Read all valid records in a folder of a GPU, one of `FOLDERS`, without `withdrawn` ones, oldest file first."""
    back = withdrawn(gpu, data)
    return tuple(
        line for line in _lines(gpu, folder, data) if not any(withdrawal.takes_back(line.record) for withdrawal in back)
    )


def _lines(gpu: str, folder: str, data: Path) -> tuple[Line, ...]:
    paths = files(data / gpu / folder)
    return tuple(line for path in paths for line in _parsed(path, _PARSERS[folder], signature(path))[0])


def withdrawn(gpu: str, data: Path = DATA) -> tuple[schema.Withdrawn, ...]:
    """Read data/<gpu>/withdrawn.json; empty if there is none.

    Raises:
        DamagedRecordError: the file is invalid.
    """
    path = data / gpu / "withdrawn.json"
    try:
        return _DOCUMENTS[path.name].validate_json(path.read_bytes()) if path.is_file() else ()
    except ValidationError as error:
        raise DamagedRecordError(f"wanted a list of inputs, runs and reason in {path}, got {error}") from error


def sanitized(gpu: str, data: Path = DATA) -> tuple[Sanitized, ...]:
    """The newest record of each compute-sanitizer tool and stage on a GPU; may be empty."""
    return tuple({(record.tool, record.stage): record for record in records(gpu, Sanitized, data)}.values())


def extent(gpu: str, data: Path = DATA) -> str:
    """Describe the number of valid and withdrawn records of a GPU: `812 records in 4 runs`."""
    kept, total = len(lines(gpu, "runs", data)), len(_lines(gpu, "runs", data))
    withdrawn = total - kept
    back = f", and {several(withdrawn, 'record')} that {'was' if withdrawn == 1 else 'were'} withdrawn"
    return f"{several(kept, 'record')} in {several(len(files(data / gpu / 'runs')), 'run')}{back if withdrawn else ''}"


def count_samples(gpu: str, data: Path = DATA) -> dict[str, int]:
    """Number of recorded samples of stages and libraries of a GPU, by folder, without ceilings."""
    counts: dict[str, int] = {}
    kinds: tuple[type[Any], ...] = (Measurement, schema.Tuning, schema.Ablation, schema.Part, schema.Reading)
    for kind in kinds:
        flat = [samples for record in records(gpu, kind, data) for samples in _series(record)]
        counts[FOLDERS[kind]] = sum(len(samples.time_us) for samples in flat)
    return counts


def _is_slug(name: str) -> bool:
    return re.fullmatch(schema.SLUG, name) is not None


def gpus(data: Path = DATA, folder: str = "runs") -> tuple[str, ...]:
    """GPUs with at least one file in a folder of records, by default of runs; the main one first.

    The main GPU is named by `data/main_gpu`. The others, or all without that file, are sorted by the number of records.
    """
    if not data.is_dir():
        return ()
    files_by_gpu = {p.name: files(p / folder) for p in data.iterdir() if _is_slug(p.name) and not p.is_symlink()}
    sizes = {name: sum(path.stat().st_size for path in paths) for name, paths in files_by_gpu.items() if paths}
    main = main_gpu(data)
    return tuple(sorted(sizes, key=lambda name: (name != main, -sizes[name], name)))


def main_gpu(data: Path = DATA) -> str:
    """The GPU named by `data/main_gpu`; empty without that file."""
    return (data / MAIN).read_text(encoding="utf-8").strip() if (data / MAIN).is_file() else ""


def folders(data: Path = DATA) -> tuple[str, ...]:
    """Folders of all GPUs, with any contents."""
    return tuple(sorted(p.name for p in data.iterdir() if p.is_dir())) if data.is_dir() else ()


def require_runs(gpu: str | None, data: Path = DATA) -> str:
    """Return the given GPU, by default the main one, after checking that it has runs.

    Raises:
        NoDataError: the GPU has no runs.
    """
    known = gpus(data)
    name = gpu or next(iter(known), None)
    if name not in known:
        raise NoDataError(
            f"wanted recorded runs of {f'GPU {gpu!r}' if gpu else 'a GPU'} under {data}, found "
            f"{'none' if data.is_dir() else 'no such folder'}. "
            f"GPUs with data: {', '.join(known) or 'none yet'}. `flashlab bench` on such a GPU makes some."
        )
    return str(name)


def measurements(gpu: str, data: Path = DATA) -> tuple[Measurement, ...]:
    """Recorded rows of stages and libraries of a GPU, the oldest file first, without rows `with_lse`; may be empty."""
    return tuple(row for row in records(gpu, Measurement, data) if not row.with_lse)


def newest_ceilings(gpu: str, data: Path = DATA) -> dict[str, Ceiling]:
    """Newest reading of each ceiling; may be empty."""
    return {ceiling.name: ceiling for ceiling in records(gpu, Ceiling, data)}


def _data_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and p.name != CHECKSUMS)


def _listed(folder: Path) -> tuple[dict[str, str], tuple[Damage, ...]]:
    """Read the checksums of CHECKSUMS by file, and its damage; empty if it is missing."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}, (Damage(path, None, "missing"),)
    sums, unread = checksums_in(path.read_bytes())
    return sums, tuple(Damage(path, number, "not a checksum line") for number in unread)


def checksums_in(content: bytes) -> tuple[dict[str, str], list[int]]:
    """Parse a CHECKSUMS file: checksums by file, and the numbers of invalid lines."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    matches = [re.fullmatch(r"([0-9a-f]{64})  (\S+)", line) for line in lines]
    return {match[2]: match[1] for match in matches if match}, [
        at for at, match in enumerate(matches, start=1) if match is None
    ]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other flashlab processes."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _sealing(folder: Path) -> Iterator[dict[str, str]]:
    """Lock the checksums of a GPU's folder for modification, and write them atomically at the end."""
    with locked(folder):
        for part in folder.glob(_PART):  # of a process that was killed: whoever writes holds the lock
            part.unlink(missing_ok=True)
        sums, _ = _listed(folder)
        yield sums
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums, key=Path)]
        write_at_once(folder / CHECKSUMS, "".join(lines))


_PART = ".*.[0-9]*"
"""Pattern of the names of partially written documents."""


def write_at_once(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see either the old or the new contents, even after a crash."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")  # several threads may write it
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _has_grown(content: bytes, old: str) -> bool:
    """Whether a file was only appended to: some prefix of whole lines has the old checksum."""
    beginning = hashlib.sha256()
    for line in content.splitlines(keepends=True):
        beginning.update(line)
        if beginning.hexdigest() == old:
            return True
    return False


def write_checksums(gpu: str, data: Path = DATA, *, written: Path | None = None) -> Path:
    """Update data/<gpu>/CHECKSUMS, in the format of `sha256sum`, for new files and appended lines.

    A file that was changed in any other way, or removed, keeps its old checksum, so that `verify` reports it. Reads
    only files newer than CHECKSUMS, and `written`.

    Raises:
        DamagedRecordError: a file read was changed otherwise; all others are up to date.
        OutputError: the folder is not writable.
    """
    folder = writable_dir(data / gpu, "records")
    path = folder / CHECKSUMS
    damage: list[Damage] = []
    with _sealing(folder) as sums:
        sealed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        for file in _data_files(folder):
            name = file.relative_to(folder).as_posix()
            if file.is_symlink() or (file != written and name in sums and file.stat().st_mtime_ns < sealed_ns):
                continue
            content = file.read_bytes()
            grown = name not in sums or (file.suffix == ".jsonl" and _has_grown(content, sums[name]))
            if grown:
                sums[name] = digest(content)
            elif digest(content) != sums[name]:
                damage.append(Damage(file, None, "differs from CHECKSUMS"))
    if damage:
        raise DamagedRecordError("wanted sound records, found:\n" + "\n".join(f"  {fault}" for fault in damage))
    return path


def rewrite(gpu: str, name: str, text: str, data: Path = DATA) -> Path:
    """Replace a document such as `machine.json`, and its line in CHECKSUMS.

    Raises:
        DamagedRecordError: the existing file does not match CHECKSUMS; it is not replaced.
        OutputError: the folder is not writable.
    """
    folder = writable_dir(data / gpu, "records")
    path = folder / name
    with _sealing(folder) as sums:
        if path.is_symlink() or (path.is_file() and name in sums and digest(path.read_bytes()) != sums[name]):
            raise DamagedRecordError(
                f"wanted {path} to match CHECKSUMS before replacing it, got another. Restore it with git, or "
                "delete it to have it made anew."
            )
        path.parent.mkdir(exist_ok=True)
        write_at_once(path, text)
        sums[name] = digest(path.read_bytes())
    return path


@_uncollected()
def verify(gpu: str, data: Path = DATA) -> tuple[Damage, ...]:
    """Verify all data of a GPU; returns the damage found.

    Checks: checksums; missing, unlisted, unknown and linked files; lines and documents that are invalid, duplicated, of
    another run, dated in the future, or faster than the GPU; measurements that contradict others with the same machine
    code and inputs; and with git, files that differ from the commit that added them.
    """
    folder = data / gpu
    if not _is_slug(gpu) or folder.is_symlink():
        return (Damage(folder, None, "wanted a folder named by lower-case letters, digits and hyphens, no link"),)
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
            elif digest(path.read_bytes()) != sums[name]:
                damage.append(Damage(path, None, "differs from CHECKSUMS"))
            damage.extend(_damage_within(name, path, signature(path)))
    with contextlib.suppress(DamagedRecordError):  # of withdrawn.json, which is named above
        damage.extend((*_doubled(gpu, data), *_disagreeing(gpu, data)))
    return (*damage, *_changed_since_added(gpu, data))


@lru_cache(maxsize=4096)
def _damage_within(name: str, path: Path, content: tuple[int, ...]) -> tuple[Damage, ...]:
    """Damage in the contents of a file, `name` below the GPU's folder; cached by its `signature`, `content`."""
    kind, _, rest = name.partition("/")
    try:
        if path.suffix == ".jsonl" and not re.match(schema.RUN, path.stem):
            return (Damage(path, None, "not named by a run's id"),)
        if kind in _DOCUMENTS and not rest:
            document = _DOCUMENTS[kind].validate_json(path.read_bytes())
            if isinstance(document, Machine) and document.gpu.slug != path.parent.name:
                return (Damage(path, None, f"of {document.gpu.slug}"),)
        elif kind in _PARSERS and path.suffix == ".jsonl":
            parsed, damage = _parsed(path, _PARSERS[kind], content)
            reasons = ((line, _foreign(line) or _in_future(line.record) or _impossible(line.record)) for line in parsed)
            return (*damage, *(Damage(path, line.number, reason) for line, reason in reasons if reason))
        elif kind in _CHECKS and path.suffix == ".jsonl":
            checks.read_lines(path)
        elif kind == "figures" and path.suffix == ".svg":
            return _damage_of_drawing(path)
        else:
            return (Damage(path, None, "of no known kind"),)
    except ValidationError as error:
        return (Damage(path, None, registry.reason(error.errors()[0])),)
    except DamagedRecordError as error:
        number, _, reason = str(error).removeprefix(f"{path}:").partition(": ")
        return (Damage(path, int(number), reason),)
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        return (Damage(path, None, str(error)),)
    return ()


def _foreign(line: Line) -> str:
    """Describe a line of another GPU than its folder; empty otherwise."""
    gpu = getattr(line.record, "gpu", None)
    here = line.path.parents[1].name
    return f"gpu: of {gpu.slug}" if isinstance(gpu, schema.Gpu) and gpu.slug != here else ""


def _damage_of_drawing(path: Path) -> tuple[Damage, ...]:
    """Active or external content in an SVG."""
    for element in ElementTree.parse(path).iter():
        tag = element.tag.rpartition("}")[2].lower()
        values = [(name.rpartition("}")[2].lower(), value.strip()) for name, value in element.attrib.items()]
        loads = any(name == "href" and not value.startswith(("#", "data:image/png")) for name, value in values)
        if tag in ("script", "foreignobject") or loads or any(name.startswith("on") for name, _ in values):
            return (Damage(path, None, f"a drawing whose <{tag}> runs or loads something"),)
    return ()


_FEW = 5
"""Number of distinct sample values from which identical series are copies; fewer may coincide by timer resolution."""


def _doubled(gpu: str, data: Path) -> Iterator[Damage]:
    """Lines with the same samples as another line of the GPU, i.e. copies."""
    seen: dict[tuple[float, ...], str] = {}
    for folder in dict.fromkeys(FOLDERS.values()):
        for line in lines(gpu, folder, data):
            series = {samples.time_us for samples in _series(line.record) if len(set(samples.time_us)) >= _FEW}
            if copied := [seen[times_us] for times_us in series if times_us in seen]:
                yield Damage(line.path, line.number, f"the samples of {copied[0]} again")
            seen |= dict.fromkeys(series, f"{folder}/{line.path.name}:{line.number}")


def _disagreeing(gpu: str, data: Path) -> Iterator[Damage]:
    """Lines with different fallback counts than the first line with the same machine code and problem.

    The inputs of a problem are drawn from one seed, so one of the two was measured on other inputs.
    """
    first: dict[object, tuple[str, tuple[int, int]]] = {}
    for folder in dict.fromkeys(FOLDERS.values()):
        for line in lines(gpu, folder, data):
            row = line.record
            if isinstance(row, schema.Timed) and row.cubin and row.fallbacks and row.problem.inputs != TRAINED:
                same = row.cubin.sha256, row.problem, row.software.get("torch"), row.software.get("cupy-cuda13x")
                place, earlier = first.setdefault(same, (f"{folder}/{line.path.name}:{line.number}", row.fallbacks))
                if row.fallbacks != earlier:
                    reason = f"fallbacks: {row.fallbacks}, where {place} has {earlier} with the same code and problem"
                    yield Damage(line.path, line.number, f"{reason}; withdrawn.json takes back the wrong one")


def _added(gpu: str, data: Path) -> tuple[dict[str, str], Callable[[str], str]]:
    """The commit that added each file of records, and a function for the CHECKSUMS of a commit; empty without git."""
    folder = (data / gpu).resolve()
    root = next((parent for parent in folder.parents if (parent / ".git").exists()), None)
    added: dict[str, str] = {}
    if root is None:
        return added, lambda commit: ""
    inside = folder.relative_to(root).as_posix()
    options = ("--no-renames", "--full-history", "--topo-order", "--reverse", "--diff-filter=A", "--name-only")
    try:
        log = provenance.git(root, "log", *options, "--format=%x00%H", "--", f"{inside}/*.jsonl")
    except (OSError, subprocess.CalledProcessError):
        return added, lambda commit: ""
    for entry in log.split("\0")[1:]:
        commit, *names = entry.split("\n")
        for name in filter(None, names):
            added.setdefault(name.removeprefix(f"{inside}/"), commit)
    return added, lambda commit: provenance.git(root, "show", f"{commit}:{inside}/{CHECKSUMS}", missing="")


def _changed_since_added(gpu: str, data: Path) -> Iterator[Damage]:
    """Files of records that do not match CHECKSUMS in the commit that added them; none without git."""
    added, sums_of = _added(gpu, data)
    sealed = {commit: sums_of(commit) for commit in {*added.values()}}
    for name, commit in added.items():
        path = data / gpu / name
        if not path.is_file():
            yield Damage(path, None, f"added by commit {commit[:7]}, missing")
        elif f"{digest(path.read_bytes())}  {name}\n" not in sealed[commit]:
            yield Damage(path, None, f"changed since commit {commit[:7]}, which added it")


# --- What was cut off -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mend:
    """An action of `repair` on one file."""

    path: Path
    action: Literal["remove", "set aside", "list", "make"]
    """remove: a partial document; set aside: truncated lines; list: in CHECKSUMS; make: machine.json or CHECKSUMS."""
    torn: Mapping[int, bytes] = field(default_factory=dict)
    """Truncated lines, by number."""


def mends(gpu: str, data: Path = DATA) -> tuple[Mend, ...]:
    """List what `repair` would do with a GPU's folder, without writing anything.

    Excludes modifications, which `verify` reports: files that differ from CHECKSUMS other than by appended lines, and
    truncated lines in a file as committed.
    """
    folder = data / gpu
    if not _is_slug(gpu) or folder.is_symlink() or not folder.is_dir():
        return ()
    sums, missing = _listed(folder)
    committed = _added(gpu, data)[0]
    planned: list[Mend] = []
    for path in _data_files(folder):
        name, content = path.relative_to(folder).as_posix(), b"" if path.is_symlink() else path.read_bytes()
        listed = sums.get(name)
        if re.fullmatch(r"\.\S+\.\d+", path.name):
            planned.append(Mend(path=path, action="remove"))
        elif path.is_symlink() or not (listed in (None, digest(content)) or _has_grown(content, listed or "")):
            continue
        elif name not in committed and (torn := _torn(path, content)):
            planned.append(Mend(path=path, action="set aside", torn=torn))
        elif listed != digest(content) and not _damage_within(name, path, signature(path)):
            planned.append(Mend(path=path, action="list"))
    if not (folder / "machine.json").is_file() and _newest_gpu(gpu, data):
        planned.append(Mend(path=folder / "machine.json", action="make"))
    if missing and not sums and not planned:
        planned.append(Mend(path=folder / CHECKSUMS, action="make"))
    return tuple(planned)


def repair(gpu: str, data: Path = DATA, *, host: Mapping[str, str] | None = None) -> tuple[Mend, ...]:
    """Complete a folder that a run left unfinished, keeping every valid line; returns the actions.

    Truncated lines move to `aside/` with their position; valid files missing in CHECKSUMS are added; machine.json is
    rebuilt from the newest record. Must not be called during a measurement into the folder.

    Args:
        host: description of the host for a new machine.json.

    Raises:
        OutputError: the folder is not writable.
    """
    folder, todo = data / gpu, mends(gpu, data)
    if not todo:
        return ()
    writable_dir(folder, "records")
    with _sealing(folder) as sums:
        for mend in todo:
            name = mend.path.relative_to(folder).as_posix()
            if mend.action == "remove":
                mend.path.unlink(missing_ok=True)
                sums.pop(name, None)
            elif mend.action != "make":
                _set_aside(mend, folder, sums)
                if not _damage_within(name, mend.path, signature(mend.path)):
                    sums[name] = digest(mend.path.read_bytes())
    if not (folder / "machine.json").is_file() and (here := _newest_gpu(gpu, data)):
        write_machine(Machine(gpu=here, host=dict(host or {})), data)
    return todo


def _torn(path: Path, content: bytes) -> dict[int, bytes]:
    """Lines of a file of records that are not JSON, truncated by a crash or a full disk."""
    torn: dict[int, bytes] = {}
    for number, raw in enumerate(content.split(b"\n") if path.suffix == ".jsonl" else (), start=1):
        try:
            json.loads(raw or b"{}")
        except ValueError:
            torn[number] = raw
    return torn if path.parent.name in (*_PARSERS, *_CHECKS) else {}


def _set_aside(mend: Mend, folder: Path, sums: dict[str, str]) -> None:
    """Move truncated lines to `aside/`, writing there first, so that none is lost."""
    if not mend.torn:
        return
    aside = folder / "aside" / mend.path.name
    aside.parent.mkdir(exist_ok=True)
    name = mend.path.relative_to(folder).as_posix()
    for number, raw in mend.torn.items():
        text = raw.decode("utf-8", errors="replace").replace("\0", "")
        _append(aside, schema.to_line(schema.Aside(file=name, line=number, text=text)))
    sums[aside.relative_to(folder).as_posix()] = digest(aside.read_bytes())
    lines = mend.path.read_bytes().split(b"\n")
    kept = [raw for number, raw in enumerate(lines, start=1) if raw and number not in mend.torn]
    write_at_once(mend.path, b"".join(raw + b"\n" for raw in kept))


def _newest_gpu(gpu: str, data: Path) -> schema.Gpu | None:
    """The GPU according to the newest record of its folder; None without records."""
    all_records = [line.record for folder in dict.fromkeys(FOLDERS.values()) for line in lines(gpu, folder, data)]
    known = [record for record in all_records if isinstance(getattr(record, "gpu", None), schema.Gpu)]
    return max(known, key=lambda record: record.time).gpu if known else None


def write_machine(machine: Machine, data: Path = DATA) -> Path:
    """Write data/<gpu>/machine.json; raises as `rewrite` does."""
    text = json.dumps(machine.model_dump(mode="json"), indent=2) + "\n"
    return rewrite(machine.gpu.slug, "machine.json", text, data)
