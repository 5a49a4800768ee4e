"""Commands that read the records: what was measured, and whether the files are sound. They import no compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flashlab.cli.options import Data, Gpu, Inputs, Json, OneDType, OneMask, Shape
from flashlab.cli.output import answer, say, write_json
from flashlab.core.errors import DamagedRecordError, NoDataError, ParameterError
from flashlab.core.inputs import NORMAL
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.record import store
from flashlab.record.store import Cache, Regime

RUN_COLUMNS = {
    "name": lambda row: row["name"] + (", log-sum-exp on" if row["kind"] == "stage" and row["lse"] else ""),
    **{"kind": "kind", "shape": "shape", "dtype": "dtype", "mask": "mask", "inputs": "inputs"},
    **{"median µs": "median_us", "TFLOP/s": "tflops", "CV %": "cv_percent", "samples": "samples"},
    **{"MHz": "call_clock_mhz", "clocks/score": "cycles_per_score", "J/call": "energy_j_per_call"},
    "status": lambda row: row["status"] + (f": {row['reason']}" if row["status"] != "ok" else ""),
}
"""The table of a run's rows."""


def results(
    *,
    gpu: Gpu = None,
    shape: Shape = None,
    dtype: OneDType = None,
    mask: OneMask = None,
    inputs: Inputs = NORMAL,
    regime: Annotated[
        Regime | None, typer.Option(help="burst: short samples with gaps (if not given); sustained: power-limited.")
    ] = None,
    cache: Annotated[
        Cache | None, typer.Option(help="hot: calls back to back (if not given); cold: L2 overwritten before each.")
    ] = None,
    against_peers: Annotated[
        bool,
        typer.Option("--against-peers", help="Our best stage against the best library, both of one run, instead."),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check checksums and every line instead.")] = False,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Show the newest recorded run, or what is left of it after the filters."""
    name = gpu_with_data(gpu, data)
    if verify:
        _verify(name, data, as_json)
        return
    wanted = Problem.parse(shape).shape if shape else None
    kinds = kinds_in(inputs or NORMAL)
    if against_peers and (regime or cache):
        given = " ".join(f"--{key} {value}" for key, value in (("regime", regime), ("cache", cache)) if value)
        raise ParameterError(
            f"--against-peers: wanted no --regime or --cache beside it, got {given}. It shows bursts and sustained "
            "load side by side, with a hot L2; --shape, --dtype, --mask and --inputs go with it"
        )

    def suits(problem: Problem) -> bool:
        return (
            (wanted is None or problem.shape == wanted)
            and (dtype is None or problem.dtype == dtype)
            and (mask is None or problem.mask == mask)
            and problem.inputs in kinds
        )

    if against_peers:
        _against_peers(name, data, suits, kinds, as_json)
        return
    runs = store.runs(name, data)
    fitting = [
        rows for run in reversed(runs) if (rows := [row for row in run.measurements if suits(row.problem.problem())])
    ]
    for run in runs:
        for damage in run.damage:
            say(f"damaged, left out: {damage}")
    if not fitting:
        known = sorted({row.problem.problem().label for run in runs for row in run.measurements})
        what = " ".join(filter(None, (wanted, dtype, mask, inputs)))
        raise NoDataError(f"wanted rows of {what} on {name}, found none. Recorded: {'; '.join(known)}")
    regime, cache = regime or "burst", cache or "hot"
    chosen = _timed_so(fitting, regime, cache) if (regime, cache) != ("burst", "hot") else fitting[0]
    flat = [store.flat(row, regime, cache) for row in chosen]
    answer(flat, RUN_COLUMNS, as_json=as_json, title=f"{name}, run {flat[0]['run']}, {regime}, {cache} L2")


def _timed_so(
    fitting: Sequence[Sequence[store.Measurement]], regime: Regime, cache: Cache
) -> Sequence[store.Measurement]:
    """Of the runs' rows, newest first, the first that has a time in that state."""
    for rows in fitting:
        if any(row.samples_of(regime, cache) for row in rows):
            return rows
    known = {(one.regime, one.cache) for rows in fitting for row in rows for one in row.samples}
    works = "; ".join(f"--regime {one} --cache {other}" for one, other in sorted(known))
    raise NoDataError(
        f"wanted times with --regime {regime} --cache {cache}, found none in these rows. Recorded: {works or 'none'}"
    )


def _against_peers(gpu: str, data: Path, suits: Callable[[Problem], bool], kinds: Sequence[str], as_json: bool) -> None:
    """Our best stage against the best library, a row a problem."""
    from flashlab.query import select

    pairs = [one for one in select.against_peers(gpu, data, kinds) if suits(one.problem)]
    if not pairs:
        raise NoDataError(f"wanted such problems on {', '.join(kinds)} inputs among the records of {gpu}, found none")
    if as_json:
        write_json([one.flat() for one in pairs])
        return
    answer(
        [
            {
                "problem": one.problem.label,
                "stage": one.burst.stage if one.burst else one.reason,
                "stage µs": one.burst.stage_us if one.burst else None,
                "% of peak": one.burst.stage_percent_of_peak if one.burst else None,
                "library": one.burst.peer if one.burst else None,
                "library µs": one.burst.peer_us if one.burst else None,
                "% of its peak": one.burst.peer_percent_of_peak if one.burst else None,
                **dict(zip(_RATIOS, one.ratios, strict=True)),
                "worst layer": one.burst.worst_ratio if one.burst else None,
            }
            for one in pairs
        ],
        (
            *("problem", "stage", "stage µs", "% of peak", "library", "library µs", "% of its peak"),
            *(*_RATIOS, "worst layer"),
        ),
        title=f"{gpu}, newest run {max(one.run for one in pairs)}: the library's median time over the stage's, "
        "on normally distributed inputs of unit scale where a problem names no others",
    )


_RATIOS = (
    *("ratio", "with lse alike", "to fa3 or cuDNN"),
    *("sustained ratio", "with lse alike, sustained", "to fa3 or cuDNN, sustained"),
)


def gpu_with_data(gpu: str | None, data: Path) -> str:
    """The GPU named, else the first with recorded runs.

    Raises:
        NoDataError: it has none.
    """
    known = store.gpus(data)
    if gpu is None and not known:
        raise NoDataError(
            f"wanted recorded runs under {data}, found none. "
            "`flashlab bench` on a machine with an NVIDIA GPU makes some."
        )
    if gpu is None:
        return known[0]
    if gpu not in known:
        raise NoDataError(
            f"gpu: wanted one with recorded runs under {data}, got {gpu!r}. "
            f"GPUs with data: {', '.join(known) or 'none yet'}."
        )
    return gpu


def _verify(gpu: str, data: Path, as_json: bool) -> None:
    damage = store.verify(gpu, data)
    if as_json:
        write_json([{"path": str(one.path), "line": one.line, "reason": one.reason} for one in damage])
        if damage:
            raise typer.Exit(1)
        return
    if damage:
        raise DamagedRecordError(f"data/{gpu}: wanted sound records, found:\n" + "\n".join(f"  {d}" for d in damage))
    runs = store.runs(gpu, data)
    typer.echo(f"data/{gpu} is sound: {sum(len(run.records) for run in runs)} records in {len(runs)} runs")


COMMANDS = {"results": results}
