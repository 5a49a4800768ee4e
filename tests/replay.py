"""Cells of notebooks, run by IPython in forks of one process: without a kernel, and with imports and records shared.

Reads jobs from standard input, `[{"notebook": path, "out": folder, "parameters": {…}}, …]`. A notebook leaves its
result file in the folder, as always, what it showed in `NAME.txt`, and what went wrong, if anything did, in `NAME.err`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from flashlab.core.paths import DATA
from flashlab.experiments import ablation, chip, cycle_tables, effects, ledger, timer_tables  # noqa: F401
from flashlab.record import store
from flashlab.show import charts, machine_code, trial, tuning  # noqa: F401


def run(notebook: Path, out: Path, parameters: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{notebook.stem}.json").unlink(missing_ok=True)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    with capture_output() as shown:
        for cell in nbformat.read(notebook, as_version=4).cells:  # type: ignore[no-untyped-call]
            if cell.cell_type == "code":
                shell.run_cell(cell.source).raise_error()
                if "parameters" in cell.metadata.get("tags", []):
                    shell.user_ns.update(parameters, out=str(out))
    text = shown.stdout + "".join(f"\n{value}" for one in shown.outputs for value in one.data.values())
    (out / f"{notebook.stem}.txt").write_text(text, encoding="utf-8")


def forked(notebook: Path, out: Path, parameters: Mapping[str, str]) -> int:
    """The id of the process that runs it."""
    child = os.fork()
    if child == 0:
        try:
            run(notebook, out, parameters)
        except BaseException:
            (out / f"{notebook.stem}.err").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(0)
    return child


def main(jobs: Sequence[Mapping[str, Any]], at_once: int = 2) -> None:
    for slug in store.gpus(DATA):
        store.lines(slug, "runs", DATA)
    running: set[int] = set()
    for job in jobs:
        if len(running) == at_once:
            running.remove(os.wait()[0])
        running.add(forked(Path(job["notebook"]), Path(job["out"]), job["parameters"]))
    while running:
        running.remove(os.wait()[0])


if __name__ == "__main__":
    main(json.load(sys.stdin))
