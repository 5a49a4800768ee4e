"""A record's values in one state of the GPU as a flat dict, and the sessions of runs.

Only `select.select` chooses which records of a problem are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from flashlab.core.inputs import TRAINED
from flashlab.core.paths import DATA
from flashlab.core.problem import Cache, Regime
from flashlab.record import schema, store

Item = TypeVar("Item")
Key = TypeVar("Key")
SESSION_GAP = timedelta(hours=6)
"""Maximum time between the beginnings of two consecutive runs of a session."""

_OF_STATE = (
    *("median_us", "worst_layer_us", "tflops", "cv_percent", "samples", "sm_clock_mhz", "call_clock_mhz"),
    *("cycles_per_score", "power_w", "energy_j_per_call"),
)


def state_of(record: schema.Timed, regime: Regime = "burst", cache: Cache = "hot") -> dict[str, Any]:
    """The columns of a record in a state of the GPU; None if it has no time there.

    `median_us`, `worst_layer_us` (of `trained` inputs), `tflops`, `cv_percent`, `samples` (number), `sm_clock_mhz`
    (right after the samples), `call_clock_mhz` (over the calls), `cycles_per_score`, `power_w` and
    `energy_j_per_call`.
    """
    samples, problem = record.samples_of(regime, cache), record.problem
    if samples is None:
        return dict.fromkeys(_OF_STATE) | {"samples": 0}
    values = (
        samples.median_us,
        max(samples.time_us) if problem.inputs == TRAINED else None,
        problem.tflops(samples.median_us),
        samples.cv_percent,
        len(samples.time_us),
        median(samples.sm_clock_mhz) if samples.sm_clock_mhz else None,
        median(samples.call_clock_mhz) if samples.call_clock_mhz else None,
        schema.cycles_per_score(samples, problem, record.gpu.sm_count),
        schema.power_w(samples),
        samples.conditions.energy_j_per_call if samples.conditions else None,
    )
    return dict(zip(_OF_STATE, values, strict=True))


def headline(record: schema.Measurement, regime: Regime = "burst", cache: Cache = "hot") -> dict[str, Any]:
    """One row of `flashlab results`: a record's values in one state of the GPU."""
    problem, names = record.problem, ("name", "kind", "layout", "lse")
    return {
        **{name: getattr(record, name) for name in names},
        **{name: getattr(problem, name) for name in ("shape", "dtype", "mask")},
        **{"features": problem.features_label, "inputs": problem.inputs},
        **{"status": record.status, "reason": record.reason},
        **state_of(record, regime, cache),
        **{"regime": regime, "cache": cache},
        **{"run": record.run, "commit": record.source.commit, "dirty": record.source.dirty},
    }


def sessions(gpu: str, data: Path = DATA) -> dict[str, str]:
    """The session of each run: runs of one commit on one GPU, each begun within `SESSION_GAP` of the one before.

    Measurements that exceed the time limit of a command are split by head dim, element type or stages into several runs
    of a session. A session has the id of its first run.
    """
    runs = {line.record.run: line.record.gpu.fingerprint for line in store.lines(gpu, "runs", data)}
    last: dict[object, tuple[str, datetime]] = {}
    session_of: dict[str, str] = {}
    for run, fingerprint in sorted(runs.items()):
        began = datetime.strptime(run[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        match = re.match(schema.RUN, run)
        assert match, "a record's run is a run id"
        key = match["commit"], match["dirty"], fingerprint
        first, before = last.get(key, (run, began))
        session_of[run] = first if began - before <= SESSION_GAP else run
        last[key] = session_of[run], began
    return session_of


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, in order; keys in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
