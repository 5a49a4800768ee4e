"""What the notebooks import: their parameters, checked and resolved; how they measure; and how they show what there is.

lab = settings(source=source, gpu=gpu, stages=stages, suite=suite, out=out, data=data)
lab.measure()                      appends to data/ where the source is `measure`
lab.show(figures.ladder)           a chart or table of the newest rows, or that there are none yet
lab.write("02_ladder", numbers)    the result file, which says that the notebook came to its end
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from flashlab import gpu as gpus
from flashlab import provenance, records, results
from flashlab import stages as registry
from flashlab.errors import NoDataError, ParameterError, ReportError
from flashlab.figures import Chart
from flashlab.paths import BUILD, DATA, writable_dir
from flashlab.problem import Problem
from flashlab.problem import suite as problems_of
from flashlab.records import Measurement
from flashlab.results import Results

Source = Literal["measure", "replay"]
SOURCES = ("auto", *get_args(Source))
NOTHING_YET = (
    "**Nothing has been measured yet.** "
    "No GPU has records in `data/`. `make report` on a machine with an NVIDIA GPU measures it and fills this in."
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

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems of the suite."""
        return problems_of(self.suite)

    def measure(self, *, suite: bool = True, ceilings: bool = False) -> Path | None:
        """Measure the suite, the ceilings or both on this GPU and append a run to data/; None when replaying.

        Raises:
            NoGpuError: there is none.
            OutputError: data/ cannot be written.
        """
        if self.source == "replay":
            return None
        from flashlab import bench

        with _progress_bar() as progress:
            run = bench.run(
                self.problems if suite else (),
                stages=self.stages,
                data=self.data,
                ceilings=ceilings,
                progress=progress,
            )
        self.__dict__.pop("results", None)  # what was read before is no longer the newest
        return run

    def check(self) -> str:
        """Compare the chosen stages with the oracle on this GPU over hostile lengths and layouts; as a Markdown table.

        When replaying, the newest such comparison on record.

        Raises:
            NoGpuError, OutputError: as `measure`.
        """
        from flashlab import bench, tables

        if self.source == "measure":
            with _progress_bar() as progress:
                bench.check_stages(self.stages, data=self.data, progress=progress)
        try:
            return tables.checks(results.checks(self.gpu or "", self.data))
        except NoDataError as error:
            return NOTHING_YET if self.results is None else f"*{error}*"

    @cached_property
    def results(self) -> Results | None:
        """What is recorded of the GPU; None where nothing is."""
        if self.gpu is None:
            return None
        try:
            return results.load(self.gpu, self.data)
        except NoDataError:
            return None

    def rows(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Recorded rows of `problem` (the sources' shape, where None), chosen stages and every peer; may be empty."""
        try:
            return self.results.rows(problem, stage_ids=self.stages) if self.results else ()
        except NoDataError:
            return ()

    def beside(self, problem: Problem | None = None) -> tuple[Measurement, ...]:
        """Libraries that lack the element type of `problem`, in another; see `Results.beside`. May be empty."""
        return self.results.beside(problem) if self.results else ()

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
        where = "measuring on this machine's GPU" if self.source == "measure" else "showing what is recorded in data/"
        return f"{where}: {self.gpu or 'no GPU yet'}; {len(self.stages)} stages, suite {self.suite}"


def settings(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str | Sequence[str] = "",
    suite: str = "standard",
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
        out: folder of the result file; empty: build/notebooks.
        data: folder of the records; empty: the checkout's data/.

    Raises:
        ParameterError: no such source or suite, or `gpu` names a GPU that this machine lacks while measuring.
        UnknownStageError: no such stage.
        NoGpuError: `measure` without a GPU.
        NoDataError: `replay` of a GPU that has no records.
        OutputError: `out` cannot be written.
    """
    if source not in SOURCES:
        raise ParameterError(f"source: wanted one of {', '.join(SOURCES)}, got {source!r}")
    problems_of(suite)
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
        records.runs(gpu, data)  # raises NoDataError, which names the GPUs there are
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


def machine_here() -> str:
    """This machine's GPU as a Markdown table, or why there is none."""
    from flashlab import tables

    why_not = gpus.available()
    if why_not:
        return f"*This machine has no GPU to use: {why_not}*"
    facts = dataclasses.asdict(gpus.info())
    return tables.markdown(("this machine", ""), [(k.replace("_", " "), str(v)) for k, v in facts.items()], left=2)


def show(item: Chart | str) -> None:
    """Show a chart, or Markdown, in a notebook."""
    from IPython.display import Markdown, display

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
