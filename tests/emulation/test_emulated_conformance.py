"""Single features on the CPU emulation, against NumPy where it knows the answer; tests/gpu runs the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ahead import ahead
from emulation import kernel_file
from shared import NO_COMPILER

from flashlab.core.paths import ROOT
from flashlab.run import emulator
from flashlab.run.emulator import Emulated

FILES = sorted((ROOT / "tests/emulation/conformance").glob("*.cu"))


@pytest.fixture(scope="module")
def builds() -> Iterator[Mapping[str, Future[Emulated]]]:
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)
    with ahead({path.stem: partial(emulator.build_file, path, entry=path.stem) for path in FILES}) as found:
        yield found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_and_is_right(path: Path, builds: Mapping[str, Future[Emulated]]) -> None:
    file = kernel_file.read(path)
    report, arrays = kernel_file.emulate(file, builds[path.stem].result())
    assert report.status == "ok", report.message
    assert not kernel_file.difference(file, arrays, file.expected())
    again, repeated = kernel_file.emulate(file, builds[path.stem].result(), "seeded:3")
    assert again.status == "ok", again.message
    assert not kernel_file.difference(file, repeated, arrays), "the schedule must not matter"


def test_comparing_tells_apart() -> None:
    path = next(path for path in FILES if path.stem == "exponentials")
    file = kernel_file.read(path)
    wanted = {"out": np.full((3, 65536), 1.5, dtype=np.float32)}
    near = {"out": np.nextafter(np.nextafter(wanted["out"], 2), 2)}
    assert not kernel_file.difference(file, near, wanted)
    assert "3 of" not in kernel_file.difference(file, near, wanted)
    far = {"out": np.nextafter(near["out"], np.float32(2))}
    assert "196608 of 196608 elements differ" in kernel_file.difference(file, far, wanted)
    assert kernel_file.difference(file, {"out": wanted["out"] * np.nan}, wanted)
