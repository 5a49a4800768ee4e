"""Stages in Triton on a CPU, by Triton's interpreter.

It interprets in a process of its own: Triton decides at import whether it compiles or interprets. What happens when two
programs run at once cannot be found here, since programs run one after the other.
"""

from __future__ import annotations

import importlib
import json
import mmap
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashlab.build import triton_code
from flashlab.build.compiler import LaunchShape, Variant
from flashlab.core.errors import EmulationError, UnsupportedError
from flashlab.core.problem import DType
from flashlab.run.emulator import DEFAULT_TIMEOUT_S, Emulated, Memory, Pointer, Report, Status, mapped, run_worker


def interpreted(variant: Variant) -> Emulated:
    """A stage in Triton as its interpreter runs it: nothing is compiled.

    Raises:
        UnsupportedError: bfloat16, or Triton or torch is missing; the message has the command that installs them.
        ParameterError: an unknown tunable.
    """
    stage = variant.stage
    missing = triton_code.missing(interpreter=True)
    if missing:
        raise UnsupportedError(
            f"Stage {stage.id} runs on a CPU by Triton's interpreter, which needs {triton_code.INTERPRETER_NEEDS}. "
            f"There: {missing}"
        )
    if variant.dtype == "bfloat16":
        raise UnsupportedError(
            f"Stage {stage.id} takes float16 on a CPU, got bfloat16: Triton's interpreter multiplies the bits of its "
            "tiles (triton-lang/triton issue 11584). On a GPU it takes both."
        )
    parameters = variant.parameters
    return Emulated(
        name=stage.id,
        entry=stage.entry,
        source=variant.file.resolve(),
        executable=Path(sys.executable),
        hooks=False,
        parameters=parameters,
        argument_sizes=(),
        launch_shape=LaunchShape(threads=32 * parameters["WARPS"], smem_bytes=0, tile_q=parameters["TILE_Q"]),
        compiler=f"Triton {triton_code.version()}, interpreted",
        command="TRITON_INTERPRET=1",
        log="",
        compile_seconds=0.0,
        cached=False,
    )


def interpret(
    kernel: Emulated,
    arguments: Mapping[str, Pointer | int | float],
    *,
    constants: Mapping[str, int],
    dtype: DType,
    grid: Sequence[int],
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    cancel: threading.Event | None = None,
) -> Report:
    """Run a kernel of `interpreted` in a process of its own and bring back what it wrote.

    Raises:
        EmulationError: it failed or took too long. Arrays are left as they were.
        KeyboardInterrupt: Ctrl-C, or `cancel`; the process is gone.
    """
    memory = Memory()
    request = {
        "source": str(kernel.source),
        "entry": kernel.entry,
        "signature": triton_code.signature(dtype),
        "constants": dict(constants),
        "grid": list(grid),
        "arguments": {
            name: memory.place(value, name) if isinstance(value, Pointer) else value
            for name, value in arguments.items()
        },
    }
    start = time.perf_counter()
    with mapped(memory.bytes) as (path, mapping), tempfile.TemporaryDirectory(prefix="flashlab-triton-") as folder:
        memory.copy(mapping, "r")
        command, environment = triton_code.worker(Path(folder), __name__, TRITON_INTERPRET="1")
        asked = json.dumps({**request, "memory": str(path)})
        code, printed, errors = run_worker(command, asked, timeout_s, cancel, environment)
        printed += errors
        seconds = time.perf_counter() - start
        stopped = timeout_s is not None and code < 0 and seconds >= timeout_s
        status: Status = "ok" if code == 0 else "timeout" if stopped else "crash"
        last = printed.strip().rpartition("\n")[2] or f"ended by {signal.Signals(-code).name}" * (code < 0)
        message = {"ok": "", "timeout": f"not done after {timeout_s or 0:g} seconds"}.get(status, last)
        report = Report(status=status, message=message, seconds=seconds, printed=printed)
        if status != "ok":
            raise EmulationError(
                f"{kernel.name} in Triton's interpreter: {message}" + (f"\n{printed}" if status == "crash" else ""),
                report=report,
            )
        memory.copy(mapping, "w")
    return report


def serve(request: Mapping[str, Any]) -> None:
    """Run a kernel in the process of its own. Pointers are offsets in bytes in the file of all arrays."""
    torch = importlib.import_module("torch")
    types = {"*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32}
    with Path(request["memory"]).open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    values = []
    for name, kind in request["signature"].items():
        value = request["arguments"][name]
        if kind in types:
            # All a pointer's tensor is asked for is its type and its address.
            value = memory[value : value + types[kind].itemsize].view(types[kind])
        values.append(value)
    triton_code.kernel_in(request)[tuple(request["grid"])](*values, **request["constants"])
