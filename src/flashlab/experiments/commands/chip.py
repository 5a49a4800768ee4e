"""`flashlab chip`: per-SM throughput and latencies."""

from __future__ import annotations

from statistics import median
from typing import Annotated

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, following, say
from flashlab.core.paths import DATA


def chip(
    cases: Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Cases or groups; default: all.")] = None,
    *,
    launches: Annotated[int, typer.Option(help="Launches per case, on one SM and again on all SMs.", min=1)] = 5,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Measure per-SM throughput and latency on Hopper, in cycles, and append the readings to data/<gpu>/chip/."""
    from flashlab.experiments import chip as module
    from flashlab.measure.options import Options
    from flashlab.record import schema, store

    with following("measuring") as follow:
        options = Options(data=data, device=device, progress=follow)
        path = module.measure(cases or None, launches=launches, options=options)
    assert path is not None, "only a resumed run has no path"
    readings, _ = store.read(path, schema.ChipReading)
    answer(
        [reading.model_dump(mode="json") for reading in readings],
        {
            **{"case": "name", "unit": "unit", "one SM": "value"},
            "all SMs": lambda row: median(row["all_sms"]),
            "beside": lambda row: median(row["beside"]) if row["beside"] else None,
        },
    )
    if not as_json():
        say(f"Recorded in {path}")


COMMANDS = {"chip": chip}
