"""The explorer's data: every time on record as one column-oriented JSON table, for site/assets/explorer.js."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashlab.core.inputs import KINDS, NORMAL
from flashlab.core.paths import DATA
from flashlab.core.problem import Cache, Regime, suite
from flashlab.kernels import registry
from flashlab.query import select
from flashlab.query.rows import sessions, state_of
from flashlab.query.select import Policy, Results
from flashlab.record import store
from flashlab.record.schema import Measurement, Timed

FILE = "explorer.json"
EVERY_KIND = Policy(inputs=tuple(KINDS))
"""The policy by which pages choose rows, for each kind of inputs."""
_OF_LENGTHS = frozenset(suite("lengths"))
_WORDS = ("gpu", "run", "kind", "name", "shape", "dtype", "mask", "inputs", "state")
"""Columns with few values, encoded as a list of values and one index per row."""


def states(record: Timed) -> dict[tuple[Regime, Cache], None]:
    """The states in which a record has a time."""
    return dict.fromkeys((sample.regime, sample.cache) for sample in record.settled)


def lines(gpu: str, data: Path = DATA) -> list[dict[str, Any]]:
    """Every time of every stage and library on a GPU, one line per state, oldest first.

    The columns: `gpu`, `run`, `line` (of the run's file), `kind`, `name`, `shape`, `tokens` (whether the shape is one
    of a constant number of tokens, as in the suite `lengths`), `length` (keys), `head_dim`, `dtype`, `mask`, `inputs`,
    `lse` (whether the log-sum-exp was written), `state`, `us` (median), `tflops`, `clock` (MHz inside the calls),
    `peak` (percent of the tensor cores' peak at that clock), `samples`, and `shown` (1 if pages show it).
    """
    shown = {
        (select.origin(row, *state)[0], row.name, row.problem, *state)
        for row in select.select(store.records(gpu, Measurement, data), sessions(gpu, data), EVERY_KIND)
        for state in states(row)
    }
    times = []
    for line in store.lines(gpu, "runs", data):
        record = line.record
        if not isinstance(record, Measurement):
            continue
        problem, of_peak = record.problem, registry.peak_factor(record.name)
        alike = replace(problem, inputs=NORMAL)
        for state in states(record):
            values = state_of(record, *state)
            times.append(
                {
                    **{"gpu": record.gpu.slug, "run": record.run, "line": line.number},
                    **{"kind": record.kind, "name": record.name},
                    **{name: getattr(problem, name) for name in ("shape", "dtype", "mask")},
                    "tokens": int(alike in _OF_LENGTHS),
                    "length": problem.kv_len,
                    "head_dim": problem.head_dim,
                    "inputs": problem.inputs,
                    "lse": int(bool(record.lse)),
                    "state": select.STATES[state],
                    "us": values["median_us"],
                    "tflops": values["tflops"],
                    "clock": values["call_clock_mhz"],
                    "peak": record.gpu.tensor_percent(values["tflops"] / of_peak, values["call_clock_mhz"]),
                    "samples": values["samples"],
                    "shown": int(not record.with_lse and (record.run, record.name, problem, *state) in shown),
                }
            )
    return times


def text(everything: Iterable[Results], data: Path = DATA) -> str:
    """The file's text: `words` and `numbers`, each a mapping of a column's name to its content, and `titles`."""
    every = [line for shown in everything for line in lines(shown.gpu, data)]
    words = {}
    for name in _WORDS:
        values = {value: index for index, value in enumerate(dict.fromkeys(line[name] for line in every))}
        words[name] = {"values": list(values), "rows": [values[line[name]] for line in every]}
    others = [name for name in (every[0] if every else ()) if name not in _WORDS]
    numbers = {name: [_short(line[name]) for line in every] for name in others}
    return json.dumps({"words": words, "numbers": numbers}, separators=(",", ":"))


def _short(value: float | None) -> float | int | None:
    """Rounded to five digits, more than the precision of any time here."""
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")
