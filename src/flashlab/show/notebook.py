"""Functions for the notebooks: validated parameters, measuring, and displaying results.

lab = settings(source=source, gpu=gpu, stages=stages, suite=suite, out=out, data=data)
lab.measure()                          appends to data/ if the source is `measure`
lab.show(charts.ladder, lab.rows())    a chart or table of the newest rows, or a note that there are none
lab.write("02_ladder", numbers)        the result file, which marks the notebook as completed
"""

from __future__ import annotations

import html
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from flashlab.build import compiler
from flashlab.build.compiler import Cubin, Job
from flashlab.build.parallel import Follow
from flashlab.build.sources import shown
from flashlab.core.errors import CompileError, NoDataError, ParameterError, ReportError, refuse_unknown
from flashlab.core.facts import Facts
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import BUILD, DATA, writable_dir
from flashlab.core.problem import DTYPES, FIRST_SHAPE, MASKS, Problem, Regime
from flashlab.core.problem import suite as problems_of
from flashlab.kernels import registry
from flashlab.query import contests, select
from flashlab.query.contests import AgainstPeers
from flashlab.query.select import Results
from flashlab.record import provenance, store
from flashlab.record.schema import Measurement, PatternCounters, StageCounters, StageProfile
from flashlab.run import gpu as gpus
from flashlab.show import tables, trial
from flashlab.show.charts import Chart
from flashlab.show.tables import Column, markdown
from flashlab.verify import cases, on_cpu

Source = Literal["measure", "replay"]
SOURCES = ("auto", *get_args(Source))
CHOICES: Mapping[str, Sequence[str]] = {"dtype": DTYPES, "mask": MASKS, "regime": get_args(Regime)}
"""Valid values of further notebook parameters, by name."""
SCHEDULES = ("ascending", "descending", "seeded:1")
"""The warp orders that the notebooks emulate."""
LENGTHS = ((1, 1), (113, 203), (239, 1))
"""Query and key lengths of the notebooks' CPU problems: one of each, around tile sizes, more queries than keys."""
HEAD_DIM = 64
COPY_LENGTHS = (*LENGTHS, cases.HOSTILE_LENGTHS[0])
"""Lengths for an edited copy; the last has enough keys for every phase of a pipeline's barriers."""
COPY_SCHEDULE, COPY_TIMEOUT_S = cases.SCHEDULES[-1], 10.0
"""Their warp order, which differs from the one tried before, and time limit."""


def nothing_yet(command: str) -> str:
    """The note for missing records, with the command that measures them."""
    return (
        "**Nothing has been measured yet.** "
        f"`data/` holds no records of this. `{command}` on a machine with an NVIDIA GPU measures and shows it."
    )


NOTHING_YET = nothing_yet("make report")
NOT_OF_THESE = (
    "**Not on record yet** for these stages at this shape. "
    "`make report FULL=1` measures what a report shows on such a GPU; profiles are made by `flashlab profile` with "
    "Nsight Compute, tuning by `flashlab tune`, ablations at other shapes by `flashlab ablate --shape`, and times of "
    "separate starts by `flashlab bench --suite first` on each, with the same code."
)
NO_CHECKS = "Not on record for this GPU yet: `flashlab check --record` on it compares stages with the oracle."
_REDRAWN_S = 0.2
"""Minimum seconds between updates of a progress bar."""
PROGRESS = "progress.json"
"""File with the state of a progress bar in the folder of result files, for the process that runs it (`sweep`)."""
_told_to: list[Path] = []
Draw = Callable[..., Chart | str] | Sequence[Column]
"""A function that returns a chart or text, or a table's columns."""


class Outcome(Facts):
    """A notebook's result file, which also marks it as completed."""

    notebook: str
    """Name, such as `02_ladder`."""
    source: Source
    gpu: str | None
    """Folder name under data/; None if nothing has been measured."""
    commit: str
    dirty: bool
    runs: tuple[str, ...]
    """Ids of the runs of the rows shown."""
    numbers: dict[str, Any]
    """Results, as listed in the notebook's last cell."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A notebook's validated and resolved parameters."""

    source: Source
    gpu: str
    """Folder name under data/; empty if nothing has been measured and there is no GPU."""
    stages: tuple[str, ...]
    """Ids, in the ladder's order."""
    suite: str
    out: Path
    data: Path
    inputs: tuple[str, ...] = (NORMAL,)
    """Kinds of inputs that are measured and checked; charts show the first of them."""

    @property
    def cuda_stages(self) -> tuple[str, ...]:
        """The chosen stages in CUDA C++, which can be compiled and emulated."""
        return tuple(stage_id for stage_id in self.stages if stage_id in registry.CUDA_STAGES)

    def measure(self, *, suite: bool = True, ceilings: bool = False) -> Path | None:
        """Measure the suite, the ceilings or both on this GPU and append a run to data/; None when replaying.

        What is on record for the same machine code and software is left out (`bench.run`), so that a notebook which was
        cut off goes on. None too where that is all.

        Raises:
            NoGpuError: there is no GPU.
            OutputError: data/ cannot be written.
        """
        if self.source == "replay":
            return None
        from flashlab.measure import bench

        problems = problems_of(self.suite) if suite else ()
        wanted = [replace(problem, inputs=kind) for problem in problems for kind in self.inputs]
        plan = bench.plan_of(self.suite)
        with progress_bar() as progress:
            options = bench.Options(data=self.data, progress=progress, note=print, resume=True)
            run = bench.run(wanted, stages=self.stages, plan=plan, ceilings=ceilings, options=options)
        self.forget()
        return run

    def forget(self) -> None:
        """Reread the records before they are shown next."""
        self.__dict__.pop("results", None)

    def check(self) -> str:
        """Check the chosen stages against the oracle on this GPU over hostile lengths and layouts; a Markdown table.

        When replaying, the newest recorded comparison of each.

        Raises:
            NoGpuError, OutputError: as `measure`.
        """
        kinds = [kind for kind in self.inputs if kind != TRAINED]  # which have one shape
        if self.source == "measure":
            from flashlab.measure import check

            with progress_bar() as progress:
                options = replace(check.OPTIONS, data=self.data, progress=progress, note=print, resume=True)
                check.check_stages(self.stages, inputs=kinds, options=options)
        lengths, drawn = (select.newest_checks(self.gpu, self.data, kind, kinds) for kind in ("checks", "random"))
        if not lengths and not drawn:
            return f"*{NO_CHECKS}*" if self.results else NOTHING_YET
        return tables.table(tables.CHECKS, [(name, lengths.get(name, ()), drawn.get(name, ())) for name in self.stages])

    def check_here(self) -> trial.CpuCheck:
        """Check the chosen stages against the oracle on this CPU, in every warp order, with race detection.

        Small problems of hostile lengths with both masks. Without a C++ compiler the result explains that.

        Raises:
            OutputError: the compile cache cannot be written.
        """
        if trial.no_compiler() or not self.cuda_stages:
            return trial.CpuCheck()
        with progress_bar() as progress:
            rows = on_cpu.check_on_cpu(
                self.cuda_stages,
                lengths=LENGTHS,
                layouts=("contiguous",),
                dtypes=("float16",),
                head_dims=(HEAD_DIM,),
                schedules=SCHEDULES,
                races=True,
                follow=progress,
            ).rows
        return trial.CpuCheck(rows=rows)

    def check_copy(self, stage_id: str, source: Path, shape: str) -> trial.CpuCheck:
        """Check an edited copy of a stage against the oracle on this CPU over hostile shapes.

        Only the head dim of `shape` is used. The result lists what was not tried.

        Raises:
            UnknownStageError, ParameterError, ShapeError: no such stage, file or shape.
            OutputError: the compile cache cannot be written.
        """
        if trial.no_compiler():
            return trial.CpuCheck()
        kernel, head_dim = registry.get(stage_id), Problem.parse(shape).head_dim
        with progress_bar() as progress:
            rows = on_cpu.check_on_cpu(
                [],
                sources={stage_id: source},
                lengths=COPY_LENGTHS,
                layouts=("contiguous", "misaligned"),
                dtypes=kernel.dtypes[:1],
                head_dims=(head_dim,),
                schedules=(COPY_SCHEDULE,),
                races=True,
                timeout_s=COPY_TIMEOUT_S,
                follow=progress,
            ).rows
        every = cases.default_cases_on_cpu({stage_id: kernel})
        others = [*kernel.dtypes[1:], *(f"head dim {dim}" for dim in kernel.head_dims if dim != head_dim)]
        left_out = (
            f"Tried: head dim {head_dim}, lengths {', '.join(f'{q} × {k}' for q, k in COPY_LENGTHS)}, both masks, rows "
            f"that are aligned and rows that are not, warps in the order {COPY_SCHEDULE}. "
            f"**Not tried:** {', '.join(others)}; scores that grow or jump; more than {COPY_LENGTHS[-1][1]} keys; "
            "other orders of warps; a GPU, whose compiler and memory may reorder what here stays in order. "
            f"`flashlab check --on cpu --races --source {stage_id}={shown(source)}` goes through {len(every):,} "
            "cases."
        )
        return trial.CpuCheck(rows=rows, left_out=left_out)

    def beside_emulator(self) -> str:
        """Recorded agreement of GPU and emulator on the same inputs, as a Markdown table; empty if not on record.

        The run is named below the table.
        """
        lines = [check for check in select.emulated_checks(self.gpu, self.data) if check.stage in self.stages]
        if not lines:
            return ""
        header = lines[0].header
        return f"{trial.agreement(lines)}\n*{select.sourced(header.gpu.name, runs=[header.run])}*\n"

    def counters(self) -> trial.Counted:
        """The emulator's counters compared with Nsight Compute's for the same launches, for the chosen stages."""
        files = store.files(self.data / self.gpu / "counters")
        if not files:
            error = NoDataError.of(f"Nsight Compute's counters of {self.gpu}", "scripts/counters_ncu.py")
            return trial.Counted(missing=f"*{error}*")
        if missing := trial.no_compiler():
            return trial.Counted(missing=missing)
        # Of each stage the first shape, which is the smallest.
        first = {line.stage: line for line in reversed(store.read(files[-1], StageCounters)[0])}
        lines = {stage_id: first[stage_id] for stage_id in self.stages if stage_id in first}
        shapes = ", ".join(dict.fromkeys(line.shape for line in lines.values()))
        commits = dict.fromkeys(line.commit[:7] + (" + changes" if line.dirty else "") for line in lines.values())
        names = "".join({line.gpu for line in lines.values()})
        return trial.Counted(
            compared={
                stage_id: trial.counted(trial.count_accesses(stage_id, lines[stage_id].shape), lines[stage_id])
                for stage_id in followed(lines)
            },
            source=f"{names} · {shapes} full float16 · commit {', '.join(commits)}",
            patterns=len(store.read(files[-1], PatternCounters)[0]),
        )

    @cached_property
    def results(self) -> Results:
        """The GPU's selected records on the first kind of inputs; falsy if there are none."""
        return select.load(self.gpu, self.data, self.inputs[:1])

    def rows(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Recorded rows of `problem` (default: the sources' shape) for chosen stages and all peers; may be empty."""
        return self.results.rows(self._on(problem), stage_ids=self.stages)

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries without the element type of `problem`, in another type; see `Results.beside`. May be empty."""
        return self.results.beside(self._on(problem))

    def libraries(self, problem: Problem | None = None) -> frozenset[str]:
        """The libraries whose fastest is the base of percentages at `problem` (`Results.libraries`); may be empty."""
        of = self._on(problem) or self.results.first
        return self.results.libraries(of.dtype) if of else frozenset()

    def _on(self, problem: Problem | None) -> Problem | None:
        return problem and replace(problem, inputs=self.inputs[0])

    def against_peers(self) -> tuple[AgainstPeers, ...]:
        """The best stage against the best library at every problem (`contests.against_peers`); may be empty."""
        return contests.against_peers(self.gpu, self.data, self.inputs)

    @cached_property
    def profiles(self) -> tuple[StageProfile, ...]:
        """Nsight Compute's newest profile of each chosen stage at the sources' shape; may be empty."""
        first = Problem.parse(FIRST_SHAPE)
        profiles = select.profiles(self.gpu, self.data)
        return tuple(profile for profile in profiles if profile.stage in self.stages and profile.problem == first)

    def show(self, draw: Draw, what: Any, **options: Any) -> None:
        """Show `draw(what, **options)`, or a note that there is no data.

        Args:
            what: `rows()`, `results`, `profiles` or `against_peers()`; not drawn if empty.
        """
        try:
            if not what:
                show(NOT_OF_THESE if self.results else NOTHING_YET)
            else:
                show(draw(what, **options) if callable(draw) else tables.table(draw, what))
        except NoDataError as error:
            show(f"*Not in the data of this GPU: {error}*")

    def write(self, name: str, numbers: Mapping[str, Any] | None = None) -> Path:
        """Write the result file `<out>/<name>.json`.

        Raises:
            OutputError: it cannot be written.
        """
        code, shown = provenance.source(), vars(self).get("results")  # not read where nothing of it was shown
        outcome = Outcome(
            notebook=name,
            source=self.source,
            gpu=self.gpu or None,
            commit=code.commit,
            dirty=code.dirty,
            runs=tuple(sorted({row.run for rows in shown.problems.values() for row in rows} if shown else ())),
            numbers=dict(numbers or {}),
        )
        path = writable_dir(self.out, "the notebook's result file") / f"{name}.json"
        path.write_text(json.dumps(outcome.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        kinds = "" if self.inputs == (NORMAL,) else f", inputs {', '.join(self.inputs)}"
        stages = f"{len(self.stages)} stage{'s' * (len(self.stages) != 1)}"
        if self.source == "replay":
            return f"showing what is recorded in data/: {self.gpu or 'no GPU yet'}; {stages}{kinds}"
        return f"measuring on this machine's GPU: {self.gpu}; {stages}, suite {self.suite}{kinds}"


def settings(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str | Sequence[str] = "",
    suite: str = "standard",
    inputs: str = NORMAL,
    out: str | Path = "",
    data: str | Path = "",
    **others: str,
) -> Lab:
    """Check and resolve a notebook's parameters.

    Args:
        source: `measure` on this machine's GPU, `replay` what is recorded, or `auto`: measure where there is a GPU and
            `gpu` names no other.
        gpu: folder name under data/, `nvidia-h200`; empty: this machine's when measuring, else the main one, the first
            of `store.gpus`.
        stages: ids of the ladder's stages, or unique prefixes of them, joined by commas; empty: all.
        suite: one of `problem.SUITES`.
        inputs: kinds of inputs joined by commas, or `all`; see `inputs.KINDS`.
        out: folder of the result file; empty: build/notebooks.
        data: folder of the records; empty: the checkout's data/.
        others: what else the notebook takes, all of it text; some are one of `CHOICES`.

    Raises:
        ParameterError: no such source, suite or kind of inputs, a stage that is none of the ladder's, a value that is
            no text, or `gpu` names a GPU that this machine lacks while measuring, or then the environment says of the
            machine what `provenance.start` refuses.
        UnknownStageError: no such stage.
        NoGpuError: `measure` without a GPU.
        NoDataError: `data` is no folder, or `replay` of a GPU that has no records.
        OutputError: `out` cannot be written, or `data` while measuring.
    """
    stages = ",".join(stages) if isinstance(stages, list | tuple) and {*map(type, stages)} <= {str} else stages
    given: dict[str, Any] = {"gpu": gpu, "stages": stages, "suite": suite, "inputs": inputs, "out": out, "data": data}
    for name, value in {**given, **others}.items():
        if not isinstance(value, str | Path) or "\0" in str(value):
            raise ParameterError(
                f"{name}: wanted text, got {value!r}. papermill's -p reads digits as a number; `-r {name} VALUE` not"
            )
        if name in CHOICES:
            refuse_unknown(name, CHOICES[name], value)
    refuse_unknown("source", SOURCES, source)
    problems_of(suite)
    kinds = kinds_in(inputs)
    names = [name.strip() for name in str(stages).split(",")]
    chosen = {registry.get(registry.resolve(name)).id for name in names if name}
    if off := sorted(chosen.difference(registry.STAGES)):
        raise ParameterError(
            f"stages: wanted stages of the ladder, {', '.join(registry.STAGES)}, got {', '.join(off)}, off the ladder. "
            "`flashlab bench --stages` and `flashlab check` take those"
        )
    data_folder = Path(data).resolve() if data else DATA
    if not data_folder.is_dir():
        raise NoDataError(
            f"wanted an existing folder of records, got {data_folder}. Mount or make it first; without the parameter "
            f"`data` it is {DATA}"
        )
    resolved, slug = _resolve(source, gpu, data_folder)
    if resolved == "measure":
        writable_dir(data_folder, "records")
        provenance.start()  # refuses what is said of a rented machine here, before an hour of measuring
    folder = writable_dir(Path(out).resolve() if out else BUILD / "notebooks", "the notebook's result file")
    _told_to.append(folder / PROGRESS)
    return Lab(
        source=resolved,
        gpu=slug,
        stages=tuple(stage_id for stage_id in registry.STAGES if not chosen or stage_id in chosen),
        suite=suite,
        out=folder,
        data=data_folder,
        inputs=kinds,
    )


def _resolve(source: str, gpu: str, data: Path) -> tuple[Source, str]:
    """The source of the numbers, and the GPU's folder name."""
    here = gpus.info().slug if source != "replay" and gpus.available() is None else ""
    if source == "measure":
        gpus.require()
        if gpu and gpu != here:
            raise ParameterError(
                f"gpu: measuring happens on this machine's {here}, got {gpu!r}; source=replay shows recorded data"
            )
        return "measure", here
    if source == "auto" and here and gpu in ("", here):
        return "measure", here
    if gpu:
        store.require_runs(gpu, data)  # raises NoDataError, which names the GPUs there are
        return "replay", gpu
    return "replay", next(iter(store.gpus(data)), "")


@contextmanager
def progress_bar() -> Iterator[Follow]:
    """A progress bar below the cell with the time left, removed at the end."""
    began, shown = time.monotonic(), -math.inf
    display_id = ""
    if "IPython" in sys.modules:  # a cell runs in IPython; importing it first here, in several threads, can deadlock
        from IPython.core.getipython import get_ipython
        from IPython.display import display, update_display

        display_id = f"progress-{began}" if get_ipython() else ""

    def draw(text: str) -> None:
        if display_id:
            data = {"text/html": text, "text/plain": ""}
            update_display(data, display_id=display_id, raw=True)  # type: ignore[no-untyped-call]

    def report(done: int, total: int, text: str) -> None:
        nonlocal shown
        gone_s = time.monotonic() - began
        if gone_s - shown < _REDRAWN_S:
            return
        shown = gone_s
        left_s = gone_s / done * (total - done) if done else None
        if _told_to:
            with suppress(OSError):
                _told_to[-1].write_text(json.dumps({"done": done, "total": total, "left_s": left_s, "text": text}))
        left = "" if left_s is None else f"{timedelta(seconds=round(left_s))} left, "
        bar = f'<progress max="{total}" value="{done}" style="width: 16em; vertical-align: middle"></progress>'
        draw(f"{bar} {left}{done} of {total}: {html.escape(text)}")

    if display_id:
        display({"text/plain": ""}, display_id=display_id, raw=True)  # type: ignore[no-untyped-call]
    try:
        yield report
    finally:
        draw("")


def followed(names: Collection[str]) -> Iterator[str]:
    """Yield each name, under a progress bar that shows the current one and the time left."""
    with progress_bar() as progress:
        for number, name in enumerate(names):
            progress(number, len(names), name)
            yield name


def compile_stages(jobs: Sequence[Job]) -> tuple[Cubin | CompileError, ...]:
    """`compiler.compile_many` with a progress bar."""
    with progress_bar() as progress:
        return compiler.compile_many(jobs, follow=progress)


def machine_here() -> str:
    """This machine's GPU as a Markdown table, or the reason why there is none."""
    why_not = gpus.available()
    if why_not:
        return f"*This machine has no usable GPU: {why_not}*"
    facts = gpus.info().record.model_dump()
    return markdown(("this machine", ""), [(key.replace("_", " "), str(value)) for key, value in facts.items()], left=2)


def show(item: Chart | str) -> None:
    """Show a chart or Markdown in a notebook; nothing if it is empty."""
    from IPython.display import Markdown, display

    if item != "":
        display(Markdown(item) if isinstance(item, str) else item)  # type: ignore[no-untyped-call]


def read_outcome(path: Path, name: str) -> Outcome:
    """Read and validate a notebook's result file.

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
