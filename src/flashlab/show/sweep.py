"""Cells: a notebook, a GPU and parameters. papermill runs each, and completed ones are not run again.

    notebooks/cells.toml ──▶ cells ──papermill──▶ OUT/<cell>/: the executed notebook, its result file, cell.json
                                     └─ in the notebook ──▶ data/<gpu>/

A report is a sweep of one GPU, after which every notebook runs again to show the records. On one GPU cells run here,
one after the other; with Ray they are placed on the GPUs of a machine or a cluster, one per GPU. Measurements are
written to data/ row by row, so an interrupted cell resumes (`bench.run`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from flashlab import __version__
from flashlab.build import sources
from flashlab.core.environment import environment
from flashlab.core.errors import MissingPackageError, NoGpuError, ParameterError, ReportError
from flashlab.core.facts import Facts
from flashlab.core.paths import BUILD, DATA, KERNELS, NOTEBOOKS, ROOT, alone, digest, writable_dir
from flashlab.kernels import registry
from flashlab.record import provenance, store, upload
from flashlab.run import gpu as gpus
from flashlab.show.notebook import PROGRESS, Outcome, read_outcome

CELLS = NOTEBOOKS / "cells.toml"
REPLAY_TIMEOUT_S = 900.0
MEASURE_TIMEOUT_S = 3600.0
_REPLAYS_AT_ONCE = 2
_POLL_S = 0.5

Say = Callable[[str], None]


# --- One notebook -----------------------------------------------------------------------------------------------------


def execute(
    notebook: Path,
    out: Path,
    parameters: Mapping[str, str],
    timeout_s: float = REPLAY_TIMEOUT_S,
    *,
    held: Sequence[int] = (),
) -> Outcome:
    """Execute a notebook through papermill into `out`, and read its result file.

    papermill's exit status alone does not prove success: a cell that exits leaves it at 0, and a killed kernel leaves
    no trace in the notebook. So the result file, which the last cell writes, must be there and valid afterwards.

    Args:
        out: folder for the executed notebook and its result file.
        parameters: values of existing parameters, as `cells_of` ensures; `out` is set here.
        timeout_s: time limit of the whole notebook, after which its kernel is stopped.
        held: open files that papermill inherits, to hold a lock while it lives.

    Raises:
        ReportError: it failed, timed out or did not complete.
        OutputError: `out` cannot be written.
    """
    name = notebook.stem
    folder = writable_dir(out, "executed notebooks")
    executed, result = folder / notebook.name, folder / f"{name}.json"
    for old in (executed, result):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "papermill", str(notebook), str(executed), "--kernel", "python3"]
    command += ["--no-progress-bar", "--log-level", "ERROR", "--execution-timeout", str(int(timeout_s) or 1)]
    for key, value in {**parameters, "out": str(folder)}.items():
        command += ["-r", key, value]
    status, log = run_program(command, timeout_s + 10, held=held)
    failure = _failure(executed)
    if status != 0 or failure:
        what = failure or ("ran out of time" if status is None else f"papermill ended with status {status}")
        raise ReportError(f"notebook {name}: {what}\n{tail(log)}".rstrip())
    return read_outcome(result, name)


def parameters_of(notebook: Path) -> tuple[str, ...]:
    """The names of a notebook's parameters.

    Raises:
        ParameterError: there is no such notebook.
    """
    import papermill

    if not notebook.is_file():
        raise ParameterError(f"notebook: wanted one that exists, got {notebook}")
    return tuple(papermill.inspect_notebook(str(notebook)))


def _failure(executed: Path) -> str:
    """The first error in an executed notebook, with its cell; empty if there is no error or no notebook."""
    import nbformat

    with contextlib.suppress(OSError, ValueError):
        cells = nbformat.read(executed, as_version=4).cells  # type: ignore[no-untyped-call]
        for number, cell in enumerate(cells, start=1):
            for output in cell.get("outputs", []):
                if output.output_type == "error":
                    return f"cell {number}: {output.ename}: {output.evalue}"
    return ""


_running: set[subprocess.Popen[bytes]] = set()
"""Processes of `run_program`."""
_stopped = threading.Event()
"""Set if runs were ended on purpose: nothing is retried."""


def run_program(command: Sequence[str], timeout_s: float, *, held: Sequence[int] = ()) -> tuple[int | None, str]:
    """Exit status (None: timed out) and output of a command without stdin, run at the repository root."""
    # A file, not a pipe: what the command leaves behind may hold a pipe open, and its end is not waited for.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=held,
            env={**environment(), "NO_MKDOCS_2_WARNING": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        )
        _running.add(process)
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _running.discard(process)
            _kill(process)
            process.wait()
        log.seek(0)
        return status, log.read()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, including notebook kernels, which are in separate process groups."""
    if process.poll() is not None:
        return
    below, family = [process.pid], [process.pid]
    while below:
        for children in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                some = [int(child) for child in children.read_text().split()]
                below, family = below + some, family + some
    for pid in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def tail(log: str) -> str:
    """The last lines of a log."""
    return "\n".join(log.strip().splitlines()[-30:])


# --- Cells ------------------------------------------------------------------------------------------------------------


class _Entry(Facts):
    """A table of a file of cells."""

    notebook: str
    minutes: float = Field(gt=0)
    gpu: tuple[str, ...] = ()
    parameters: dict[str, str | list[str]] = Field(default_factory=dict)


class Cell(Facts):
    """A notebook with parameters, to run on a GPU."""

    notebook: Path
    gpu: str
    """The folder under data/; empty if the notebook takes no `gpu`."""
    parameters: dict[str, str]
    """Including `source`, without `gpu`, `data` and `out`."""
    minutes: float
    """Estimated minutes, used until it has run once."""
    digests: dict[str, str]
    """sha256 of the inputs of its result, by name: the notebook, each kernel it uses, the package's version."""

    @property
    def measures(self) -> bool:
        """Whether it needs the GPU; otherwise it shows what is on record."""
        return self.parameters.get("source") == "measure"

    @property
    def id(self) -> str:
        """A folder name, independent of the code."""
        key = json.dumps([self.notebook.stem, self.gpu, sorted(self.parameters.items())])
        return "-".join(filter(None, (self.notebook.stem, self.gpu, digest(key.encode())[:8])))

    @property
    def label(self) -> str:
        """Display name."""
        values = (f"{name}={value}" for name, value in self.parameters.items() if name != "source")
        return " ".join([self.notebook.stem, *values, *(["on " + self.gpu] if self.measures else [])])


def cells_of(
    name: str, file: Path = CELLS, *, available: Iterable[str] = (), given: Mapping[str, str] | None = None
) -> tuple[Cell, ...]:
    """The cells of a set: one for each of a table's GPUs and each combination of the values in its lists.

    Args:
        name: of the set.
        file: TOML; a notebook is named by its file beside it, without `.ipynb`.
        available: GPUs, for tables that name none.
        given: parameters of all those notebooks that have them.

    Raises:
        ParameterError: no such file or set, or an invalid one.
    """
    try:
        sets = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"cells: wanted a TOML file of cells, got {file}: {getattr(error, 'strerror', error)}"
        ) from error
    names = [key for key, value in sets.items() if isinstance(value, list)]
    if name not in names:
        raise ParameterError(f"cells: wanted one of the sets in {file}: {', '.join(names) or 'none'}, got {name!r}")
    cells = []
    for table in sets[name]:
        try:
            entry = _Entry.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ParameterError(f"cells: {file}, {name}: {where}: {first['msg']}, got {table}") from error
        notebook = file.parent / f"{entry.notebook}.ipynb"
        known = parameters_of(notebook)
        fixed = {key: [value] for key, value in (given or {}).items() if key in known}
        values = {key: [value] if isinstance(value, str) else value for key, value in entry.parameters.items()} | fixed
        if unknown := [key for key in values if key not in known]:
            raise ParameterError(f"cells: {notebook.stem} has {', '.join(known)}, got {', '.join(unknown)}")
        for gpu, *chosen in itertools.product(entry.gpu or tuple(available), *values.values()):
            parameters = dict(zip(values, chosen, strict=True))
            cells.append(cell(notebook, gpu, parameters, minutes=entry.minutes))
    return tuple(cells)


def cell(notebook: Path, gpu: str, parameters: Mapping[str, str], *, minutes: float = 1.0) -> Cell:
    """A cell with the digests of its inputs."""
    known = parameters_of(notebook)
    parameters = ({"source": "measure"} if "source" in known else {}) | dict(parameters)
    chosen = [registry.resolve(name) for name in parameters.get("stages", "").split(",") if name]
    files = {notebook.name: notebook, "package": None}
    if parameters.get("source") == "measure":
        for stage in [registry.get(name) for name in chosen] or [
            *registry.STAGES.values(),
            *registry.DEAD_ENDS.values(),
        ]:
            files |= {sources.shown(path): path for path in _read_by(stage.source)}
    return Cell(
        notebook=notebook,
        gpu=gpu if "gpu" in known else "",
        parameters=parameters,
        minutes=minutes,
        digests={
            name: digest(__version__.encode() if path is None else path.read_bytes()) for name, path in files.items()
        },
    )


@cache
def _read_by(source: Path) -> tuple[Path, ...]:
    """The files that a stage's source is compiled from."""
    text = source.read_text(encoding="utf-8")
    return tuple(sorted({source, *sources.included(source, text, (KERNELS, KERNELS / "common"))}))


# --- What has run -----------------------------------------------------------------------------------------------------


class Ran(Facts):
    """`<notebook>.cell.json`: how the last run of a cell ended."""

    cell: Cell
    began: str
    seconds: float
    tries: int
    failure: str
    """Empty if it completed."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a cell."""

    state: Literal["done", "left", "failed", "running"]
    why: str = ""
    """For `left`, what changed since it ran; for `failed`, the error; for `running`, the progress."""
    seconds: float | None = None
    """Duration of its last run; None if there was none."""

    def left_s(self, cell: Cell) -> float:
        """Estimated seconds left."""
        return 0.0 if self.state == "done" else self.seconds or 60 * cell.minutes


def state(cell: Cell, folder: Path, data: Path = DATA) -> State:
    """The state of a cell whose files are in `folder`.

    A cell is done if it completed with a valid result file, for the same notebook, kernels, version and parameters, and
    its records are still in `data`.
    """
    name = cell.notebook.stem
    lock = folder / f"{name}.lock"
    try:
        with alone(lock) if lock.is_file() else contextlib.nullcontext():
            pass
    except BlockingIOError as error:
        return State(state="running", why=_progress(folder)[0] or str(error))
    try:
        ran = Ran.model_validate_json((folder / f"{name}.cell.json").read_bytes())
    except (OSError, ValidationError):
        return State(state="left")
    if ran.failure:
        return State(state="failed", why=ran.failure.splitlines()[0], seconds=ran.seconds)
    changed = sorted(
        key
        for key in cell.digests.keys() | ran.cell.digests.keys()
        if cell.digests.get(key) != ran.cell.digests.get(key)
    )
    try:
        outcome = read_outcome(folder / f"{name}.json", name)
    except ReportError as error:
        return State(state="left", why=str(error), seconds=ran.seconds)
    gone = [run for run in outcome.runs if not (data / (outcome.gpu or "") / "runs" / f"{run}.jsonl").is_file()]
    why = f"its records are not in {data}: {gone[0]}" if gone else ""
    if changed:
        why = f"changed since it ran: {', '.join(changed)}"
    return State(state="left" if why else "done", why=why, seconds=ran.seconds)


def run_cell(
    cell: Cell, folder: Path, data: Path = DATA, *, timeout_s: float | None = None, fresh: bool = False
) -> State:
    """Run a cell, unless it is done or another process runs it; a measuring cell that fails is retried once.

    Args:
        folder: for its files.
        data: folder of the records.
        timeout_s: for the notebook; `MEASURE_TIMEOUT_S` or `REPLAY_TIMEOUT_S` where None.
        fresh: run it though it is done.

    Raises:
        OutputError: `folder` cannot be written.
    """
    name = cell.notebook.stem
    writable_dir(folder, "the files of a cell")
    progress = folder / PROGRESS
    progress.unlink(missing_ok=True)
    known = parameters_of(cell.notebook)
    given = cell.parameters | {key: value for key, value in (("gpu", cell.gpu), ("data", str(data))) if key in known}
    try:
        before = state(cell, folder, data)
        with alone(folder / f"{name}.lock") as lock:
            if before.state == "done" and not fresh:
                return before
            began, clock = datetime.now(UTC), time.monotonic()
            tries, failure = 0, "never tried"
            while failure and tries < (2 if cell.measures else 1) and not _stopped.is_set():
                tries += 1
                try:
                    limit_s = timeout_s or (MEASURE_TIMEOUT_S if cell.measures else REPLAY_TIMEOUT_S)
                    execute(cell.notebook, folder, given, limit_s, held=[lock])
                    failure = ""
                except (ReportError, OSError) as error:
                    failure = str(error)
            if _stopped.is_set():
                return State(state="left")
            ran = Ran(
                cell=cell,
                began=began.isoformat(timespec="seconds"),
                seconds=round(time.monotonic() - clock, 1),
                tries=tries,
                failure=failure,
            )
            copied = upload.attempt(cell.gpu, data) if cell.measures else ""
            with contextlib.suppress(OSError):  # A disk that is full: the cell counts as left.
                store.write_at_once(folder / f"{name}.cell.json", ran.model_dump_json(indent=1) + "\n")
    except BlockingIOError as error:
        return State(state="running", why=str(error))
    finally:
        progress.unlink(missing_ok=True)
    why = failure or "; ".join(filter(None, (f"on try {tries}" if tries > 1 else "", copied)))
    return State(state="failed" if failure else "done", why=why, seconds=ran.seconds)


def planned(cells: Sequence[Cell], folders: Path, data: Path = DATA, *, flat: bool = False) -> list[dict[str, Any]]:
    """The states of cells: notebook, gpu, parameters, state, why, minutes and cost of each; nothing is run.

    Minutes are measured if the cell is done, else estimated; their cost is in dollars, by `prices`, None if unknown.
    Arguments are those of `run`.
    """
    price, rows = prices(cells, data), []
    for cell in cells:
        now = state(cell, folders if flat else folders / cell.id, data)
        minutes = (now.seconds or 0.0 if now.state == "done" else now.left_s(cell)) / 60
        cost = price[cell.gpu] * minutes / 60 if cell.measures and cell.gpu in price else None
        row: dict[str, Any] = {"notebook": cell.notebook.stem, "gpu": cell.gpu, "parameters": cell.parameters}
        row |= {"state": now.state, "why": now.why, "minutes": round(minutes, 2)}
        rows.append(row | {"cost": None if cost is None else round(cost, 2)})
    return rows


def prices(cells: Iterable[Cell], data: Path = DATA) -> dict[str, float]:
    """Price of each GPU, US dollars per hour: `FLASHLAB_USD_PER_GPU_HOUR`, else its newest record's; may be empty."""
    now = (provenance.start() or {}).get("usd_per_gpu_hour")
    usd_per_hour = {}
    for gpu in {cell.gpu for cell in cells if cell.measures}:
        said = [record.start.usd_per_gpu_hour for record in store.measurements(gpu, data) if record.start]
        if price := now or next(filter(None, reversed(said)), None):
            usd_per_hour[gpu] = float(price)
    return usd_per_hour


# --- A sweep ----------------------------------------------------------------------------------------------------------


def gpus_here() -> dict[str, int]:
    """Number of visible GPUs of each model, by folder under data/; may be empty."""
    return dict(Counter(gpus.info(index).slug for index in range(gpus.device_count())))


def place(cells: Iterable[Cell], available: Mapping[str, int]) -> None:
    """Raise `NoGpuError` if a cell needs a GPU that is not available; the message lists the available ones."""
    wanted = {cell.gpu for cell in cells if cell.measures}
    if missing := sorted(name or "any GPU" for name in wanted if not available.get(name)):
        has = ", ".join(f"{count} {name}" for name, count in available.items() if count) or "no GPU"
        raise NoGpuError(
            f"wanted {', '.join(missing)}, found {has}. `gpu` in the file of cells, or --gpu, names an available one"
        )


def run(
    cells: Sequence[Cell],
    folders: Path = BUILD / "sweep",
    data: Path = DATA,
    *,
    flat: bool = False,
    timeout_s: float | None = None,
    fresh: bool = False,
    ray: Any = None,
    available: Mapping[str, int] | None = None,
    say: Say = lambda _: None,
    live: Say = lambda _: None,
) -> dict[str, State]:
    """Run cells: measuring ones alone on a GPU each, then the others, two at a time; the results by cell id.

    A failure does not affect other cells. Interrupting this process ends its children; a later call resumes.

    Args:
        folders: has a folder of each cell's files; with `flat` it is the folder of them all, for cells of different
            notebooks.
        data, timeout_s, fresh: as `run_cell` takes them.
        ray: the module, connected to its cluster (`with_ray`); None: cells run here, one at a time.
        available: GPUs by kind, those of this machine or of Ray's cluster where None.
        say: told when a cell ends.
        live: told how far they are, twice a second.

    Raises:
        NoGpuError: a cell wants a GPU that nobody has; before anything runs.
        OutputError: a folder cannot be written; or, as `upload.sync`, records cannot be sent.
    """
    available = (ray_gpus(ray) if ray else gpus_here()) if available is None else available
    place(cells, available)
    for gpu in {cell.gpu for cell in cells if cell.measures}:
        upload.sync(gpu, data)  # fetches what was measured before, and shows that records can be sent
    where = {cell.id: folders if flat else folders / cell.id for cell in cells}
    ended: dict[str, State] = {}
    _stopped.clear()
    for group in ([cell for cell in cells if cell.measures], [cell for cell in cells if not cell.measures]):
        measures = bool(group) and group[0].measures
        on_ray = ray if measures else None
        slots = sum(available.values()) if on_ray else 1 if measures else _REPLAYS_AT_ONCE
        if on_ray:  # The longest first, so that the last GPU is not left alone with it.
            group.sort(key=lambda cell: -state(cell, where[cell.id], data).left_s(cell))
        jobs: futures.Executor = _OnRay(ray) if on_ray else futures.ThreadPoolExecutor(slots)
        options: dict[str, Any] = {"timeout_s": timeout_s, "fresh": fresh}
        pending = {jobs.submit(run_cell, cell, where[cell.id], data, **options): cell for cell in group}
        needed_s = {cell.id: state(cell, where[cell.id], data).left_s(cell) for cell in group}
        try:
            while pending:
                for job in futures.wait(pending, timeout=_POLL_S, return_when=futures.FIRST_COMPLETED).done:
                    cell = pending.pop(job)
                    ended[cell.id] = _how_it_ended(job, cell, where[cell.id], data)
                    say(f"{cell.label}: {_said(ended[cell.id])}")
                available = ray_gpus(ray) if on_ray else available
                for job in [job for job, cell in pending.items() if cell.measures and not available.get(cell.gpu)]:
                    cell = pending.pop(job)
                    ended[cell.id] = State(state="failed", why=f"there is no {cell.gpu} any more")
                progress = {cell.id: ("", None) if flat else _progress(where[cell.id]) for cell in pending.values()}
                texts = [f"{cell.label}: {progress[cell.id][0]}" for cell in pending.values() if progress[cell.id][0]]
                left_s = [needed_s[name] if left is None else left for name, (_, left) in progress.items()]
                minutes = max([sum(left_s) / slots, *left_s], default=0.0) / 60
                live(" · ".join([f"{len(ended)} of {len(cells)} cells", f"about {minutes:.0f} min left", *texts]))
        except BaseException:
            _stopped.set()
            for process in set(_running):
                _kill(process)
            jobs.shutdown(cancel_futures=True)
            futures.wait([job for job in pending if not job.cancelled()], timeout=10)
            raise
        jobs.shutdown()
    return ended


def _said(ended: State) -> str:
    seconds = f" after {ended.seconds / 60:.1f} min" if ended.seconds else ""
    return f"{ended.state}{seconds}{': ' if ended.why else ''}{ended.why.splitlines()[0] if ended.why else ''}"


def _progress(folder: Path) -> tuple[str, float | None]:
    """Progress of the notebook that writes into a folder, and seconds left; empty and None if unknown."""
    try:
        said = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        return f"{said['done']} of {said['total']}, {said['text']}", said["left_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", None


class _OnRay(futures.Executor):
    """An executor of Ray tasks, each on a GPU of its cell's model."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._refs: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> futures.Future[Any]:
        """Submit a call of `fn`, whose first argument is a cell."""
        task = self._ray.remote(num_gpus=1, resources={args[0].gpu: 1}, max_retries=1)(fn)
        self._refs.append(task.remote(*args, **options))
        job: futures.Future[Any] = self._refs[-1].future()
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down; with `cancel_futures`, cancel running tasks."""
        for ref in self._refs if cancel_futures else ():
            self._ray.cancel(ref)


def _how_it_ended(job: futures.Future[State], cell: Cell, folder: Path, data: Path) -> State:
    try:
        ended = job.result()
    except Exception as error:  # A cell costs itself alone; Ray's own errors are of many classes.
        return State(state="failed", why=f"{type(error).__name__}: {error}")
    if ended.state == "done" and state(cell, folder, data).state != "done":
        return State(state="left", why="its files are not here but where it ran: `flashlab collect` takes them over")
    return ended


# --- Ray --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_ray(address: str, available: Mapping[str, int] | None = None) -> Iterator[Any]:
    """Ray's module, connected.

    Args:
        address: of a cluster whose nodes say which GPUs they have, `ray start --resources '{"nvidia-h200": 8}'`;
            `auto` for one that runs here; `local`: one of this machine's GPUs is begun, and ended afterwards.
        available: GPUs of `local`; those of this machine where None.

    Raises:
        MissingPackageError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package ray, got: {error}. `pip install 'flashlab[sweep]'` installs it; without --ray "
            "a sweep runs on one GPU"
        ) from error
    if address == "local":
        available = gpus_here() if available is None else available
        own = {"num_gpus": sum(available.values()), "resources": dict(available), "include_dashboard": False}
        ray.init(log_to_driver=False, **own)
    else:
        ray.init(address=address, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_gpus(ray: Any) -> dict[str, int]:
    """Number of GPUs of each model in Ray's cluster: its custom resources named like folders under data/."""
    return {
        name: int(count)
        for name, count in ray.cluster_resources().items()
        if re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) and name != "memory"
    }
