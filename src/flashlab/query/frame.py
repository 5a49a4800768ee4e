"""All records of a GPU as one table, read once a process: a row a record line.

A row of `runs` is one stage or library on one problem in one run. What is shown of a problem is chosen from it by
`select.select`, and from there alone. Times are of bursts with a hot L2 unless the column names another state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import pandas as pd

from flashlab.core.inputs import TRAINED
from flashlab.core.paths import DATA, signature
from flashlab.core.problem import Cache, Regime
from flashlab.record import schema, store

Item = TypeVar("Item")
Key = TypeVar("Key")
SESSION_GAP = timedelta(hours=6)
"""Between the starts of two runs of one session, at most."""

_OF_STATE = (
    *("median_us", "worst_layer_us", "tflops", "cv_percent", "samples", "sm_clock_mhz", "call_clock_mhz"),
    *("cycles_per_score", "power_w", "energy_j_per_call"),
)
RESULT = (
    *("name", "kind", "layout", "lse", "shape", "dtype", "mask", "features", "inputs", "status", "reason"),
    *(*_OF_STATE, "regime", "cache", "run", "commit", "dirty"),
)
"""The columns of `flashlab results`: see `headline`."""
_CACHE: dict[Path, tuple[tuple[Any, ...], pd.DataFrame]] = {}


def frame(gpu: str, data: Path = DATA, folder: str = "runs") -> pd.DataFrame:
    """Every sound record of a kind on a GPU, oldest file first, one row a line; without rows where there is none.

    Read again only where a file's content changed. The frame belongs to everybody: derive from it, never change it.

    Columns of every kind: `run`, `session`, `kind`, `name` (stage id or library), `record` (the record itself), `line`
    and `place` (`nvidia-h200/runs/….jsonl:12`, relative to `data`); but for profiles `commit`, `dirty`, `gpu` and
    `fingerprint`.

    Of what ran on a problem: `problem`, and of its fields `shape`, `dtype`, `mask`, `inputs` and `features` (a
    window and a soft cap, in words, empty where there are none); `layout`, `lse`, `second` (a stage's row with the
    log-sum-exp on, beside its own), `status`, `reason` and the columns of `state_of`. None or NaN where there is none.

    Of ceilings: `value`.
    """
    where = data / gpu / folder
    paths = store.files(where)
    content = tuple((path.name, *signature(path)) for path in paths)
    known = _CACHE.get(where)
    if known is None or known[0] != content:
        lines = store.lines(gpu, folder, data)
        session = sessions({line.record.run: line.record.gpu for line in lines})
        rows = [
            {
                **_described(line.record),
                **(state_of(line.record) if isinstance(line.record, schema.Timed) else {}),
                "session": session[line.record.run],
                "line": line.number,
                "place": f"{line.path.relative_to(data).as_posix()}:{line.number}",
            }
            for line in lines
        ]
        _CACHE[where] = known = (content, pd.DataFrame(rows))
    return known[1]


def _described(record: Any) -> dict[str, Any]:
    """The columns of a record that are no times: see `frame`."""
    name = getattr(record, "name", None) or getattr(record, "stage", "")
    row = {"run": record.run, "kind": getattr(record, "kind", ""), "name": name, "record": record}
    if not isinstance(record, schema.StageProfile):
        row |= {"commit": record.source.commit, "dirty": record.source.dirty}
        row |= {"gpu": record.gpu.slug, "fingerprint": record.gpu.fingerprint}
    if isinstance(record, schema.Ceiling):
        row["value"] = record.value
    if problem := getattr(record, "problem", None):
        row |= {name: getattr(problem, name) for name in ("shape", "dtype", "mask", "inputs")}
        row |= {"problem": problem, "features": problem.features_label}
    if isinstance(record, schema.Timed):
        row |= {"status": record.status, "reason": record.reason}
    if isinstance(record, schema.Measurement):
        row |= {"layout": record.layout, "lse": record.lse, "second": record.with_lse}
    return row


def state_of(record: schema.Timed, regime: Regime = "burst", cache: Cache = "hot") -> dict[str, Any]:
    """The columns that a record has in every state of the GPU, None where it has no time there.

    `median_us`, `worst_layer_us` (of `trained` inputs), `tflops`, `cv_percent`, `samples` (how many), `sm_clock_mhz`
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
    """One row of `flashlab results`: what a record says in one state of the GPU, in the columns of `RESULT`."""
    row = _described(record) | state_of(record, regime, cache) | {"regime": regime, "cache": cache}
    return {column: row[column] for column in RESULT}


def sessions(runs: Mapping[str, Any]) -> dict[str, str]:
    """The session of each run: the runs of one commit on one GPU, each begun within `SESSION_GAP` of the one before.

    A measurement that takes longer than one command allows is split by head dim, element type or stages, and belongs
    together all the same. A session has the id of its first run.

    Args:
        runs: the GPU that each run, by id, was made on.
    """
    last: dict[object, tuple[str, datetime]] = {}
    session_of: dict[str, str] = {}
    for run, gpu in sorted(runs.items()):
        try:
            began = datetime.strptime(run[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:  # a file that somebody named
            session_of[run] = run
            continue
        match = re.match(schema.RUN, run)
        key = (match["commit"], match["dirty"], getattr(gpu, "fingerprint", "")) if match else run
        first, before = last.get(key, (run, began))
        session_of[run] = first if began - before <= SESSION_GAP else run
        last[key] = session_of[run], began
    return session_of


def measured(rows: pd.DataFrame) -> list[schema.Measurement]:
    """The records of stages and libraries in a frame, in its order."""
    return [record for record in rows.get("record", ()) if isinstance(record, schema.Measurement)]


def of_problem(rows: pd.DataFrame, problem: object) -> pd.DataFrame:
    """The rows of one problem; none where the frame is empty."""
    return rows[[one == problem for one in rows["problem"]]] if len(rows) else rows


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, in their order; the keys in that of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
