"""Run a kernel, or an edited copy of one, on this machine's CPU, and report verdict, races and memory accesses.

copy = edited("05_wmma", old, new)   a copy of a stage's file with one change
before = attempt("05_wmma")          a run with race detection; errors are in the result
after = attempt("05_wmma", copy)
compare({"as it is": before, "edited": after})
"""

from __future__ import annotations

import difflib
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from flashlab.core.errors import (
    CompileError,
    EmulationError,
    FlashlabError,
    MissingPackageError,
    NoDataError,
    OutputError,
    ParameterError,
)
from flashlab.core.paths import BUILD, ROOT, digest, writable_dir
from flashlab.core.paths import table as facts_in
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.query.rows import grouped
from flashlab.record import store
from flashlab.record.checks import CheckRow, Compared, EmulatorVerdict
from flashlab.record.schema import StageCounters, Verdict
from flashlab.run import emulator
from flashlab.run.attention import emulate, refuse_too_large
from flashlab.run.emulator import Place, Report
from flashlab.show import charts
from flashlab.show.charts import Chart
from flashlab.show.tables import (
    Cell,
    Column,
    code,
    markdown,
    number,
    place,
    prose,
    source,
    stage,
    table,
    tiny,
)
from flashlab.verify import oracle
from flashlab.verify.verdict import check

EDITS = BUILD / "edits"
"""Folder of edited kernels; kernels/ is not modified."""
QUERY_ROWS = 16
"""Query rows per block of the error chart."""
EXPLAINED: Mapping[str, Mapping[str, str]] = facts_in(__file__, "wrong")
"""Explanations by kind of finding or end of a run: its meaning, `means`, and the site's `page` on it."""
NO_REPORT = "*It did not run, so there are no accesses to report.*"
_CUDA_ALIGNMENT = 256
"""Alignment in bytes of arrays from CUDA's allocators, on which sector counts depend."""


def no_compiler() -> str:
    """Why kernels cannot run on this machine's CPU, with a remedy, as Markdown; empty if they can."""
    try:
        emulator.cxx()
    except MissingPackageError as error:
        return f"**No kernel runs on this machine's CPU yet.** {error}"
    return ""


# --- Edited copies ----------------------------------------------------------------------------------------------------


def own_copy(stage_id: str) -> Path:
    """A copy of a stage's file to edit, `build/edits/<stage>.cu`. Once edited it is never overwritten.

    Raises:
        UnknownStageError: no such stage.
        OutputError: it cannot be written.
    """
    original = registry.get(stage_id).source
    path = writable_dir(EDITS, "edited kernels") / original.name
    # The original: an unedited copy is updated with the stage.
    made_from = writable_dir(EDITS / "original", "edited kernels") / path.name
    untouched = path.is_file() and made_from.is_file() and path.read_bytes() == made_from.read_bytes()
    if untouched or not path.exists():
        for copy in (made_from, path):
            store.write_at_once(copy, original.read_text(encoding="utf-8"))
    return path


def edited(stage_id: str, old: str, new: str) -> Path:
    """A copy of a stage's file with `old` replaced by `new`: `build/edits/<stage>-<digest of its content>.cu`.

    Raises:
        UnknownStageError: no such stage.
        ParameterError: `old` does not occur exactly once.
        OutputError: it cannot be written.
    """
    original = registry.get(stage_id).source
    text = original.read_text(encoding="utf-8")
    count = text.count(old) if old else 0
    if count != 1:
        lines = [number for number, line in enumerate(text.splitlines(), 1) if old and old in line]
        where = f", in lines {', '.join(map(str, lines))}; include more of the line to select one" if lines else ""
        raise ParameterError(
            f"old: wanted text that occurs once in {original.relative_to(ROOT)}, got {old!r}, "
            f"which occurs {count} times{where}"
        )
    text = text.replace(old, new)
    path = writable_dir(EDITS, "edited kernels") / f"{original.stem}-{digest(text.encode())[:8]}{original.suffix}"
    store.write_at_once(path, text)  # another notebook may be compiling the file
    return path


def diff(before: Path, after: Path) -> str:
    """The diff of two files as a code block; a sentence if they are equal."""
    old, new = (path.read_text(encoding="utf-8").splitlines() for path in (before, after))
    lines = list(difflib.unified_diff(old, new, before.name, after.name, n=2, lineterm=""))
    if not lines:
        return "*The two files are equal.*"
    return "```diff\n" + "\n".join(lines) + "\n```\n"


# --- Runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One run of a kernel on the CPU."""

    stage: str
    problem: Problem
    schedule: str
    verdict: Verdict | None = None
    """Verdict on the output values; None if there is no output."""
    report: Report | None = None
    """Findings and counters, up to the point where it stopped; None if it did not run."""
    errors: tuple[float, ...] = ()
    """The largest error of each block of `QUERY_ROWS` query rows, over all heads; NaN if any error is."""
    error: str = ""
    """Why there is no result; empty if there is one."""
    ended: str = ""
    """The kind of failure, if caused by the kernel: a key of `EXPLAINED`."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """All failures, as keys of `EXPLAINED`; empty if there are none."""
        kinds = [finding.kind for finding in self.report.findings] if self.report else []
        if self.ended:
            kinds.append(self.ended)
        if self.verdict and not self.verdict.passed:
            kinds.append("wrong values")
        return tuple(dict.fromkeys(kinds))

    @property
    def passed(self) -> bool:
        """Whether the result is right and the detector found no error."""
        return self.verdict is not None and self.verdict.passed and not (self.report and self.report.findings)


def attempt(
    stage_id: str,
    source: Path | None = None,
    *,
    shape: str = "1x2x128x64",
    mask: str = "full",
    schedule: str = "ascending",
    params: Mapping[str, int] | None = None,
    timeout_s: float = 20.0,
) -> Trial:
    """Run a stage, or `source` in its place, once on the CPU with race detection; the result contains any failure.

    Args:
        shape, mask: the problem, float16.
        schedule: `ascending`, `descending` or `seeded:N`.
        params: tunables other than the defaults.
        timeout_s: time limit of the run.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError: invalid stage, tunables or problem.
        OutputError: the compile cache cannot be written.
    """
    import numpy as np

    kernel = registry.get(stage_id)
    problem = Problem.parse(shape, mask=mask)
    kernel.require(problem)
    what: dict[str, Any] = {"stage": kernel.id, "problem": problem, "schedule": schedule}
    races = kernel.language == "cuda"
    try:
        refuse_too_large(kernel.id, problem, timeout_s=timeout_s, races=races, threads=None)
        q, k, v = (_aligned_like_cuda(values) for values in oracle.make_inputs(problem))
        ran = emulate(
            q,
            k,
            v,
            causal=problem.causal,
            stage=kernel.id,
            out=_aligned_like_cuda(np.zeros_like(q)),
            lse=_aligned_like_cuda(np.zeros(q.shape[:3], np.float32)),
            params=params,
            source=source,
            schedule=schedule,
            races=races,
            timeout_s=timeout_s,
        )
    except (ParameterError, OutputError):
        raise
    except CompileError as error:
        return Trial(**what, error=error.summary, ended="does not compile")
    except EmulationError as error:
        ended = error.report.status if error.report else "crash"
        return Trial(**what, error=str(error), report=error.report, ended=ended)
    except FlashlabError as error:
        return Trial(**what, error=str(error))
    exact, _ = oracle.attention(q, k, v, causal=problem.causal)
    apart = np.abs(ran.out.astype(np.float64) - exact).max(axis=(0, 1, 3))
    return Trial(
        **what,
        verdict=check(ran.out, ran.lse, q, k, v, causal=problem.causal, dtype=problem.dtype),
        report=ran.report,
        errors=tuple(float(apart[row : row + QUERY_ROWS].max()) for row in range(0, problem.q_len, QUERY_ROWS)),
    )


def _aligned_like_cuda(values: Any) -> Any:
    """A copy aligned like CUDA's arrays: sector counts depend on alignment, and NumPy's varies from run to run."""
    import numpy as np

    room = np.zeros(values.nbytes + _CUDA_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _CUDA_ALIGNMENT
    placed = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    placed[...] = values
    return placed


def count_accesses(stage_id: str, shape: str) -> Report:
    """Count the accesses of a stage on the CPU, run as scripts/counters_ncu.py does: non-causal, float16, no LSE.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError, MissingPackageError, CompileError, EmulationError.
    """
    import numpy as np

    kernel = registry.get(stage_id)
    problem = Problem.parse(shape)
    kernel.require(problem)
    inputs = [_aligned_like_cuda(values) for values in oracle.make_inputs(problem)]
    out = _aligned_like_cuda(np.zeros_like(inputs[0]))
    return emulate(*inputs, stage=kernel.id, out=out, return_lse=False, races=True, timeout_s=None).report


# --- What is said of runs ---------------------------------------------------------------------------------------------


def compare(trials: Mapping[str, Trial]) -> str:
    """A Markdown table of runs: verdict, error, findings."""

    def cells(trial: Trial) -> list[Cell]:
        verdict, report = trial.verdict, trial.report
        if verdict is None or report is None:
            return ["no result", trial.error.partition("\n")[0], None, None, None]
        kinds = Tally(finding.kind for finding in report.findings)
        by_kind = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "none"
        limits = (tiny(verdict.max_abs_error), tiny(verdict.max_abs_limit))
        return ["right" if verdict.passed else "wrong", prose(verdict.reason) or None, *limits, by_kind]

    header = ("", "result", "reason", "largest error", "limit", "findings")
    return markdown(header, [[title, *cells(trial)] for title, trial in trials.items()], left=3)


def compare_rows(trials: Mapping[str, Trial], *, name: str) -> Chart | str:
    """A chart of the runs' errors by block of query rows; a sentence if no run has a finite one."""
    runs = list(trials.values())
    limit = next((run.verdict.max_abs_limit for run in runs if run.verdict and run.verdict.max_abs_limit), None)
    schedules = " and ".join(dict.fromkeys(run.schedule for run in runs))
    note = f"{runs[0].stage} · {runs[0].problem.label} · {schedules} · on a CPU"
    try:
        errors = {title: trial.errors for title, trial in trials.items()}
        return charts.row_errors(errors, rows=QUERY_ROWS, limit=limit, note=note, name=name)
    except NoDataError:
        return "*No run has a finite error.*"


def said(trial: Trial) -> str:
    """The full error message as a code block; a sentence if there is none."""
    if not trial.error:
        return "*It ran to completion.*"
    return f"```text\n{trial.error}\n```\n"


def judged(verdicts: Mapping[str, Verdict]) -> str:
    """The checker's verdicts on outputs, as a Markdown table."""
    columns = (
        Column("output", "0"),
        Column("verdict", lambda item: "passed" if item[1].passed else "rejected", left=True),
        Column("reason", lambda item: prose(item[1].reason) or None, left=True),
        Column("largest error", "1.max_abs_error", tiny),
        Column("limit", "1.max_abs_limit", tiny),
    )
    return table(columns, verdicts.items())


_ACCESSES: Mapping[str, str] = {
    "read": "reads",
    "write": "writes",
    "atomic": "updates",
    "async read": "reads asynchronously",
    "async write": "writes asynchronously",
}


def _where(at: Place) -> str:
    """The kernel's line, then that of the header that it called."""
    lines = [
        f"{place(frame.file.name, frame.line)}<br>{source(frame.text) if frame.text else ''}"
        for frame in (at.caller, at.frame)
        if frame
    ]
    return "<br>in ".join(lines) or "unknown<br>"


def explained(trial: Trial) -> str:
    """Explanations of a run's failures, as a Markdown list; empty if there are none."""
    return "".join(
        f"- **{kind}**: {EXPLAINED[kind]['means']} [More](../site/{EXPLAINED[kind]['page']})\n" for kind in trial.wrong
    )


def findings(report: Report | None) -> str:
    """The detector's findings, with the source of both accesses; a sentence if there are none or it did not run."""
    if report is None:
        return NO_REPORT
    if not report.findings:
        if report.status != "ok":
            return "*The detector found nothing up to the point where the run stopped.*"
        return "*No race, no uninitialised read, no access out of bounds: the detector found nothing.*"
    lines: list[list[Cell]] = []
    for finding in report.findings:
        where = ", ".join(filter(None, (f"{finding.space} memory", finding.array)))
        times = f", {finding.count:,} times" if finding.count > 1 else ""
        accesses: list[list[Cell]] = [
            [
                f"thread\N{NO-BREAK SPACE}{actor.thread} {_ACCESSES.get(actor.access, actor.access)}",
                _where(actor.place),
            ]
            for actor in (finding.first, finding.second)
            if actor
        ]
        first, *more = accesses or [[None, None]]
        lines += [[f"**{finding.kind}**, {where}{times}", *first], *(["", *cells] for cells in more)]
    return markdown(("finding", "first seen", "at"), lines, left=3)


_LINE = ["access", "kind", "bytes", "text"]
"""Properties of a source line that identify it after edits elsewhere."""


def _accesses(space: str, name: str, reports: Mapping[str, Report | None]) -> str:
    """Passes per source line and their ratio to the ideal; the n-th of equal lines is the same row in each report."""
    import pandas as pd

    ran = {title: report for title, report in reports.items() if report}
    if not ran:
        return NO_REPORT
    keys = ["side", "header", "file", "number", *_LINE]
    rows = [
        (
            *(
                side,
                at.file.name.endswith("h"),
                at.file.name,
                at.line,
                counter.access,
                counter.kind,
                counter.bytes,
                at.text,
            ),
            *(getattr(counter, f"{ideal}{name}") for ideal in ("", "ideal_")),
        )
        for side, report in enumerate(ran.values())
        for counter in report.counters
        if counter.space == space and (at := counter.place.frame)
    ]
    if not rows:
        return f"*No line accesses {space} memory.*"
    # Sorted by the keys: the kernel's own file first, then the headers.
    lines = pd.DataFrame(rows, columns=[*keys, "actual", "ideal"]).groupby(keys, as_index=False).sum()
    lines["nth"] = lines.groupby(["side", *_LINE]).cumcount()

    def cells(of: Any) -> list[Cell]:
        sums = (of[of["side"] == side][["actual", "ideal"]].sum() for side in range(len(ran)))
        pairs = ((f"{int(actual):,}", f"×{number(actual / ideal, 2)}") if ideal else () for actual, ideal in sums)
        return [cell for pair in pairs for cell in pair or (None, None)]

    table: list[list[Cell]] = []
    for _, same in lines.groupby([*_LINE, "nth"], sort=False):
        first = same.iloc[0]
        how = {"matrix": "matrix ", "async copy": "copy, "}.get(first["kind"], "") + first["access"]
        text = source(first["text"]) if first["text"] else ""
        table.append([place(first["file"], first["number"]), text, f"{how}, {first['bytes']} B per lane", *cells(same)])
    heads = [f"{title}: {name}" if len(reports) > 1 else name for title in ran]
    header = ["line", "source", "access", *(head for pair in heads for head in (pair, "over ideal"))]
    return markdown(header, [*table, ["total", None, None, *cells(lines)]], left=3)


def conflicts(reports: Mapping[str, Report | None]) -> str:
    """Shared-memory wavefronts per source line, and their ratio to the count without bank conflicts.

    Args:
        reports: the runs to compare, by name; equal source lines share a row.
    """
    return _accesses("shared", "wavefronts", reports)


def sectors(reports: Mapping[str, Report | None]) -> str:
    """Global-memory sectors of 32 bytes per source line, and their ratio to the count for contiguous bytes.

    Args:
        reports: as for `conflicts`.
    """
    return _accesses("global", "sectors", reports)


# --- Beside a GPU -----------------------------------------------------------------------------------------------------

_OPERATIONS: Mapping[str, tuple[str, str, str, str, str]] = {
    "global loads": ("global", "read", "plain", "global_ld", "ld"),
    "global stores": ("global", "write", "plain", "global_st", "st"),
    "cp.async": ("global", "read", "async copy", "ldgsts", "ldgsts"),
    "shared loads": ("shared", "read", "plain", "shared_ld", "ld"),
    "ldmatrix": ("shared", "read", "matrix", "ldsm", "ldsm"),
    "shared stores": ("shared", "write", "plain", "shared_st", "st"),
}
"""Accesses by memory, access and kind, as the emulator counts them, with their names in Nsight Compute's metrics.

Nsight Compute counts these by patched instructions; hardware counters include arbitration too."""
_PASSES = {
    "global": ("sectors", "t_sectors_pipe_lsu_mem_global"),
    "shared": ("wavefronts", "data_pipe_lsu_wavefronts_mem_shared"),
}
Counts = tuple[int, int, int, int]
"""Requests by the emulator and by Nsight Compute, passes by the emulator and by Nsight Compute."""


def counted(report: Report, line: StageCounters) -> dict[str, Counts]:
    """Both counts of each kind of access.

    Kinds that neither counted, or without a metric in this version of Nsight Compute, are left out.
    """
    counts = {}
    for what, (space, access, kind, instruction, operation) in _OPERATIONS.items():
        passes, pipe = _PASSES[space]
        metrics = (f"smsp__sass_inst_executed_op_{instruction}.sum", f"smsp__sass_l1tex_{pipe}_op_{operation}.sum")
        if not all(name in line.metrics for name in metrics):
            continue
        mine = [
            counter
            for counter in report.counters
            if (counter.space, counter.access, counter.kind) == (space, access, kind)
        ]
        ours = sum(counter.requests for counter in mine), sum(getattr(counter, passes) for counter in mine)
        theirs = [round(line.metrics[name]) for name in metrics]
        if any((*ours, *theirs)):
            counts[what] = (ours[0], theirs[0], ours[1], theirs[1])
    return counts


def _over(ours: int, theirs: int) -> str:
    if ours == theirs:
        return "equal"
    return f"×{number(ours / theirs)}" if theirs else "–"


COUNTERS = (
    stage("0"),
    Column("access", "1", lambda what: what.replace(" ", "\N{NO-BREAK SPACE}"), left=True),
    Column("requests, emulator", "2.0", "{:,}".format),
    Column("Nsight Compute", "2.1", "{:,}".format),
    Column("ratio", lambda item: _over(*item[2][:2])),
    Column("passes", lambda item: _PASSES[_OPERATIONS[item[1]][0]][0]),
    Column("emulator", "2.2", "{:,}".format),
    Column("Nsight Compute", "2.3", "{:,}".format),
    Column("ratio", lambda item: _over(*item[2][2:])),
)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The emulator's counters compared with Nsight Compute's for the same launches."""

    compared: Mapping[str, Mapping[str, Counts]] = field(default_factory=dict)
    """The results of `counted`, by stage."""
    source: str = ""
    """GPU, shapes and commits of Nsight Compute's counters."""
    patterns: int = 0
    """Number of single accesses on record."""
    missing: str = ""
    """Why there is nothing to compare."""

    @property
    def equal(self) -> tuple[str, ...]:
        """Stages whose counts are all equal."""
        return tuple(
            stage_id
            for stage_id, of_stage in self.compared.items()
            if all(counts[0] == counts[1] and counts[2] == counts[3] for counts in of_stage.values())
        )

    def __str__(self) -> str:
        if self.missing or not self.compared:
            return self.missing or "*No stage shown here has recorded counters.*"
        said = f"All counts of {', '.join(map(code, self.equal))} are equal." if self.equal else ""
        if self.patterns:
            said += (
                f" Also on record are {self.patterns} single accesses to shared memory, against which tests check the "
                "model of bank conflicts."
            )
        rows = [(name, what, counts) for name, of in self.compared.items() for what, counts in of.items()]
        return f"{table(COUNTERS, rows)}\n{said.strip()}\n\n*{self.source}*\n"


_REASON_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class CpuCheck:
    """Checks of the stages on this machine's CPU against the oracle; without rows if there is no compiler."""

    rows: tuple[CheckRow, ...] = ()
    left_out: str = ""
    """The cases included and left out, as Markdown; may be empty."""

    @property
    def passed(self) -> bool:
        """Whether no run failed; also true if none was possible."""
        return all(row.status == "ok" for row in self.rows)

    @property
    def outcomes(self) -> dict[str, bool]:
        """Whether all runs of a stage passed, by its id."""
        by_stage = grouped(self.rows, lambda row: row.stage)
        return {stage: all(row.status == "ok" for row in rows) for stage, rows in by_stage.items()}

    def __str__(self) -> str:
        if not self.rows:
            return no_compiler()
        columns = (
            stage("0"),
            Column("schedules", lambda item: ", ".join(dict.fromkeys(row.schedule for row in item[1])), left=True),
            Column("runs", lambda item: len(item[1])),
            Column("passed", lambda item: sum(row.status == "ok" for row in item[1])),
            Column("findings", lambda item: sum(len(row.findings) for row in item[1])),
        )
        wrong = (row for row in self.rows if row.status not in ("ok", "unsupported"))
        # Layouts mostly fail alike: only the first is shown.
        failed: dict[tuple[str, str, str], str] = {}
        for row in wrong:
            failed.setdefault(
                (code(row.stage), row.problem.label, row.schedule), prose(shorten(row.reason, _REASON_CHARS))
            )
        said = [table(columns, grouped(self.rows, lambda row: row.stage).items())]
        if failed:
            rows = [(*what, why) for what, why in failed.items()]
            said.append(markdown(("failed", "problem", "schedule", "reason"), rows, left=4))
        return "\n".join([*said, self.left_out])


def agreement(lines: Iterable[Compared]) -> str:
    """Agreement of GPU and emulator on the same inputs (`select.emulated_checks`), one row per stage, as Markdown."""
    by_stage = grouped(((line, line.emulator) for line in lines if line.emulator), lambda pair: pair[0].stage)

    def passed(of_stage: Sequence[tuple[Compared, EmulatorVerdict]], what: str) -> int:
        verdicts = (getattr(ran, what) for _, ran in of_stage)
        return sum(bool(verdict and verdict.passed) for verdict in verdicts)

    def furthest(of_stage: Sequence[tuple[Compared, EmulatorVerdict]]) -> str | None:
        apart = [ran.agreement for _, ran in of_stage if ran.agreement]
        errors = ((verdict.max_abs_error, verdict.max_abs_limit) for verdict in apart)
        shares = [error / limit for error, limit in errors if error is not None and limit]
        return f"{number(100 * max(shares))} %" if shares else None

    columns = (
        stage("0"),
        Column("inputs", lambda item: len(item[1])),
        Column("GPU passed", lambda item: sum(line.status == "ok" for line, _ in item[1])),
        Column("emulator passed", lambda item: passed(item[1], "verdict")),
        Column("agree", lambda item: passed(item[1], "agreement")),
        Column("largest difference, of its limit", lambda item: furthest(item[1])),
    )
    failed = [
        (code(line.stage), ran.shape, prose(ran.reason))
        for of_stage in by_stage.values()
        for line, ran in of_stage
        if ran.status != "ok"
    ]
    return table(columns, by_stage.items()) + (
        "\n" + markdown(("failed", "shape", "reason"), failed, left=3) if failed else ""
    )
