"""`flashlab method`: our timer compared with CUPTI and NVBench."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, say
from flashlab.core.paths import DATA


def method(
    *,
    stages: opt.Stages = None,
    peers: opt.Peers = None,
    shape: opt.Shapes = None,
    samples: Annotated[int, typer.Option(help="Samples per implementation with CUDA events.", min=4)] = 20,
    rounds: Annotated[int, typer.Option(help="Number of NVBench measurements.", min=1)] = 4,
    sustained: Annotated[float, typer.Option(help="Seconds of continuous calls; 0 for none.", min=0)] = 1.5,
    seconds: Annotated[
        float, typer.Option(help="Total time limit, in seconds; what does not fit is skipped.", min=1)
    ] = 90,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Time the same kernels with CUDA events, CUPTI and NVBench, with a hot and a cold L2, on random data and zeros.

    The readings go to data/<gpu>/readings/. The first shape is also timed under sustained load. The command names each
    timer that is not installed, and how to install it.
    """
    from flashlab.experiments import timer_tables, timers
    from flashlab.record import schema, store

    opt.settling(sustained)
    path, missing = timers.measure(
        opt.stages_in(stages),
        opt.names_in(peers),
        shape,
        samples=samples,
        rounds=rounds,
        sustained_s=sustained,
        limit_s=seconds,
        options=replace(timers.OPTIONS, data=data, device=device, note=say),
    )
    rows = [
        {
            "name": comparison.ours.name,
            "shape": comparison.ours.problem.shape,
            "inputs": comparison.ours.inputs,
            "cache": comparison.ours.samples.cache,
            "timer": comparison.other.timer,
            "events_us": comparison.ours.samples.median_us,
            "other_us": comparison.other.samples.median_us,
            "ratio": comparison.ratio,
            "agrees": comparison.agrees,
            "why": comparison.why,
        }
        for comparison in timer_tables.comparisons(timer_tables.pools(store.read(path, schema.Reading)[0]))
    ]
    answer(
        rows,
        {
            **{"name": "name", "shape": "shape", "inputs": "inputs", "L2": "cache", "timer": "timer"},
            **{
                "events µs": "events_us",
                "other µs": "other_us",
                "other / events": lambda row: timer_tables.with_interval(row["ratio"]),
            },
            "difference": lambda row: row["why"] or "agrees",
        },
        document={"path": str(path), "missing": missing, "comparisons": rows},
    )
    for line in missing:
        say(f"no reading: {line}")
    say(f"Recorded in {path}")


COMMANDS = {"method": method}
