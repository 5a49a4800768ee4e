"""Mistakes in stages that the check by default must find, on the CPU and without looking for races."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial

import pytest
from ahead import ahead, chosen
from shared import NO_COMPILER, source_file
from wrong.cuda import MISTAKES, Mistake

from flashlab.kernels import registry
from flashlab.verify import cases, on_cpu

HEAD_DIM = 64
"""One is enough, and half the time."""
FIRST = {mistake.stage: mistake.label for mistake in reversed(MISTAKES)}
"""Of each stage the first, which `make test` looks for."""


def _which(mistake: Mistake) -> dict[str, tuple[str, ...] | tuple[int, ...]]:
    return {"dtypes": (mistake.dtype,), "masks": (mistake.mask,), "head_dims": (HEAD_DIM,)}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[on_cpu.CheckRun]]]:
    """What the check said of each."""
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)

    def run(mistake: Mistake) -> on_cpu.CheckRun:
        source = source_file(f"{mistake.label}.cu", mistake.source())
        return on_cpu.check_on_cpu([], sources={mistake.stage: source}, **_which(mistake))  # type: ignore[arg-type]

    mistakes = [one["mistake"] for one in chosen(request, "test_the_check_finds_it")]
    with ahead({mistake.label: partial(run, mistake) for mistake in mistakes}) as results:
        yield results


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.label, marks=() if one.label in FIRST.values() else pytest.mark.exhaustive)
        for one in MISTAKES
    ],
)
def test_the_check_finds_it(mistake: Mistake, found: Mapping[str, Future[on_cpu.CheckRun]]) -> None:
    run = found[mistake.label].result()
    assert run.failures, f"{len(run.rows)} passed"
    assert {row.status for row in run.failures} <= {"wrong", "crashed", "timeout"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.label)
def test_those_cases_are_among_the_default(mistake: Mistake) -> None:
    able = {mistake.stage: registry.get(mistake.stage)}
    assert set(cases.only(cases.default_cases_on_cpu(able), **_which(mistake))) <= set(  # type: ignore[arg-type]
        cases.default_cases_on_cpu(able)
    )
