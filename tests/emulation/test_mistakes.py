"""Mistakes in stages that the check by default must find, on the CPU and without looking for races."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial

import pytest
from ahead import ahead
from wrong.cuda import MISTAKES, Mistake

from flashlab import checks, emulator, stages
from flashlab.errors import MissingPackageError

HEAD_DIM = 64
"""One is enough, and half the time."""


def _which(mistake: Mistake) -> dict[str, tuple[str, ...] | tuple[int, ...]]:
    return {"dtypes": (mistake.dtype,), "masks": (mistake.mask,), "head_dims": (HEAD_DIM,)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[checks.CheckRun]]]:
    """What the check said of each."""
    try:
        emulator.cxx()
    except MissingPackageError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("mistakes")

    def run(mistake: Mistake) -> checks.CheckRun:
        source = folder / f"{mistake.label}.cu"
        source.write_text(mistake.source(), encoding="utf-8")
        return checks.check_on_cpu([], sources={mistake.stage: source}, **_which(mistake))  # type: ignore[arg-type]

    with ahead({mistake.label: partial(run, mistake) for mistake in MISTAKES}) as results:
        yield results


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.label)
def test_the_check_finds_it(mistake: Mistake, found: Mapping[str, Future[checks.CheckRun]]) -> None:
    run = found[mistake.label].result()
    assert run.failures, f"{len(run.rows)} passed"
    assert {row.status for row in run.failures} <= {"wrong", "crashed", "timeout"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.label)
def test_those_cases_are_among_the_default(mistake: Mistake) -> None:
    able = {mistake.stage: stages.get(mistake.stage)}
    everything = {"dtypes": checks.DTYPES, "masks": checks.MASKS, "head_dims": None}
    assert set(checks.default_cases_on_cpu(able, **_which(mistake))) <= set(
        checks.default_cases_on_cpu(able, **everything)
    )
