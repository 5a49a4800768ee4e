"""`flashlab packed`: sequences of different lengths, packed, beside libraries and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, following, say
from flashlab.core.paths import DATA


def packed(
    *,
    lengths: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]...", help="equal, uniform, one_long, short; all if not given.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated; 64 and 128 if not given.")] = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    device: opt.Device = 0,
    data: opt.Data = DATA,
    as_json: opt.Json = False,
) -> None:
    """Time packed sequences of different lengths beside the libraries that take them, and beside padding.

    Times go to data/<gpu>/packed/.
    """
    from flashlab.experiments import packed as module
    from flashlab.record import schema, store

    given: dict[str, Any] = {"distributions": opt.names_in(lengths), "head_dims": head_dim}
    given |= {"dtypes": [dtype] if dtype else None, "masks": [mask] if mask else None}
    with following("measuring") as follow:
        path, missing = module.measure(
            **{name: value for name, value in given.items() if value},
            options=replace(module.OPTIONS, data=data, device=device, progress=follow),
        )
    rows = module.shown(store.read(path, schema.PackedRun)[0])
    answer(rows, ("distribution", "problem", "median_us", "tflops", "over"), as_json=as_json)
    for line in missing:
        say(f"no time: {line}")
    say(f"Recorded in {path}")


COMMANDS = {"packed": packed}
