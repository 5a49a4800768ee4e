"""What the notebooks import: their parameters, checked and resolved; how they measure; and how they show what there is.

lab = settings(source=source, gpu=gpu, stages=stages, suite=suite, out=out, data=data)
lab.measure()                      appends to data/ where the source is `measure`
lab.show(figures.ladder)           a chart or table of the newest rows, or that there are none yet
lab.write("02_ladder", numbers)    the result file, which says that the notebook came to its end

On this machine's CPU, without a GPU:

here = lab.check_here()            the stages, against the oracle
copy = edited("05_wmma", old, new) a stage with one change, in a file of its own
before = attempt("05_wmma")        a run whose races were looked for; an error comes back as text
after = attempt("05_wmma", copy)
show(compare({"as it is": before, "edited": after}))
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from flashlab.core.errors import (
    CompileError,
    EmulationError,
    FlashlabError,
    MissingPackageError,
    NoDataError,
    OutputError,
    ParameterError,
    ReportError,
)
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import BUILD, DATA, ROOT, writable_dir
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.core.problem import suite as problems_of
from flashlab.kernels import registry
from flashlab.query import select as results
from flashlab.query.select import AgainstPeers, Results
from flashlab.record import provenance, store
from flashlab.record.checks import CheckRow
from flashlab.record.store import Measurement, StageCounters, StageProfile, Verdict
from flashlab.run import emulator
from flashlab.run import gpu as gpus
from flashlab.run.attention import emulate
from flashlab.show.charts import Chart
from flashlab.verify import cases, on_cpu
from flashlab.verify.verdict import check

if TYPE_CHECKING:
    from flashlab.experiments.ledger import Verdict as ClaimVerdict

Source = Literal["measure", "replay"]
SOURCES = ("auto", *get_args(Source))
SCHEDULES = ("ascending", "descending", "seeded:1")
"""The orders of warps that the notebooks run."""
LENGTHS = ((1, 1), (113, 203), (239, 1))
"""Queries and keys of the notebooks' problems on a CPU: one of each, around every tile, more queries than keys."""
HEAD_DIM = 64
ROWS = 16
"""Query rows whose errors are shown as one."""
EDITS = BUILD / "edits"
"""Where edited kernels are written; kernels/ stays as it is."""
_CUDA_ALIGNMENT = 256
"""Bytes: where CUDA's allocators put arrays, and so what sectors are counted from."""
NOTHING_YET = (
    "**Nothing has been measured yet.** "
    "No GPU has records in `data/`. `make report` on a machine with an NVIDIA GPU measures it and fills this in."
)
NO_PROFILES = (
    "**Nothing has been profiled yet** of these stages at this shape. "
    "`flashlab profile` on such a GPU, with Nsight Compute, does it."
)


class Outcome(BaseModel):
    """A notebook's result file: what it found, and that it came to its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    notebook: str
    """`02_ladder`."""
    source: Source
    gpu: str | None
    """Folder name under data/; None where nothing has been measured."""
    commit: str
    dirty: bool
    runs: tuple[str, ...]
    """Ids of the runs whose rows it showed."""
    numbers: dict[str, Any]
    """What it found; each notebook says in its last cell."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One notebook's parameters, checked and resolved."""

    source: Source
    gpu: str | None
    """Folder name under data/; None where nothing has been measured and there is no GPU."""
    stages: tuple[str, ...]
    """Ids, in the ladder's order."""
    suite: str
    out: Path
    data: Path
    inputs: tuple[str, ...] = (NORMAL,)
    """Kinds of inputs that are measured and checked; charts show the first of them."""

    @property
    def cuda_stages(self) -> tuple[str, ...]:
        """Those of the chosen stages that are CUDA C++: what compiles, and what the CPU emulation runs."""
        return tuple(stage_id for stage_id in self.stages if stage_id in registry.CUDA_STAGES)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems of the suite."""
        return problems_of(self.suite)

    def measure(self, of: str = "", *, suite: bool = True, ceilings: bool = False) -> Path | None:
        """Measure the suite, the ceilings or both on this GPU and append a run to data/; None when replaying.

        `of` names another suite than the notebook's.

        Raises:
            ParameterError: no suite of that name.
            NoGpuError: there is no GPU.
            OutputError: data/ cannot be written.
        """
        problems = problems_of(of or self.suite)
        if self.source == "replay":
            return None
        from flashlab.measure import bench

        with _progress_bar() as progress:
            run = bench.run(
                [replace(problem, inputs=kind) for problem in problems for kind in self.inputs] if suite else (),
                stages=self.stages,
                plan=bench.plan_of(of or self.suite),
                ceilings=ceilings,
                options=bench.Options(data=self.data, progress=progress),
            )
        self.__dict__.pop("results", None)  # what was read before is no longer the newest
        return run

    def check(self) -> str:
        """Compare the chosen stages with the oracle on this GPU over hostile lengths and layouts; as a Markdown table.

        When replaying, the newest such comparison on record.

        Raises:
            NoGpuError, OutputError: as `measure`.
        """
        from flashlab.measure import check
        from flashlab.show import tables

        kinds = [kind for kind in self.inputs if kind != TRAINED]  # which have one shape
        if self.source == "measure":
            with _progress_bar() as progress:
                options = replace(check.OPTIONS, data=self.data, progress=progress)
                check.check_stages(self.stages, inputs=kinds, options=options)
        try:
            return tables.checks(results.checks(self.gpu or "", self.data, inputs=kinds))
        except NoDataError as error:
            return NOTHING_YET if self.results is None else f"*{error}*"

    def check_here(self) -> Here:
        """Compare the chosen stages with the oracle on this machine's CPU, under every schedule, and look for races.

        Small problems of hostile lengths under both masks. Without a C++ compiler nothing runs, and it says so.

        Raises:
            OutputError: the compile cache cannot be written.
        """
        missing = no_compiler()
        if missing:
            return Here(missing=missing)
        chosen = self.cuda_stages
        options: dict[str, Any] = {"lengths": LENGTHS, "head_dims": (HEAD_DIM,), "dtypes": ("float16",)}
        options |= {"layouts": ("contiguous",)}
        able = {stage_id: registry.get(stage_id) for stage_id in chosen}
        wanted = cases.cases(able, **options)
        # First all of them, side by side, so that the seconds of a stage are those of its runs.
        on_cpu.build_all(on_cpu.implementations(chosen, None), wanted, hooks=True)
        rows: list[CheckRow] = []
        seconds: dict[str, float] = {}
        for stage_id in chosen:
            began = time.perf_counter()
            rows += on_cpu.check_on_cpu([stage_id], schedules=SCHEDULES, races=True, **options).rows
            seconds[stage_id] = time.perf_counter() - began
        return Here(rows=tuple(rows), seconds=seconds)

    def beside_emulator(self) -> str:
        """What chip and emulator made of the same inputs, from the records, as a Markdown table; empty where none is.

        Where something is on record, with the run that made it.
        """
        from flashlab.show import tables

        try:
            lines = results.emulated_checks(self.gpu or "", self.data)
        except NoDataError:
            return ""
        chosen = [line for line in lines if line["stage"] in self.stages]
        if not chosen:
            return ""
        run = str(chosen[0]["run"])
        came = f"{chosen[0]['gpu']['name']} · {results.date(run)} · commit {results.commit_label(run)}"
        return f"{tables.agreement(chosen)}\n*{came}*\n"

    def counters(self) -> Counted:
        """The emulator's counters beside Nsight Compute's of the same launches, for the chosen stages."""
        try:
            found = results.counters(self.gpu or "", self.data)
        except NoDataError as error:
            return Counted(missing=f"*{error}*")
        missing = no_compiler()
        if missing:
            return Counted(missing=missing)
        from flashlab.show import tables

        lines: dict[str, StageCounters] = {}
        for line in found.stages:  # of each stage the first shape, which is the smallest
            if line.stage in self.stages:
                lines.setdefault(line.stage, line)
        compared = {
            stage_id: tables.counted(count_accesses(stage_id, line.shape), line) for stage_id, line in lines.items()
        }
        return Counted(
            compared={stage_id: compared[stage_id] for stage_id in self.stages if stage_id in compared},
            lines=tuple(lines.values()),
            patterns=len(found.patterns),
        )

    @cached_property
    def results(self) -> Results | None:
        """What is recorded of the GPU on the first kind of inputs; None where nothing is."""
        if self.gpu is None:
            return None
        try:
            return results.load(self.gpu, self.data, self.inputs[:1])
        except NoDataError:
            return None

    def rows(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Recorded rows of `problem` (the sources' shape, where None), chosen stages and every peer; may be empty."""
        try:
            return self.results.rows(self._on(problem), stage_ids=self.stages) if self.results else ()
        except NoDataError:
            return ()

    def _on(self, problem: Problem | None) -> Problem | None:
        return problem and replace(problem, inputs=self.inputs[0])

    def against_peers(self) -> tuple[AgainstPeers, ...]:
        """The best stage against the best library at every problem (`results.against_peers`); may be empty."""
        try:
            return results.against_peers(self.gpu, self.data, self.inputs) if self.gpu else ()
        except NoDataError:
            return ()

    @cached_property
    def profiles(self) -> tuple[StageProfile, ...]:
        """Nsight Compute's newest profile of each chosen stage at the sources' shape; may be empty."""
        first = Problem.parse(FIRST_SHAPE)
        found = results.profiles(self.gpu, self.data) if self.gpu else ()
        return tuple(one for one in found if one.stage in self.stages and one.problem.problem() == first)

    def show_profiles(self, draw: Callable[..., Chart | str], **options: Any) -> None:
        """Show `draw(profiles, **options)`, or say that there are none to draw."""
        if self.results is not None and not self.profiles:
            show(NO_PROFILES)
            return
        self._show_or_say(draw, self.profiles, bool(self.profiles), options)

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """How many times faster the best stage is, by problem and regime; None where not measured."""
        return {
            one.problem.label: {
                "burst": one.burst.ratio if one.burst else None,
                "sustained": one.sustained.ratio if one.sustained else None,
            }
            for one in self.against_peers()
        }

    def measure_claims(self) -> None:
        """Measure on this GPU what the claims need and append it to data/; nothing when replaying.

        Raises:
            NoGpuError, OutputError: as `measure`.
        """
        if self.source == "replay":
            return
        from flashlab.experiments import ledger as claims
        from flashlab.measure.options import Options

        with _progress_bar() as progress:
            options = Options(data=self.data, progress=progress)
            claims.measure(stages=self.stages, everything=True, options=options)
        self.__dict__.pop("results", None)

    def claims(self) -> tuple[ClaimVerdict, ...]:
        """The verdicts on the claims of data/claims.csv from this GPU's records; empty where nothing is recorded."""
        from flashlab.experiments import ledger as claims

        return claims.verdicts(self.gpu, self.data) if self.gpu and self.results else ()

    def show_ratios(self) -> None:
        """Show the best stage against the best library on normal inputs, or say that there is nothing to show."""
        from flashlab.show import tables

        found = self.against_peers()
        show(tables.against(found) if found else NOTHING_YET)

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries that lack the element type of `problem`, in another; see `Results.beside`. May be empty."""
        return self.results.beside(self._on(problem)) if self.results else ()

    def show(self, draw: Callable[..., Chart | str], problem: Problem | None = None, **options: Any) -> None:
        """Show `draw(rows, **options)`, or say that there are no rows to draw."""
        rows = self.rows(problem)
        self._show_or_say(draw, rows, bool(rows), options)

    def show_all(self, draw: Callable[..., Chart | str], **options: Any) -> None:
        """Show `draw(results, **options)`, or say that there are no results to draw."""
        self._show_or_say(draw, self.results, self.results is not None, options)

    def _show_or_say(
        self, draw: Callable[..., Chart | str], what: object, there: bool, options: Mapping[str, Any]
    ) -> None:
        if not there:
            show(NOTHING_YET)
            return
        try:
            show(draw(what, **options))
        except NoDataError as error:
            show(f"*Not in the data of this GPU: {error}*")

    def write(self, name: str, numbers: Mapping[str, Any] | None = None) -> Path:
        """Write the result file `<out>/<name>.json`.

        Raises:
            OutputError: it cannot be written.
        """
        commit, dirty = provenance.source()
        shown = self.results
        runs = {row.run for rows in shown.problems.values() for row in rows} if shown else set()
        outcome = Outcome(
            notebook=name,
            source=self.source,
            gpu=self.gpu,
            commit=commit,
            dirty=dirty,
            runs=tuple(sorted(runs)),
            numbers=dict(numbers or {}),
        )
        path = writable_dir(self.out, "the notebook's result file") / f"{name}.json"
        path.write_text(json.dumps(outcome.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        kinds = "" if self.inputs == (NORMAL,) else f", inputs {', '.join(self.inputs)}"
        where = "measuring on this machine's GPU" if self.source == "measure" else "showing what is recorded in data/"
        return f"{where}: {self.gpu or 'no GPU yet'}; {len(self.stages)} stages, suite {self.suite}{kinds}"


@dataclass(frozen=True, kw_only=True)
class Here:
    """What the stages did on this machine's CPU."""

    rows: tuple[CheckRow, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each stage's runs took."""
    missing: str = ""
    """Why nothing ran, for people; empty where it did."""

    @property
    def passed(self) -> bool:
        """Whether no run failed; also where none was possible."""
        return all(row.status == "ok" for row in self.rows)

    @property
    def outcomes(self) -> dict[str, bool]:
        """Whether all runs of a stage passed, by its id."""
        return {stage: all(row.status == "ok" for row in self.rows if row.stage == stage) for stage in self.seconds}

    def __str__(self) -> str:
        from flashlab.show import tables

        return self.missing or tables.emulated(self.rows, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The emulator's counters beside Nsight Compute's."""

    compared: Mapping[str, Mapping[str, tuple[int, int, int, int]]] = field(default_factory=dict)
    """By stage, as `tables.counted` gives them."""
    lines: tuple[StageCounters, ...] = ()
    patterns: int = 0
    """Single accesses that are on record beside the stages."""
    missing: str = ""
    """Why there is nothing to compare, for people."""

    @property
    def equal(self) -> tuple[str, ...]:
        """Stages of which every count is the same."""
        return tuple(
            stage
            for stage, found in self.compared.items()
            if all(counts[0] == counts[1] and counts[2] == counts[3] for counts in found.values())
        )

    def __str__(self) -> str:
        from flashlab.show import tables

        if self.missing or not self.compared:
            return self.missing or "*No stage that is shown here is among the recorded counters.*"
        shapes = ", ".join(dict.fromkeys(line.shape for line in self.lines))
        commits = ", ".join(
            dict.fromkeys(line.commit[:7] + (" + changes" if line.dirty else "") for line in self.lines)
        )
        equal = f"Every count of {', '.join(f'`{stage}`' for stage in self.equal)} is the same." if self.equal else ""
        if self.patterns:
            equal += (
                f" On record beside the stages are {self.patterns} single accesses to shared memory, which tests hold "
                "the model of bank conflicts against."
            )
        return (
            f"{tables.counters(self.compared)}\n{equal.strip()}\n\n"
            f"*{self.lines[0].gpu} · {shapes} full float16 · commit {commits}*\n"
        )


def settings(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str | Sequence[str] = "",
    suite: str = "standard",
    inputs: str = NORMAL,
    out: str | Path = "",
    data: str | Path = "",
) -> Lab:
    """Check and resolve a notebook's parameters.

    Args:
        source: `measure` on this machine's GPU, `replay` what is recorded, or `auto`: measure where there is a GPU and
            `gpu` names no other.
        gpu: folder name under data/, `nvidia-h200`; empty: this machine's when measuring, else the one measured last.
        stages: stage ids joined by commas; empty: all.
        suite: `smoke`, `first` or `standard`.
        inputs: kinds of inputs joined by commas, or `all`; see `inputs.KINDS`.
        out: folder of the result file; empty: build/notebooks.
        data: folder of the records; empty: the checkout's data/.

    Raises:
        ParameterError: no such source, suite or kind of inputs, or `gpu` names a GPU that this machine lacks while
            measuring.
        UnknownStageError: no such stage.
        NoGpuError: `measure` without a GPU.
        NoDataError: `replay` of a GPU that has no records.
        OutputError: `out` cannot be written.
    """
    if source not in SOURCES:
        raise ParameterError(f"source: wanted one of {', '.join(SOURCES)}, got {source!r}")
    problems_of(suite)
    kinds = kinds_in(inputs)
    names = [name.strip() for name in stages.split(",")] if isinstance(stages, str) else list(stages)
    wanted = {registry.get(name).id for name in names if name}
    chosen = tuple(stage_id for stage_id in registry.STAGES if not wanted or stage_id in wanted)
    data_folder = Path(data).resolve() if data else DATA
    resolved, name = _resolve(source, gpu, data_folder)
    return Lab(
        source=resolved,
        gpu=name,
        stages=chosen,
        suite=suite,
        out=writable_dir(Path(out).resolve() if out else BUILD / "notebooks", "the notebook's result file"),
        data=data_folder,
        inputs=kinds,
    )


def _resolve(source: str, gpu: str, data: Path) -> tuple[Source, str | None]:
    """Where the numbers come from, and the GPU's folder name."""
    here = gpus.info().slug if source != "replay" and gpus.available() is None else None
    if source == "measure":
        gpus.require()
        if gpu and gpu != here:
            raise ParameterError(
                f"gpu: measuring happens on this machine's {here}, got {gpu!r}; source=replay shows recorded data"
            )
        return "measure", here
    if source == "auto" and here and gpu in ("", here):
        return "measure", here
    recorded = results.load_all(data)
    if gpu:
        store.runs(gpu, data)  # raises NoDataError, which names the GPUs there are
        return "replay", gpu
    return "replay", recorded[0].gpu if recorded else None


@contextmanager
def _progress_bar() -> Iterator[Callable[[Any], None]]:
    """A bar on stderr, told of a `bench.Progress` at a time."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(unit="row") as bar:

        def report(progress: Any) -> None:
            bar.total = progress.total
            bar.set_description(progress.text, refresh=False)
            bar.update(progress.done - bar.n)

        yield report


# --- A kernel on this machine's CPU -----------------------------------------------------------------------------------


def no_compiler() -> str:
    """Why kernels cannot run on this machine's CPU and the command that helps, as Markdown; empty where they can."""
    try:
        emulator.cxx()
    except MissingPackageError as error:
        return f"**No kernel runs on this machine's CPU yet.** {error}"
    return ""


def own_copy(stage: str) -> Path:
    """`build/edits/<stage>.cu`: a copy of a stage's file to edit. Once edited it is never overwritten.

    Raises:
        UnknownStageError: no such stage.
        OutputError: it cannot be written.
    """
    found = registry.get(stage)
    text = found.source.read_text(encoding="utf-8")
    path = writable_dir(EDITS, "edited kernels") / found.source.name
    # What it was made from: a copy that nobody has edited follows the stage.
    original = writable_dir(EDITS / "original", "edited kernels") / path.name
    untouched = path.is_file() and original.is_file() and path.read_bytes() == original.read_bytes()
    if untouched or not path.exists():
        _write(original, text)
        _write(path, text)
    return path


def edited(stage: str, old: str, new: str, *, name: str = "edited") -> Path:
    """A copy of a stage's file in which `old` has become `new`: `build/edits/<stage>-<name>.cu`.

    Raises:
        UnknownStageError: no such stage.
        ParameterError: `old` does not occur exactly once.
        OutputError: it cannot be written.
    """
    found = registry.get(stage)
    text = found.source.read_text(encoding="utf-8")
    count = text.count(old) if old else 0
    if count != 1:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if old and old in line]
        where = f", in lines {', '.join(map(str, lines))}; more of the line around it says which" if lines else ""
        raise ParameterError(
            f"old: wanted text that occurs once in {found.source.relative_to(ROOT)}, got {old!r}, "
            f"which occurs {count} times{where}"
        )
    path = writable_dir(EDITS, "edited kernels") / f"{found.id}-{name}{found.source.suffix}"
    _write(path, text.replace(old, new))
    return path


def _write(path: Path, text: str) -> None:
    """All of it or nothing: another notebook may be compiling the file."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        whole = Path(folder) / path.name
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One run of a kernel on the CPU, and what is to be said of it."""

    stage: str
    source: Path
    """The file that was compiled."""
    problem: Problem
    schedule: str
    verdict: Verdict | None
    """On the numbers alone; None where there are none."""
    report: emulator.Report | None
    """Findings and counters, of one that was stopped as far as it came; None where it did not run."""
    errors: tuple[float, ...]
    """The largest error of every `ROWS` query rows, over all heads; NaN where one is NaN."""
    error: str
    """Why there is no result, for people; empty where there is one."""

    @property
    def passed(self) -> bool:
        """Whether the result is right and the detector found nothing."""
        return self.verdict is not None and self.verdict.passed and not (self.report and self.report.findings)

    @property
    def limit(self) -> float | None:
        """The largest error that passes, where known."""
        return self.verdict.max_abs_limit if self.verdict else None


def attempt(
    stage: str,
    source: Path | None = None,
    *,
    shape: str = "1x2x128x64",
    mask: str = "full",
    schedule: str = "ascending",
    params: Mapping[str, int] | None = None,
    timeout_s: float = 20.0,
) -> Trial:
    """Run a stage, or `source` in its place, once on the CPU, looking for races; a failure is in what comes back.

    Args:
        shape, mask: the problem, float16.
        schedule: `ascending`, `descending` or `seeded:N`.
        params: tunables that differ from their defaults.
        timeout_s: after so long it is stopped.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError: what was asked for does not exist.
        OutputError: the compile cache cannot be written.
    """
    import numpy as np

    from flashlab.verify import oracle

    found = registry.get(stage)
    problem = Problem.parse(shape, mask=mask)
    found.require(problem)
    q, k, v = (_as_cuda_places(values) for values in oracle.make_inputs(problem))
    out = _as_cuda_places(np.zeros_like(q))
    verdict = report = None
    errors: tuple[float, ...] = ()
    error = ""
    try:
        ran = emulate(
            q,
            k,
            v,
            causal=problem.causal,
            stage=found.id,
            out=out,
            params=params,
            source=source,
            schedule=schedule,
            races=found.language == "cuda",
            timeout_s=timeout_s,
        )
    except (ParameterError, OutputError):
        raise
    except CompileError as failed:
        error = str(failed).partition("\nCommand:")[0]
    except EmulationError as failed:
        error, report = str(failed), failed.report
    except FlashlabError as failed:
        error = str(failed)
    else:
        report = ran.report
        verdict = check(ran.out, ran.lse, q, k, v, causal=problem.causal, dtype=problem.dtype)
        exact, _ = oracle.attention(q, k, v, causal=problem.causal)
        apart = np.abs(ran.out.astype(np.float64) - exact).max(axis=(0, 1, 3))
        errors = tuple(float(apart[row : row + ROWS].max()) for row in range(0, problem.q_len, ROWS))
    return Trial(
        stage=found.id,
        source=source or found.source,
        problem=problem,
        schedule=schedule,
        verdict=verdict,
        report=report,
        errors=errors,
        error=error,
    )


def _as_cuda_places(values: Any) -> Any:
    """A copy at an address like CUDA's: sectors are counted from it, and NumPy's addresses differ from run to run."""
    import numpy as np

    room = np.zeros(values.nbytes + _CUDA_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _CUDA_ALIGNMENT
    placed = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    placed[...] = values
    return placed


def count_accesses(stage: str, shape: str) -> emulator.Report:
    """Run a stage on the CPU as scripts/counters_ncu.py does on a GPU, full, float16, no log-sum-exp, and count.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError, MissingPackageError, CompileError, EmulationError.
    """
    import numpy as np

    from flashlab.verify.oracle import make_inputs

    found = registry.get(stage)
    problem = Problem.parse(shape)
    found.require(problem)
    inputs = [_as_cuda_places(values) for values in make_inputs(problem)]
    return emulate(
        *inputs,
        stage=found.id,
        out=_as_cuda_places(np.zeros_like(inputs[0])),
        return_lse=False,
        races=True,
        timeout_s=None,
    ).report


def compare(trials: Mapping[str, Trial]) -> str:
    """Runs side by side, as a Markdown table: verdict, error, findings."""
    from flashlab.show import tables

    lines: list[list[tables.Cell]] = []
    for title, trial in trials.items():
        verdict, report = trial.verdict, trial.report
        if verdict is None or report is None:
            lines.append([title, "no result", trial.error.partition("\n")[0], None, None, None])
            continue
        kinds = [finding.kind for finding in report.findings]
        found = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "none"
        lines.append(
            [
                title,
                "right" if verdict.passed else "wrong",
                verdict.reason or None,
                tables.tiny(verdict.max_abs_error),
                tables.tiny(verdict.max_abs_limit),
                found,
            ]
        )
    return tables.markdown(("", "result", "why", "largest error", "limit", "findings"), lines, left=3)


def compare_rows(trials: Mapping[str, Trial], *, name: str) -> Chart | str:
    """The runs' errors block by block of query rows, as a figure; a sentence where no run has a finite one."""
    from flashlab.show import charts

    runs = list(trials.values())
    limit = next((trial.limit for trial in runs if trial.limit is not None), None)
    schedules = " and ".join(dict.fromkeys(run.schedule for run in runs))
    note = f"{runs[0].stage} · {runs[0].problem.label} · {schedules} · on a CPU"
    try:
        errors = {title: trial.errors for title, trial in trials.items()}
        return charts.row_errors(errors, rows=ROWS, limit=limit, note=note, name=name)
    except NoDataError:
        return "*No run has a number to draw.*"


def said(trial: Trial) -> str:
    """An error in full, as a code block; or that there was none."""
    if not trial.error:
        return "*It ran to its end.*"
    return f"```text\n{trial.error}\n```\n"


# ----------------------------------------------------------------------------------------------------------------------


def machine_here() -> str:
    """This machine's GPU as a Markdown table, or why there is none."""
    from flashlab.show import tables

    why_not = gpus.available()
    if why_not:
        return f"*This machine has no GPU to use: {why_not}*"
    facts = dataclasses.asdict(gpus.info())
    return tables.markdown(("this machine", ""), [(k.replace("_", " "), str(v)) for k, v in facts.items()], left=2)


def show(item: Chart | str) -> None:
    """Show a chart, or Markdown, in a notebook; nothing where that is empty."""
    from IPython.display import Markdown, display

    if item == "":
        return
    display(Markdown(item) if isinstance(item, str) else item)  # type: ignore[no-untyped-call]


def read_outcome(path: Path, name: str) -> Outcome:
    """A notebook's result file, checked.

    Raises:
        ReportError: it is missing, no result file, or another notebook's.
    """
    try:
        outcome = Outcome.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ReportError(
            f"notebook {name}: wanted its result file {path}, found none: it did not come to its end"
        ) from None
    except ValidationError as error:
        raise ReportError(f"notebook {name}: {path} is no result file: {error.errors()[0]['msg']}") from error
    if outcome.notebook != name:
        raise ReportError(f"notebook {name}: {path} is the result file of {outcome.notebook!r}")
    return outcome
