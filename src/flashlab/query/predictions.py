"""What the stages' predictions said in numbers, beside what was measured.

A prediction is written before its kernel runs and is never changed; `Expected` entries of a stage's TOML file give its
numbers a form that can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Expected, Stage
from flashlab.query import select
from flashlab.query.select import Results
from flashlab.record.schema import Measurement


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One number of a prediction and its measurement."""

    stage: Stage
    expected: Expected
    measured: float | None
    """TFLOP/s or a ratio of rates, as `expected.of` says; None where it is not on record."""
    run: str
    """The run it is of; empty where there is none."""

    @property
    def off(self) -> float | None:
        """By what part the measurement is above (positive) or below the range; 0 within; None where there is none."""
        if self.measured is None:
            return None
        nearest = min(max(self.measured, self.expected.low), self.expected.high)
        return self.measured / nearest - 1


def scores(shown: Results, stages: Iterable[Stage] | None = None) -> list[Scored]:
    """Every number of the stages' predictions, the ladder's first, as measured on a GPU."""
    every = (*registry.STAGES.values(), *registry.OFF_LADDER.values()) if stages is None else stages
    found = []
    for stage in every:
        for expected in stage.expected:
            mine, base = _rows(stage, expected, shown)
            rate, under = select.rate(mine), select.rate(base)
            if expected.of == "ratio":
                rate = rate / under if rate and under else None
            run = mine.run if mine and rate else ""
            found.append(Scored(stage=stage, expected=expected, measured=rate, run=run))
    return found


def _rows(stage: Stage, expected: Expected, shown: Results) -> tuple[Measurement | None, Measurement | None]:
    """The row of a stage and the one that its ratio is over: those that pages show where both are of one session."""
    problem, over = expected.problem, expected.over or stage.parent or stage.id
    other = problem if expected.over_inputs is None else replace(problem, inputs=expected.over_inputs)
    if expected.of == "tflops":
        over, other = stage.id, problem
    rows = shown.problems.get(problem, ())
    by_name = {row.name: row for row in rows if row.samples_of()}
    mine, base = by_name.get(stage.id), by_name.get(over)
    if other == problem and mine and base and (mine is base or select.parent_of(mine, rows) is base):
        return mine, base
    return of_one_run(stage.id, problem, over, other, shown.records)


def of_one_run(
    name: str, problem: Problem, over: str, other: Problem, records: Iterable[Measurement]
) -> tuple[Measurement | None, Measurement | None]:
    """The rows of both in the newest run that timed both; None twice where none did."""

    def timed(name: str, at: Problem) -> dict[str, Measurement]:
        rows = (row for row in records if row.name == name and row.problem == at and not row.with_lse)
        return {row.run: row for row in rows if row.samples_of()}

    mine, base = timed(name, problem), timed(over, other)
    run = max(mine.keys() & base.keys(), default="")
    return mine.get(run), base.get(run)
