"""Checks of stages against the oracle on a GPU, in a worker process, with records of the verdicts.

verify/cases.py defines the cases, and verify/on_cpu.py runs them on a CPU.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import ml_dtypes
from pydantic import TypeAdapter

from flashlab.core.errors import DamagedRecordError
from flashlab.core.problem import Problem
from flashlab.kernels import registry as stages
from flashlab.measure import bench, harness
from flashlab.measure.bench import compile_ahead
from flashlab.measure.cells import Cell, GpuWorker, need, refusal, supervise
from flashlab.measure.harness import Book, Message, Send
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.checks import CheckRow, EmulatorVerdict, Fallbacks, Header, case_line, read_lines
from flashlab.record.schema import Verdict, without_home
from flashlab.run import emulator, gpu
from flashlab.run.attention import prepare
from flashlab.verify.cases import (
    FAR_LAYOUTS,
    FLASH_ATTENTION,
    SUITES,
    TENSORS,
    Case,
    Selection,
    chosen_cases,
    laid_out,
    placement,
)
from flashlab.verify.on_cpu import CheckRun, Late, build_all, emulate_beside, emulates
from flashlab.verify.verdict import Guarded, Oracle, check, damage

OPTIONS = Options(timeout_s=120.0, worker=(sys.executable, "-m", "flashlab.measure.check"))
_WAITING_EMULATIONS = 256
"""Maximum number of queued emulator runs, which limits the memory of their arrays."""
_ROW = TypeAdapter(CheckRow)


# --- The parent -------------------------------------------------------------------------------------------------------


def check_stages(
    stage_ids: Sequence[str] | None = None,
    *,
    sources: Mapping[str, Path] | None = None,
    record: bool = True,
    emulate: bool = False,
    options: Options = OPTIONS,
    **selection: Unpack[Selection],
) -> CheckRun:
    """Check stages against the oracle on the GPU, over adversarial lengths, masks, dtypes, layouts and inputs.

    Buffers have NaN guards, outputs are poisoned, inputs are compared afterwards; grouped-query attention and the
    log-sum-exp are always used. With `record`, rows go to data/<gpu>/checks/<run>.jsonl.

    `selection` is that of `cases.chosen_cases`; `inputs` are kinds drawn from a seed, i.e. all but `trained`. Rows of
    `random` cases go to data/<gpu>/random/, those of a `suite` to a folder of its name.

    `emulate` also runs each case on the CPU with the same values, checks the result and compares both.

    With `resume` in the options, a run that the same code began on this GPU is continued in its file.

    Raises:
        FlashlabError: as `bench.run` does.
    """
    named = stages.implementations(stage_ids, sources)
    wanted = chosen_cases(
        {name: implementation.stage for name, implementation in named.items()},
        seed=options.seed,
        on_cpu=False,
        **selection,
    )
    suite = selection.get("suite")
    folder = "random" if selection.get("random") else FLASH_ATTENTION if suite else "checks"
    begun = None
    if record and options.resume:
        begun, wanted = _left(wanted, folder, emulate, options)
        if not wanted:
            options.note("all of it is on record; nothing was checked")
            return CheckRun(None, ())
    with ThreadPoolExecutor(1) as aside:
        built = aside.submit(build_all, named, wanted) if emulate else None
        compile_ahead(named, [(case.launched, case.names) for case in wanted], options.device, aligned=(True, False))
        if built:
            built.result()
    with tempfile.TemporaryDirectory() as nowhere, Book(options.data if record else Path(nowhere), folder) as book:
        book.run = begun or book.run
        cells = [Cell(case.problem, list(case.names), case.layout) for case in wanted]
        rows: list[CheckRow] = []
        of_case, late = dict[int, list[CheckRow]](), Late()

        def take(cell: Cell, name: str, row: Message) -> None:
            whole = {"stage": name, "problem": cell.problem, "layout": cell.layout, "verdict": None, **row}
            rows.append(_ROW.validate_python(whole))
            late.add(rows[-1])
            of_case.setdefault(id(cell), []).append(rows[-1])

        def append(cell: Cell) -> None:
            if id(cell) in of_case:
                _append(book, of_case.pop(id(cell)), options.seed)

        try:
            supervise(cells, book, options, {"emulate": emulate, "suite": suite}, named, take, append, late.why)
        finally:  # what there is of cases that were broken off
            for cell in cells:
                append(cell)
        return CheckRun(book.path if record else None, tuple(rows))


def _left(wanted: list[Case], folder: str, emulate: bool, options: Options) -> tuple[str | None, list[Case]]:
    """The newest run of the current code and seed on this GPU, or None, and the cases that it lacks."""
    here = gpu.info(options.device)
    for path in reversed(store.files(options.data / here.slug / folder)):
        try:
            lines = read_lines(path)
        except DamagedRecordError:  # torn: `flashlab repair` is for it
            continue
        header = lines[0].header if lines else None
        if header is None or header.seed != options.seed or not bench.stands_for(header, here, same_commit=True):
            continue
        done = {
            (line.problem, line.layout, line.stage)
            for line in lines
            if line.status in ("ok", "wrong", "unsupported") and (line.emulator or not emulate)
        }
        lacking = [
            tuple(name for name in case.names if (case.problem, case.layout, name) not in done) for case in wanted
        ]
        return path.stem, [replace(case, names=names) for case, names in zip(wanted, lacking, strict=True) if names]
    return None, wanted


def _append(book: Book, rows: Sequence[CheckRow], seed: int) -> None:
    """Append a case to the run's file, which begins with the common header."""
    lines = [case_line(rows)]
    if not book.path.exists():
        lines.insert(0, Header(**book.header(), seed=seed).line())
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    store.append_lines(book.path, without_home(text))


# --- The worker -------------------------------------------------------------------------------------------------------


class CheckWorker(GpuWorker):
    """Checks stages against the oracle, optionally running the emulator concurrently."""

    def __init__(self, job: Message, send: Send) -> None:
        super().__init__(job, send)
        # Processes, since most of what a run of the emulator costs is Python's; and new ones, since CUDA is not forked.
        self._pool = (
            ProcessPoolExecutor(emulator.cores(), mp_context=multiprocessing.get_context("spawn"))
            if job.get("emulate")
            else None
        )
        self._emulating: dict[Future[EmulatorVerdict], tuple[int, str, Message]] = {}
        """Pending emulator runs: cell, name, and the row to complete."""

    def work(self) -> None:
        """Run the job."""
        self.hold()
        try:
            for cell, problem, names, layout in self.cells():
                assert problem is not None
                self._check(cell, problem, names, layout)
                if layout in FAR_LAYOUTS:
                    self.free()  # gigabytes
            self._collect(most=0)
        finally:
            if self._pool:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, cell: int, problem: Problem, names: list[str], layout: str) -> None:
        self.step(cell, "", "make inputs")
        values = laid_out(tuple(self.for_oracle(x) for x in self.inputs(problem)), layout, self.cupy)
        try:
            inputs = _guarded_inputs(values, layout)
        except Exception as error:  # rows far apart take gigabytes
            self.survive(error)
            for name in names:
                self.row(cell, name, refusal(error))
        else:
            self._check_each(cell, problem, names, layout, values, inputs)
        self._collect(most=_WAITING_EMULATIONS)

    def _check_each(
        self,
        cell: int,
        problem: Problem,
        names: list[str],
        layout: str,
        values: tuple[Any, Any, Any],
        inputs: Sequence[Guarded],
    ) -> None:
        rule = self.job.get("suite")
        judge = partial(SUITES[rule] if rule else check, oracle=Oracle())
        host: tuple[Any, ...] = ()
        for name in names:
            self.step(cell, name, "check")
            implementation = self.implementations[name]
            how: dict[str, Any] = {"layout": layout, "params": implementation.params, "source": implementation.source}
            with self.surviving(cell, name):
                implementation.stage.require(problem, self.info.arch)
                verdict, out, lse, fallbacks = _guarded_run(
                    implementation.id, problem, values, inputs, judge=judge, **how
                )
                row: Message = {"status": "ok", "reason": "", "verdict": verdict, "fallbacks": fallbacks}
                if not verdict.passed:
                    inputs = _guarded_inputs(values, layout)  # it may have written to them
                    row |= {"status": "wrong", "reason": verdict.reason}
                elif self._pool and implementation.id in stages.CUDA_STAGES and emulates(problem, layout):
                    host = host or tuple(self.on_host(x) for x in values)
                    made = self.on_host(out), self.on_host(lse)
                    future = self._pool.submit(
                        emulate_beside, implementation.id, problem, host, *made, threads=1, **how
                    )
                    self._emulating[future] = (cell, name, row)
                    continue
                self.row(cell, name, row)

    def _collect(self, most: int) -> None:
        """Send completed rows, and wait until at most `most` emulator runs are pending."""
        while self._emulating:
            late = len(self._emulating) > most
            if late:
                self.step(*next(iter(self._emulating.values()))[:2], "emulate")
            done, _ = wait(self._emulating, timeout=None if late else 0, return_when=FIRST_COMPLETED)
            for future in done:
                cell, name, row = self._emulating.pop(future)
                try:
                    beside = future.result()
                    reason = beside.reason and f"emulator: {beside.reason}"
                    self.row(cell, name, {**row, "status": beside.status, "reason": reason, "emulator": beside})
                except Exception as error:
                    self.row(cell, name, row | refusal(error))
            if not late:
                return

    def on_host(self, array: Any) -> Any:
        """Copy a CuPy array to NumPy; bfloat16 bits become ml_dtypes.bfloat16."""
        host = array.get()
        return host.view(ml_dtypes.bfloat16) if str(host.dtype) == "uint16" else host


def _guarded_inputs(values: tuple[Any, Any, Any], layout: str) -> list[Guarded]:
    cupy = need("cupy")
    return [Guarded.holding(x, xp=cupy, **placement(x.shape, layout, t)) for x, t in zip(values, TENSORS, strict=False)]


def _guarded_run(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    inputs: Sequence[Guarded],
    *,
    layout: str,
    source: Path | None,
    params: Mapping[str, int] | None = None,
    judge: Callable[..., Verdict] = check,
) -> tuple[Verdict, Any, Any, Fallbacks | None]:
    """Run a case; returns verdict, output, log-sum-exp and fallbacks. `inputs` are `_guarded_inputs` of the values."""
    cupy = need("cupy")
    out_shape = values[0].shape
    out = Guarded(out_shape, problem.dtype, xp=cupy, **placement(out_shape, layout))
    lse = Guarded(out_shape[:3], "float32", xp=cupy)
    views = [_for_kernel(buffer.array, problem) for buffer in (*inputs, out)]
    prepared = prepare(
        *views[:3],
        **problem.options,
        stage=stage_id,
        out=views[3],
        lse=lse.array,
        source=source,
        params=params,
        stream=cupy.cuda.get_current_stream(),
        count_fallbacks=True,
    )
    prepared()
    gpu.synchronize(prepared.plan.device)
    verdict = damage(out, lse, inputs) or judge(
        out.array,
        lse.array,
        *values,
        **problem.options,
        dtype=problem.dtype,
        precision=stages.get(stage_id).precision,
        xp=cupy,
    )
    return verdict, out.array, lse.array, prepared.fallbacks()


def _for_kernel(array: Any, problem: Problem) -> Any:
    """Convert a CuPy array for `attention`: bfloat16 bits become a torch view."""
    if problem.dtype == "float16":
        return array
    torch = need("torch")
    return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)


if __name__ == "__main__":
    sys.exit(harness.serve(lambda job, send: CheckWorker(job, send).work()))
