"""`flashlab packed`: variable-length and paged attention compared with libraries and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, following, say
from flashlab.core.errors import ParameterError
from flashlab.core.paths import DATA


def packed(
    *,
    lengths: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]...", help="equal, uniform, one_long, short; default: all.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dim; default: 64 and 128; repeatable.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="One query per sequence over a paged KV cache.")] = False,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE[,STAGE]...", help="With --decode: ids or ID[NAME=VALUE]; default: all that read pages."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65_535, help="With --decode: number of sequences; default: 4, 16 and 64; repeatable."),
    ] = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Time variable-length attention, packed or decoding over a paged KV cache, against libraries and padding.

    Times go to data/<gpu>/packed/.
    """
    from flashlab.experiments import packed as module
    from flashlab.record import schema, store

    for name, value, fits in (
        ("--stages", stages, decode),
        ("--batch", batch, decode),
        ("--mask", mask, not decode),
        ("--head-dim", head_dim, not decode),
    ):
        if value and not fits:
            raise ParameterError(f"{name}: wanted {'no --decode' if decode else '--decode too'}")
    given: dict[str, Any] = {"distributions": opt.names_in(lengths), "dtypes": [dtype] if dtype else None}
    given |= {
        "stages": opt.stages_in(stages),
        "batches": batch,
        "head_dims": head_dim,
        "masks": [mask] if mask else None,
    }
    with following("measuring") as follow:
        path, missing = module.measure(
            decode=decode,
            **{name: value for name, value in given.items() if value is not None},
            options=replace(module.OPTIONS, data=data, device=device, progress=follow),
        )
    rows = module.shown(store.read(path, schema.PackedRun)[0])
    rate = ("sequences", "stage", "gb_per_s") if decode else ("tflops",)
    answer(rows, ("distribution", "problem", "median_us", *rate, "over"))
    for line in missing:
        say(f"no time: {line}")
    say(f"Recorded in {path}")


COMMANDS = {"packed": packed}
