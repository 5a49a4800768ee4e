"""Commands that run notebooks: the report, and sweeps of cells over GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, live, say
from flashlab.core.errors import NoGpuError, ReportError
from flashlab.core.paths import BUILD, DATA, alone, require_checkout, writable_dir

Plan = Sequence[Mapping[str, Any]]
"""The result of `sweep.planned`."""
Timeout = Annotated[
    float | None,
    typer.Option(min=1, help="Time limit per notebook, in seconds; default: 3600 when measuring, else 900."),
]
COLUMNS = {
    "notebook": "notebook",
    "parameters": lambda row: {name: value for name, value in row["parameters"].items() if name != "source"},
    **{name: name for name in ("gpu", "state", "minutes", "cost", "why")},
}


def report(
    *,
    source: Annotated[str, typer.Option(help="auto, measure or replay; auto measures if there is a GPU.")] = "auto",
    gpu: opt.TheGpu = "",
    stages: opt.Stages = None,
    full: Annotated[
        bool, typer.Option("--full", help="Measure everything that the report shows; default: a quick subset.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Output folder for notebooks and site.", show_default=False)] = BUILD,
    timeout: Timeout = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be run and the estimated time without running it.")
    ] = False,
    data: opt.Tables = DATA,
) -> None:
    """Run every notebook and build the report site; on a machine with an NVIDIA GPU, measure first.

    The sets `quick` and `full` of notebooks/cells.toml list the measurements. An interrupted report resumes.
    """
    from flashlab.show import site

    require_checkout("its notebooks and pages")
    chosen = ",".join(opt.stages_in(stages) or ())
    where = {"data": data.resolve(), "out": out.resolve()}
    planned = site.plan(source=source, gpu=gpu, stages=chosen, full=full, **where)
    if dry_run:
        answer(planned, COLUMNS)
        say(f"{_needed(planned)}\nnothing was run")
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(alone(writable_dir(out, "the report") / "report.lock"))
        except BlockingIOError as error:
            raise ReportError(
                f"wanted {out} for this report alone, got another's: {error}. Another folder works: --out FOLDER"
            ) from error
        say(_needed(planned))
        follow = stack.enter_context(live())
        index = site.run(
            source=source, gpu=gpu, stages=chosen, full=full, timeout_s=timeout, say=say, live=follow, **where
        )
    if as_json():
        answer((), document={"index": str(index)})
    else:
        typer.echo(
            f"The report is in {index.parent}: open {index}. Its search works only when it is served: `make serve`."
        )


def _needed(planned: Plan, gpus: int = 1) -> str:
    """Summarise the remaining cells with estimated time and cost, in one line."""
    left = [cell for cell in planned if cell["state"] != "done"]
    done = [cell for cell in planned if cell["state"] == "done"]
    cost, spent = (sum(cell["cost"] or 0.0 for cell in some) for some in (left, done))
    minutes = max(
        [sum(cell["minutes"] for cell in left) / max(gpus, 1), *(cell["minutes"] for cell in left)], default=0.0
    )
    measured = sum(cell["parameters"].get("source") == "measure" for cell in left)
    text = f"{len(left)} of {len(planned)} cells to run, {measured} of them measure: about {minutes:.0f} min"
    text += f", costing about ${cost:.2f}" if cost else ""
    return text + (f"; spent so far ${spent:.2f}" if spent else "")


def sweep(
    action: Annotated[
        Literal["plan", "run", "status", "resume"],
        typer.Argument(help="plan and status list the cells; run and resume run the unfinished ones."),
    ],
    *,
    file: Annotated[Path | None, typer.Option(help="TOML file of cells; default: notebooks/cells.toml.")] = None,
    cells: Annotated[str, typer.Option("--set", help="Set of cells to run, as named in the file.")] = "full",
    gpu: opt.Gpus = None,
    ray: Annotated[
        str, typer.Option(help="Run through Ray. local: all GPUs of this machine; auto or HOST:PORT: a Ray cluster.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Output folder of the cells.", show_default=False)] = BUILD / "sweep",
    timeout: Timeout = None,
    data: opt.Tables = DATA,
) -> None:
    """Run notebooks on GPUs, cell by cell, skipping finished cells and resuming interrupted ones."""
    from flashlab.record import store, upload
    from flashlab.show import sweep as module

    require_checkout("its notebooks")
    file = (file or module.CELLS).resolve()
    data, out = data.resolve(), out.resolve()
    with contextlib.ExitStack() as stack:
        connected = stack.enter_context(module.with_ray(ray)) if ray else None
        available = module.ray_gpus(connected) if connected else module.gpus_here()
        chosen = module.cells_of(cells, file, available=gpu or tuple(available))
        known = {*available, *store.folders(data)}
        if not chosen or not known.issuperset(gpu or ()):
            raise NoGpuError(
                f"wanted a GPU, got {', '.join(gpu or ()) or 'none here'}. --gpu selects one to plan for, present "
                f"or with records: {', '.join(sorted(known)) or 'none yet'}"
            )
        planned = module.planned(chosen, out, data)
        needed = _needed(planned, sum(available.values()) if connected else 1)
        if action in ("plan", "status"):
            answer(planned, COLUMNS)
            say(needed)
            return
        module.place(chosen, available)
        say(needed)
        with live() as follow:
            ended = module.run(
                chosen, out, data, timeout_s=timeout, ray=connected, available=available, say=say, live=follow
            )
    for name in {cell.gpu for cell in chosen if cell.measures}:
        upload.sync(name, data)
    answer(module.planned(chosen, out, data), COLUMNS)
    if lacking := [f"{cell.label}: {ended[cell.id].why}" for cell in chosen if ended[cell.id].state != "done"]:
        listed = "\n  ".join(lacking)
        raise ReportError(
            f"{len(lacking)} of {len(chosen)} cells are unfinished; `flashlab sweep resume` continues:\n  {listed}"
        )


COMMANDS = {"report": report, "sweep": sweep}
