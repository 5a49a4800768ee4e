"""The command that builds the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, say
from flashlab.core.paths import BUILD, DATA
from flashlab.core.problem import SUITES


def report(
    *,
    source: Annotated[str, typer.Option(help="auto, measure or replay; auto measures where there is a GPU.")] = "auto",
    gpu: Annotated[str, typer.Option(help="Folder under data/ to show; the one at hand if not given.")] = "",
    stages: opt.Stages = None,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for notebooks and site.", show_default=False)] = BUILD,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds for each notebook; an hour when measuring, 5 minutes otherwise, if not given."
        ),
    ] = None,
    data: opt.Data = DATA,
    as_json: opt.Json = False,
) -> None:
    """Run every notebook and build the report site; with an NVIDIA GPU, measure it first."""
    from flashlab.show import site

    index = site.run(
        source=source,
        gpu=gpu,
        stages=",".join(opt.stages_in(stages) or ()),
        suite=suite,
        data=data.resolve(),
        out=out.resolve(),
        timeout_s=timeout,
        progress=say,
    )
    if as_json:
        answer((), as_json=True, document={"index": str(index)})
    else:
        typer.echo(
            f"The report is in {index.parent}: open {index}. Its search works only when it is served: `make serve`."
        )


COMMANDS = {"report": report}
