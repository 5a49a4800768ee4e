"""The stages' predictions, scored against measurements.

A prediction is written before its kernel runs and is never changed; the `Expected` entries of a stage's TOML file state
its numbers in comparable form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashlab.core.problem import Cache, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Expected, Stage
from flashlab.query import select
from flashlab.query.select import Results
from flashlab.record.schema import Measurement


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One predicted range and its measurement."""

    stage: Stage
    expected: Expected
    measured: float | None
    """In the unit of `expected.of`; None if not on record."""

    @property
    def off(self) -> float | None:
        """Relative distance of the measurement above (positive) or below the range; 0 inside; None if not measured."""
        if self.measured is None:
            return None
        nearest = min(max(self.measured, self.expected.low), self.expected.high)
        return self.measured / nearest - 1

    @property
    def side(self) -> str:
        """`inside` the range, or `faster` or `slower`; empty if not measured."""
        if not self.off:
            return "" if self.off is None else "inside"
        return "faster" if (self.off > 0) != (self.expected.of == "time_us") else "slower"


def scores(shown: Results, stages: Iterable[Stage] | None = None) -> list[Scored]:
    """Score every predicted range of the stages, the ladder's first, on a GPU."""
    every = (*registry.STAGES.values(), *registry.OFF_LADDER.values()) if stages is None else stages
    scored = []
    for stage in every:
        for expected in stage.expected:
            problem, over = expected.problem, expected.over or stage.parent or stage.id
            other = problem if expected.over_inputs is None else replace(problem, inputs=expected.over_inputs)
            if expected.of == "ratio":
                mine, base = pair(shown, problem, stage.id, over, other, cache=expected.cache)
                measured = select.speedup(mine, base, cache=expected.cache)
            else:
                mine, _ = pair(shown, problem, stage.id, stage.id, cache=expected.cache)
                value = select.rate if expected.of == "tflops" else select.median_us
                measured = value(mine, cache=expected.cache)
            scored.append(Scored(stage=stage, expected=expected, measured=measured))
    return scored


def pair(
    shown: Results, problem: Problem, name: str, over: str, other: Problem | None = None, *, cache: Cache = "hot"
) -> tuple[Measurement | None, Measurement | None]:
    """The rows of two stages at a problem, the second at `other` if given; (None, None) if no run timed both.

    The rows that pages show, if both are from one session; else those of the newest run that timed both.
    """
    rows = shown.rows(problem)
    by_name = {row.name: row for row in rows if row.samples_of("burst", cache)}
    mine, base = by_name.get(name), by_name.get(over)
    if other in (None, problem) and mine and base and (mine is base or select.parent_of(mine, rows) is base):
        return mine, base

    def timed(name: str, at: Problem) -> dict[str, Measurement]:
        every = (row for row in shown.records if row.name == name and row.problem == at and not row.with_lse)
        return {row.run: row for row in every if row.samples_of("burst", cache)}

    ours, theirs = timed(name, problem), timed(over, other or problem)
    run = max(ours.keys() & theirs.keys(), default="")
    return ours.get(run), theirs.get(run)
