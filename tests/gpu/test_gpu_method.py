"""Every timer that is installed reads a small problem on the GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flashlab.experiments import timers
from flashlab.record import schema, store


def test_timers_read_a_small_problem(quiet: None, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("cupy") is None:
        pytest.skip("needs torch and CuPy: `pip install 'flashlab[gpu]'`")
    path, missing = timers.measure(
        ["05_wmma"],
        ["sdpa"],
        ["1x2x256x64"],
        samples=4,
        rounds=1,
        sustained_s=0.0,
        limit_s=120,
        options=replace(timers.OPTIONS, data=tmp_path),
    )
    readings = store.read(path, schema.Reading)[0]
    wanted = {timer for timer in timers.TIMERS if not any(timer in reason for reason in missing)}
    assert {one.timer for one in readings} == wanted
    assert {"events", "torch-profiler"} <= wanted
    for timer in wanted:
        states = {(one.name, one.inputs, one.samples.cache) for one in readings if one.timer == timer}
        assert len(states) == 8
    kernel = {one.name: one for one in readings if one.timer == "torch-profiler" and one.samples.cache == "hot"}
    events = {one.name: one for one in readings if one.timer == "events" and one.samples.cache == "hot"}
    for name in kernel:
        # The kernel alone is no longer than the call that the events saw, and most of it.
        assert 0.3 < kernel[name].samples.median_us / events[name].samples.median_us < 1.1
