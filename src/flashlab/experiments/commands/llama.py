"""`flashlab llama`: a whole model with each attention implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, following, say
from flashlab.core.paths import DATA


def llama(
    *,
    attention: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]...", help="flashlab, sdpa, nothing, or libraries; default: all."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; repeatable.", min=1)] = None,
    prompt: Annotated[int | None, typer.Option(help="Prompt length, in tokens.", min=1)] = None,
    new: Annotated[int | None, typer.Option(help="Number of tokens to decode.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats per configuration.", min=1)] = None,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Time prefill and decoding of a LLaMA-7B with random weights in transformers, with each attention.

    Tokens per second go to data/<gpu>/models/. Needs transformers and a GPU with 32 GB.
    """
    from flashlab.experiments import llama as module
    from flashlab.record import schema, store

    given: dict[str, Any] = {"attentions": opt.names_in(attention), "batches": batch}
    given |= {"prompt": prompt, "new": new, "repeats": repeats}
    with following("measuring") as follow:
        path, missing = module.measure(
            **{name: value for name, value in given.items() if value is not None},
            options=replace(module.OPTIONS, data=data, device=device, progress=follow),
        )
    columns = ("phase", "batch", "attention", "tokens_per_s", "attention_share", "usd_per_million", "logit_error")
    rows = [
        {name: getattr(row["record"], name) for name in ("phase", "batch", "attention", "logit_error", "time_s")}
        | {name: row[name] for name in ("tokens_per_s", "attention_share", "usd_per_million")}
        for row in module.shown(store.read(path, schema.ModelRun)[0])
    ]
    answer(rows, columns)
    for line in missing:
        say(f"no time: {line}")
    say(f"Recorded in {path}")


COMMANDS = {"llama": llama}
