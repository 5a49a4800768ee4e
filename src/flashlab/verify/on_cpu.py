"""Checks of stages on the CPU: runs each case of cases.py in the emulator and compares it with the oracle.

Buffers have NaN guards, outputs are poisoned, inputs are compared afterwards; the log-sum-exp is always computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Unpack

from flashlab.build.compiler import Variant
from flashlab.build.parallel import Follow, ignore, on_all_cores
from flashlab.core.errors import CompileError, EmulationError, FlashlabError, UnsupportedError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Implementation
from flashlab.record.checks import CheckRow, EmulatorVerdict
from flashlab.record.schema import Status, Verdict
from flashlab.run import emulator
from flashlab.run.attention import Emulation, emulate, refuse_too_large
from flashlab.verify.cases import (
    LAYOUTS,
    MANY_SCORES,
    SUITES,
    TENSORS,
    Case,
    Selection,
    chosen_cases,
    laid_out,
    placement,
)
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import Guarded, Oracle, check, damage

MANY_SCORES_IN_ALL = 1 << 17
"""Maximum scores that a CPU emulates beside a GPU; of larger problems, only the first group of query heads."""
Rule = Callable[..., Verdict]
"""`verdict.check`, or a replacement."""


@dataclass(frozen=True)
class CheckRun:
    """Verdicts of a check, and the file that records them."""

    path: Path | None
    rows: tuple[CheckRow, ...]

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """Failed rows; unsupported problems are not failures."""
        return tuple(row for row in self.rows if row.status not in ("ok", "unsupported"))


class Late(dict[str, dict[Problem | None, str]]):
    """Where stages ran out of time: none is waited for again in other layouts of a problem, nor, after two, at all."""

    def add(self, row: CheckRow) -> None:
        """Take note of a row that ran out of time."""
        if row.status == "timeout" and not self.why(row.stage, row.problem):
            self.setdefault(row.stage, {})[row.problem] = f"{row.problem.label} {row.layout} {row.schedule}".strip()

    def why(self, name: str, problem: Problem | None) -> str:
        """Why a stage is not run at a problem; empty where it is."""
        at = self.get(name, {})
        return f"not run: no end at {'; '.join(at.values())}" if problem in at or len(at) > 1 else ""


_Build = tuple[str, bool]
"""Key of an executable: the label of its variant, and whether it has hooks."""


def _variant(chosen: Implementation, case: Case) -> Variant:
    how = {"aligned": case.aligned, "overrides": chosen.params, "source": chosen.source}
    return Variant.of(chosen.stage, case.launched, **how)


def build_all(
    by_name: Mapping[str, Implementation],
    cases: Sequence[Case],
    *,
    hooks: bool = False,
    follow: Follow = ignore,
) -> dict[_Build, CompileError]:
    """Compile the executables of cases in parallel; returns the errors of those that do not compile.

    Raises:
        MissingPackageError, OutputError: there is no compiler, or the cache cannot be written.
    """
    emulator.cxx()
    variants: dict[_Build, Variant] = {}
    for case in cases:
        for chosen in (by_name[name] for name in case.names):
            if chosen.stage.language == "cuda":
                variant = _variant(chosen, case)
                variants[variant.label, hooks and case.detectable] = variant

    def build(key: _Build) -> CompileError | None:
        try:
            emulator.build_stage(variants[key], hooks=key[1])
        except CompileError as error:
            return error
        return None

    errors = on_all_cores(build, list(variants), what=lambda key, _: f"compile {key[0]} for the CPU", follow=follow)
    return {key: error for key, error in zip(variants, errors, strict=True) if error is not None}


def check_on_cpu(
    stage_ids: Sequence[str] | None = None,
    *,
    sources: Mapping[str, Path] | None = None,
    schedules: Sequence[str] | None = None,
    races: bool = False,
    seed: int = 0,
    timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
    follow: Follow = ignore,
    **selection: Unpack[Selection],
) -> CheckRun:
    """Check stages against the oracle on the CPU, over adversarial lengths, masks, dtypes, layouts and schedules.

    `selection` is that of `cases.chosen_cases`. `races` also detects races, uninitialised reads and out-of-bounds
    accesses; a finding is a failure. The cases of a `suite` are judged by its rule.

    Raises:
        InputError: an option is invalid.
        MissingPackageError: there is no C++ compiler.
        OutputError: the cache cannot be written.
        KeyboardInterrupt: Ctrl-C; all workers have ended.
    """
    for schedule in schedules or ():
        emulator.schedule_item(schedule)
    by_name = registry.implementations(stage_ids, sources)
    chosen = chosen_cases(
        {name: implementation.stage for name, implementation in by_name.items()},
        schedules=schedules,
        seed=seed,
        on_cpu=True,
        **selection,
    )
    refused = build_all(by_name, chosen, hooks=races, follow=follow)
    suite = selection.get("suite")
    rule = SUITES[suite] if suite else check
    todo = [(name, case) for case in chosen for name in case.names]
    # The long ones first, so that none is left alone at the end.
    order = sorted(range(len(todo)), key=lambda index: -todo[index][1].problem.flops)

    cancel, late = threading.Event(), Late()

    def check_one(index: int) -> CheckRow:
        name, case = todo[index]
        implementation, detect = by_name[name], races and case.detectable
        row = CheckRow(stage=name, problem=case.problem, layout=case.layout, status="ok", schedule=case.schedule)
        if reason := late.why(name, case.problem):
            return replace(row, status="timeout", reason=reason)
        try:
            if error := refused.get((_variant(implementation, case).label, detect)):
                raise error
            if timeout_s is not None:
                refuse_too_large(name, case.problem, timeout_s=timeout_s, races=detect, threads=1)
            shared_heads = case.layout if "=" in case.layout else ""  # other numbers
            verdict, ran = emulated_verdict(
                implementation.id,
                case.problem,
                laid_out(_inputs(case.problem, seed), case.layout),
                layout=case.layout,
                source=implementation.source,
                params=implementation.params,
                schedule=case.schedule,
                races=detect,
                threads=1,
                timeout_s=timeout_s,
                cancel=cancel,
                judge=partial(rule, oracle=_oracle(case.problem, seed, shared_heads)),
            )
        except FlashlabError as error:
            status, reason = status_of(error)
            late.add(row := replace(row, status=status, reason=reason))
            return row
        return replace(
            row,
            status="ok" if verdict.passed else "wrong",
            reason=verdict.reason,
            verdict=verdict,
            findings=tuple(str(finding) for finding in ran.report.findings),
            fallbacks=ran.fallbacks,
        )

    def what(_: int, row: CheckRow) -> str:
        return f"{row.stage} {row.problem.label} {row.layout} {row.schedule}"

    rows = on_all_cores(check_one, order, what=what, follow=follow, cancel=cancel)
    return CheckRun(None, tuple(row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])))


_KEPT_PROBLEMS = 256
"""Cached reference values, of at most one or two megabytes each, shared by stages and schedules."""


@lru_cache(maxsize=_KEPT_PROBLEMS)
def _inputs(problem: Problem, seed: int) -> tuple[Any, Any, Any]:
    return make_inputs(problem, seed=seed)


@lru_cache(maxsize=_KEPT_PROBLEMS)
def _oracle(problem: Problem, seed: int, shared_heads: str) -> Oracle:
    """The cached reference values of a problem's inputs, shared by all stages."""
    return Oracle()


def emulated_verdict(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    *,
    layout: str = "contiguous",
    judge: Rule = check,
    **options: Any,
) -> tuple[Verdict, Emulation]:
    """Run a stage once on the CPU with guarded buffers and judge the output.

    A finding of the detector fails a verdict that would pass otherwise.

    Args:
        values: q, k, v from `oracle.make_inputs(problem)`.
        layout: one of `cases.LAYOUTS`, or a random one, with values from `cases.laid_out`.
        judge: replacement for `verdict.check`.
        options: `params`, `source`, `schedule`, `races`, `threads`, `timeout_s`, `cancel` of `attention.emulate`.

    Raises:
        FlashlabError: as `attention.emulate` does.
    """
    inputs = [Guarded.holding(x, **placement(x.shape, layout, t)) for x, t in zip(values, TENSORS, strict=False)]
    out_shape = values[0].shape
    out = Guarded(out_shape, problem.dtype, **placement(out_shape, layout))
    lse = Guarded(out_shape[:3], "float32")
    buffers = dict(zip(("q", "k", "v", "out", "lse"), (*inputs, out, lse), strict=True))
    q, k, v = (buffer.array for buffer in inputs)
    ran = emulate(
        q,
        k,
        v,
        **problem.options,
        stage=stage_id,
        out=out.array,
        lse=lse.array,
        surroundings={name: buffer.buffer for name, buffer in buffers.items() if not buffer.sparse},
        count_fallbacks=True,
        **options,
    )
    verdict = damage(out, lse, inputs) or judge(
        out.array,
        lse.array,
        *values,
        **problem.options,
        dtype=problem.dtype,
        precision=registry.get(stage_id).precision,
    )
    findings = ran.report.findings
    if verdict.passed and findings:
        reason = f"{findings[0]}{f', and {len(findings) - 1} more' if len(findings) > 1 else ''}"
        verdict = verdict.model_copy(update={"passed": False, "reason": reason})
    return verdict, ran


def status_of(error: FlashlabError) -> tuple[Status, str]:
    """Status and reason of a row for an error on the CPU."""
    if isinstance(error, UnsupportedError):
        return "unsupported", str(error)
    if isinstance(error, EmulationError):
        late = error.report is not None and error.report.status == "timeout"
        return "timeout" if late else "crashed", str(error)
    return "error", error.summary if isinstance(error, CompileError) else str(error)


# --- beside a GPU -----------------------------------------------------------------------------------------------------


def emulates(problem: Problem, layout: str) -> bool:
    """Whether a GPU case is also run on the CPU: long problems only in the contiguous or a random layout."""
    return problem.q_len * problem.kv_len <= MANY_SCORES or layout not in tuple(LAYOUTS)[1:]


def emulate_beside(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    out: Any,
    lse: Any,
    *,
    layout: str,
    **options: Any,
) -> EmulatorVerdict:
    """Run a GPU case on the CPU and compare both outputs within the limits of the checker.

    Of a large problem, only the first group of query heads is run, on the same values.

    Args:
        values: q, k, v on the host, from `oracle.make_inputs`.
        out, lse: outputs of the GPU, on the host.
        options: those of `emulated_verdict`.
    """
    if problem.batch * problem.q_heads * problem.q_len * problem.kv_len > MANY_SCORES_IN_ALL:
        group = problem.q_heads // problem.kv_heads
        values = (values[0][:1, :group], values[1][:1, :1], values[2][:1, :1])
        out, lse = out[:1, :group], lse[:1, :group]
        problem = replace(problem, batch=1, q_heads=group, kv_heads=1)
    judge = partial(check, oracle=Oracle())
    try:
        verdict, ran = emulated_verdict(stage_id, problem, values, layout=layout, judge=judge, **options)
    except FlashlabError as error:
        status, reason = status_of(error)
        return EmulatorVerdict(status=status, reason=reason, shape=problem.shape, verdict=None, agreement=None)
    agreement = judge(
        out,
        lse,
        *values,
        **problem.options,
        dtype=problem.dtype,
        precision=registry.get(stage_id).precision,
        against=(ran.out, ran.lse),
    )
    reason = verdict.reason or (agreement.reason and f"chip and emulator: {agreement.reason}")
    return EmulatorVerdict(
        status="wrong" if reason else "ok", reason=reason, shape=problem.shape, verdict=verdict, agreement=agreement
    )
