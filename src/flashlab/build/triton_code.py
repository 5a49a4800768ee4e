"""Compilation of Triton stages to machine code, on any machine.

Triton compiles for a named architecture without a GPU; flashlab loads, launches, disassembles and times the result like
any other cubin. Compilation runs in a separate process, because Triton reads its settings from the environment at
import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashlab.core.environment import environment
from flashlab.core.problem import DType

_STRIDES = tuple(f"{tensor}_{step}" for tensor in "QKVO" for step in ("batch", "head", "row"))
ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys("QKVO", "*element"),
    "LSE": "*fp32",
    **dict.fromkeys(_STRIDES, "i64"),
    **dict.fromkeys(("q_heads", "kv_heads", "q_len", "kv_len", "wants_lse"), "i32"),
    "scale_log2": "fp32",
}
"""Parameters of a kernel in order, with Triton's names of their types; constants follow."""
CONSTANTS = ("HEAD_DIM", "CAUSAL", "TILE_Q", "TILE_KV")
"""Compile-time constants of a kernel. The tunables WARPS, PIPELINE_STAGES and MAX_REGISTERS are Triton's num_warps,
num_stages and maxnreg."""
HIDDEN_POINTERS = 4
"""Maximum number of pointers that Triton may append to the parameters, for its own memory; passed as null."""
_LIMIT_S = 600.0
"""A kernel takes seconds."""
_WARP = 32
_POINTER_BYTES = 16
_STRIDE_ELEMENTS = 8
"""Alignment of Q, K, V and O if ALIGNED=1: addresses in bytes, strides in elements."""
_ELEMENTS: Mapping[DType, str] = {"float16": "fp16", "bfloat16": "bf16"}
_ELSEWHERE = "import importlib, json, sys; importlib.import_module(sys.argv[1]).serve(json.load(sys.stdin))"
_OLDEST_INTERPRETER = (3, 9)
"""The interpreter of 3.6 does not run with NumPy 2.4; versions in between are untested."""
INTERPRETER_NEEDS = (
    f"torch and Triton {'.'.join(map(str, _OLDEST_INTERPRETER))} or newer, in an environment of its own: the torch "
    "that constraints.txt pins brings an older Triton"
)


def missing(*, interpreter: bool = False) -> str | None:
    """The command that installs Triton's compiler, or interpreter; None if it is available."""
    installed = _is_there("triton")
    if not interpreter:
        return None if installed else "pip install triton"
    oldest = ".".join(map(str, _OLDEST_INTERPRETER))
    new_enough = installed and tuple(int(part) for part in version().split(".")[:2]) >= _OLDEST_INTERPRETER
    if new_enough and _is_there("torch"):
        return None
    # torch pins its Triton: asked for both at once, pip goes back to a torch of years ago that pins none.
    newer = f"pip install --no-deps 'triton>={oldest}'"
    return newer if _is_there("torch") else f"pip install torch && {newer}"


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def version() -> str:
    """Version of the installed Triton."""
    return importlib.metadata.version("triton")


def signature(dtype: DType) -> dict[str, str]:
    """Types of `ARGUMENTS` for a data type, as named by Triton."""
    return {name: kind.replace("element", _ELEMENTS[dtype]) for name, kind in ARGUMENTS.items()}


def compile_kernel(
    source: Path,
    *,
    entry: str,
    dtype: DType,
    constants: Mapping[str, int],
    options: Mapping[str, int],
    capability: tuple[int, int],
    aligned: bool,
) -> tuple[bytes | None, str, dict[str, int]]:
    """Compile a kernel for an architecture. Needs Triton, but no GPU.

    Args:
        options: options of Triton, such as num_warps.

    Returns:
        The cubin, or None on error; the log of ptxas, or the error; `threads` and `smem_bytes`.
    """
    divisibility = dict.fromkeys("QKVO", _POINTER_BYTES) | dict.fromkeys(_STRIDES, _STRIDE_ELEMENTS)
    request = {
        "source": str(source),
        "entry": entry,
        "signature": signature(dtype) | dict.fromkeys(constants, "constexpr"),
        "constants": dict(constants),
        "options": dict(options),
        "capability": 10 * capability[0] + capability[1],
        "divisibility": divisibility if aligned else {},
    }
    with tempfile.TemporaryDirectory(prefix="flashlab-triton-") as name:
        folder = Path(name)
        command, variables = worker(folder, __name__)
        try:
            run = subprocess.run(
                command,
                input=json.dumps({**request, "folder": name}).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                check=False,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return None, f"not done after {_LIMIT_S:g} s; stopped\n", {}
        log = run.stdout.decode(errors="replace")
        if run.returncode or not (folder / "made.json").is_file():
            return None, log, {}
        facts = json.loads((folder / "made.json").read_text(encoding="utf-8"))
        code = (folder / "made.cubin").read_bytes()
    scratch = facts["global_scratch_size"] + facts["profile_scratch_size"]
    if scratch:
        return None, f"it wants {scratch} bytes of global memory a program for itself, and gets none\n", {}
    return code, log, {"threads": _WARP * facts["num_warps"], "smem_bytes": facts["shared"]}


def worker(folder: Path, module: str, **settings: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a new process, without Triton imported, that calls a module's `serve(request)`.

    The request is JSON on its standard input. Triton keeps its cache in `folder`; `settings` are environment variables,
    which replace all of this process's for Triton.
    """
    variables = {name: value for name, value in environment().items() if not name.startswith("TRITON_")} | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        **settings,
    }
    return [sys.executable, "-c", _ELSEWHERE, module], variables


# --- in the process of its own ----------------------------------------------------------------------------------------


def kernel_in(request: Mapping[str, Any]) -> Any:
    """Import the Triton function named by a request."""
    spec = importlib.util.spec_from_file_location("kernel", request["source"])
    if spec is None or spec.loader is None:
        raise ImportError(f"{request['source']} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, request["entry"])


def serve(request: Mapping[str, Any]) -> None:
    """Compile a kernel in the compiler process, into the folder that the request names."""
    folder = Path(request["folder"])
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    kernel, signature = kernel_in(request), request["signature"]
    names = list(signature)
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in request["divisibility"].items()}
    made = triton.compile(
        compiler.ASTSource(kernel, signature, request["constants"], attributes),
        target=backends.GPUTarget("cuda", request["capability"], _WARP),
        options=request["options"],
    )
    (folder / "made.cubin").write_bytes(made.asm["cubin"])
    facts = {name: getattr(made.metadata, name, 0) for name in ("num_warps", "shared")}
    facts |= {name: getattr(made.metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")}
    (folder / "made.json").write_text(json.dumps(facts), encoding="utf-8")
