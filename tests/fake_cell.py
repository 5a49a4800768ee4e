"""What made-up notebooks of test_sweep.py do: measure four rows with a made-up worker, and come to harm meanwhile."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flashlab.core.problem import Problem
from flashlab.measure import bench
from flashlab.measure.cells import refusal
from flashlab.measure.options import BURSTS, Options
from flashlab.record import store
from flashlab.record.schema import Measurement
from flashlab.show.notebook import Outcome

SLUG = "test-gpu"
NAMES = ("00_naive", "sdpa")
GPU = {
    "slug": SLUG, "name": "Test GPU", "compute_capability": [9, 0], "sm_count": 4, "max_sm_clock_mhz": 1000.0,
    "memory_bytes": 1 << 30, "l2_bytes": 1 << 20, "power_limit_w": None, "driver": "1",
}  # fmt: skip


def run(name: str, shape: str, harm: str, out: str, data: str, pause_s: float = 0.0) -> None:
    """Measure what is not on record; harm comes after the first row, where the folder of harm has such a file."""
    problems = [Problem.parse(shape, mask=mask) for mask in ("full", "causal")]
    known = {(row.problem, row.name) for row in store.measurements(SLUG, Path(data)) if row.status == "ok"}
    todo = [(problem, one) for problem in problems for one in NAMES if (problem, one) not in known]
    device = str(Path(data).resolve()) + os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpu = {**GPU, "fingerprint": hashlib.sha256(device.encode()).hexdigest()[:12]}
    for number, (problem, one) in enumerate(todo, start=1):
        said = {"done": number, "total": len(todo), "left_s": 60.0, "text": problem.label}
        (Path(out) / "progress.json").write_text(json.dumps(said), encoding="utf-8")
        plan: dict[str, Any] = {"log": os.devnull}
        if number == 2 and (cause := Path(data).parent / f"harm-{harm}").is_file():
            times = int(cause.read_text() or 1)
            cause.write_text(str(times - 1)) if times > 1 else cause.unlink()
            come_to(harm, plan)
        worker = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), json.dumps(gpu), json.dumps(plan)]
        named = bench.implementations_of([], [] if one == "sdpa" else [one], ["sdpa"] if one == "sdpa" else [])
        options = Options(data=Path(data), worker=worker)
        bench.measure(Measurement, named, [(problem, [one])], plan=BURSTS, options=options)
        time.sleep(pause_s)
    runs = sorted({row.run for row in store.measurements(SLUG, Path(data)) if row.problem in problems})
    outcome = Outcome(
        notebook=name, source="measure", gpu=SLUG, commit="0" * 7, dirty=True, runs=tuple(runs), numbers={}
    )
    (Path(out) / f"{name}.json").write_text(outcome.model_dump_json(), encoding="utf-8")


def come_to(harm: str, plan: dict[str, Any]) -> None:
    """What goes wrong."""
    if harm == "error":
        raise ZeroDivisionError("made up")
    if harm == "kernel":
        os.kill(os.getpid(), signal.SIGKILL)
    if harm == "papermill":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if harm == "hang":
        time.sleep(600)
    if harm == "illegal":  # what a worker says of an illegal address: its CUDA context is gone
        plan["00_naive"] = plan["sdpa"] = "fatal"
    if harm == "memory":  # what a worker says of what does not fit into the GPU's memory
        error = refusal(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"))
        plan["refused"] = dict.fromkeys(NAMES, tuple(error.values()))
    if harm == "lost":  # no GPU answers any more
        plan["start"] = "exit"
    if harm == "disk":
        store.append = half_of  # type: ignore[assignment]


def half_of(path: Path, record: Any) -> None:
    """As `store.append` on a disk that is full after half of the line."""
    with path.open("ab") as file:
        file.write(record.model_dump_json()[:200].encode())
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
