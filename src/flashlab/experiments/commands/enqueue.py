"""`flashlab enqueue`: what a call costs the host."""

from __future__ import annotations

from dataclasses import replace

from flashlab.cli import options as opt
from flashlab.cli.output import answer, following, say
from flashlab.core.paths import DATA


def enqueue(*, device: opt.Device = 0, data: opt.Data = DATA) -> None:
    """Time what a call costs the host: the functions, the torch operators, SDPA and a bare launch.

    Microseconds per call go to data/<gpu>/calls/. Waits for no kernel.
    """
    from flashlab.experiments import enqueue as module
    from flashlab.record import schema, store

    with following("measuring") as follow:
        options = replace(module.OPTIONS, data=data, device=device, progress=follow)
        path, missing = module.measure(options=options)
    rows = module.shown(store.read(path, schema.Call)[0])
    fields = ("problem", "name", "time_us", "beyond_us")
    answer([{name: row[name] for name in fields} for row in rows], fields)
    for line in missing:
        say(f"no time: {line}")
    say(f"Recorded in {path}")


COMMANDS = {"enqueue": enqueue}
