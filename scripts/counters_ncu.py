"""What Nsight Compute counts for the stages, to hold the emulation's counters against (kernels/emulation/README.md).

On a GPU machine with `ncu`, CuPy and this tree:

    PYTHONPATH=src python3 scripts/counters_ncu.py --out counters.jsonl

profiles one launch of each stage at each shape, and of kernels of a single shared-memory access each, whose lanes'
addresses are given (the patterns: what the model of bank conflicts is held against). One JSON object a line:

    {"stage", "shape", "gpu", "commit", "dirty", "metrics": {name: value}}
    {"pattern", "kernel", "offsets": bytes of lane 0 … 31 or -1, "gpu", "commit", "dirty", "metrics": {name: value}}

A metric that this GPU or this version of ncu lacks is left out, and named on stderr. Metrics named `sass` are counted
by patched instructions, the others by the hardware; they are read in runs of their own, so that one may fail.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from flashlab.core.errors import FlashlabError  # noqa: E402
from flashlab.kernels import registry  # noqa: E402
from flashlab.kernels.registry import CUDA_STAGES  # noqa: E402
from flashlab.measure import profile  # noqa: E402
from flashlab.measure.options import Options  # noqa: E402

SHAPES = ("1x2x128x64", "1x2x256x64")
SEED = 0

_SHARED = ("ld", "st", "ldsm", "ldgsts", "ldgsts_cache_access", "ldgsts_cache_bypass", "atom")
_GLOBAL = ("ld", "st", "ldgsts", "ldgsts_cache_access", "ldgsts_cache_bypass")
_INSTRUCTIONS = ("shared_ld", "shared_st", "ldsm", "ldgsts", "global_ld", "global_st")
BANKS = (
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    *(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum" for op in _SHARED),
    *(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum" for op in _SHARED),
)
HARDWARE = (
    *BANKS,
    *(f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum" for op in _GLOBAL),
    *(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum" for op in _GLOBAL),
    *(f"smsp__inst_executed_op_{op}.sum" for op in _INSTRUCTIONS),
)
SASS = (
    *(f"smsp__sass_inst_executed_op_{op}.sum" for op in _INSTRUCTIONS),
    *(f"smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum" for op in _SHARED),
    *(f"smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum" for op in _SHARED),
    *(f"smsp__sass_l1tex_t_requests_pipe_lsu_mem_global_op_{op}.sum" for op in _GLOBAL),
    *(f"smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{op}.sum" for op in _GLOBAL),
)

NCU_TIMEOUT_S = 150

LANES = range(32)
INACTIVE = -1


def _lanes(offset: Callable[[int], int], active: Callable[[int], bool] = lambda lane: True) -> tuple[int, ...]:
    return tuple(offset(lane) if active(lane) else INACTIVE for lane in LANES)


_ANY_WIDTH: dict[str, Callable[[int], tuple[int, ...]]] = {
    # name: width of the access in bytes to each lane's offset
    "side by side": lambda w: _lanes(lambda i: w * i),
    "every second": lambda w: _lanes(lambda i: 2 * w * i),
    "one for all": lambda w: _lanes(lambda i: 0),
    "one for two": lambda w: _lanes(lambda i: i // 2 * w),
    "one for two, two apart": lambda w: _lanes(lambda i: (i // 4 * 2 + i % 2) * w),
    "one for two, four apart": lambda w: _lanes(lambda i: (i // 8 * 4 + i % 4) * w),
    "one for four": lambda w: _lanes(lambda i: i // 4 * w),
    "one for eight": lambda w: _lanes(lambda i: i // 8 * w),
    "eight, four times": lambda w: _lanes(lambda i: i % 8 * w),
    "sixteen, twice": lambda w: _lanes(lambda i: i % 16 * w),
    "one for two, a row each": lambda w: _lanes(lambda i: i // 2 * 128),
    "one for two, halves in the same banks": lambda w: _lanes(lambda i: i % 16 // 2 * w + i // 16 * 128),
    "one for two, every second": lambda w: _lanes(lambda i: i // 2 * 2 * w),
    "every second lane": lambda w: _lanes(lambda i: w * i, lambda i: i % 2 == 0),
    "eight lanes": lambda w: _lanes(lambda i: w * i, lambda i: i < 8),
    "sixteen lanes": lambda w: _lanes(lambda i: w * i, lambda i: i < 16),
    "sixteen lanes, one for all": lambda w: _lanes(lambda i: 0, lambda i: i < 16),
    "rows of 64 halves": lambda w: _lanes(lambda i: 128 * i),
    "rows of 72 halves": lambda w: _lanes(lambda i: 144 * i),
}
_SHARING = (
    "one for two, two apart",
    "one for two, four apart",
    "one for eight",
    "sixteen, twice",
    "one for two, halves in the same banks",
    "one for two, every second",
    "sixteen lanes, one for all",
)
"""Asked of wide loads alone, whose parts may travel together."""
_ROWS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "swizzled rows of 64 halves": lambda w: _lanes(lambda i: 128 * i + i % 8 * 16),
    "rows of 80 halves": lambda w: _lanes(lambda i: 160 * i),
    "fragment: 16 rows of 72 halves": lambda w: _lanes(lambda i: i % 16 * 144 + i // 16 * 16),
}
KERNELS: dict[str, tuple[int, str]] = {
    # name: width in bytes and the access, of shared address %1 (and for a copy, global address %2)
    "pattern_load_2": (2, "ld.shared.u16 half_word, [%1]; cvt.u32.u16 a, half_word; mov.b32 %0, a;"),
    "pattern_load_4": (4, "ld.shared.u32 %0, [%1];"),
    "pattern_load_8": (8, "ld.shared.v2.u32 {a, b}, [%1]; xor.b32 %0, a, b;"),
    "pattern_load_16": (
        16,
        "ld.shared.v4.u32 {a, b, c, d}, [%1]; xor.b32 a, a, b; xor.b32 c, c, d; xor.b32 %0, a, c;",
    ),
    "pattern_store_4": (4, "st.shared.u32 [%1], %1; mov.b32 %0, 0;"),
    "pattern_store_8": (8, "st.shared.v2.u32 [%1], {%1, %1}; mov.b32 %0, 0;"),
    "pattern_store_16": (16, "st.shared.v4.u32 [%1], {%1, %1, %1, %1}; mov.b32 %0, 0;"),
    "pattern_matrix": (
        16,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a, b, c, d}, [%1]; "
        "xor.b32 a, a, b; xor.b32 c, c, d; xor.b32 %0, a, c;",
    ),
    "pattern_copy_16": (16, "cp.async.cg.shared.global [%1], [%2], 16; cp.async.wait_all; mov.b32 %0, 0;"),
    "pattern_copy_4": (4, "cp.async.ca.shared.global [%1], [%2], 4; cp.async.wait_all; mov.b32 %0, 0;"),
}
_LOADED = "result[threadIdx.x] = value;"
_STORED = "__syncthreads(); result[threadIdx.x] = window[threadIdx.x];"  # or nothing need be stored
_KERNEL = """
extern "C" __global__ void NAME(const int* offsets, const char* source, unsigned* result) {
  __shared__ __align__(1024) unsigned char window[8192];
  const int offset = offsets[threadIdx.x];
  unsigned value = 0;
  if (offset >= 0) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(window)) + offset;
    asm volatile("{ .reg .b16 half_word; .reg .b32 a, b, c, d; ACCESS }"
                 : "=r"(value) : "r"(at), "l"(source + threadIdx.x * 16) : "memory");
  }
  RESULT
}
"""


def patterns() -> list[tuple[str, str, tuple[int, ...]]]:
    """Kernel, name and lanes' offsets of every pattern, in the order of their launches."""
    found = []
    for kernel, (width, _) in KERNELS.items():
        wide = width > 4 and "load" in kernel
        named = {name: offsets for name, offsets in _ANY_WIDTH.items() if wide or name not in _SHARING}
        if width == 16:
            named |= _ROWS
        if kernel == "pattern_load_4":
            named |= {"rows of 33 floats": lambda w: _lanes(lambda i: 132 * i)}
        for name, offsets_of in named.items():
            offsets = offsets_of(width)
            if kernel != "pattern_matrix" or INACTIVE not in offsets:  # ldmatrix takes whole warps
                found.append((kernel, name, offsets))
    return found


def _kernel(name: str) -> str:
    result = _STORED if re.search("store|copy", name) else _LOADED
    return _KERNEL.replace("NAME", name).replace("ACCESS", KERNELS[name][1]).replace("RESULT", result)


def launch_stages(stages: Sequence[str], shapes: Sequence[str]) -> None:
    """Under ncu: every stage at every shape, once each."""
    import cupy

    from flashlab.core.problem import Problem
    from flashlab.run.attention import prepare
    from flashlab.verify.oracle import make_inputs

    for shape in shapes:
        inputs = [cupy.asarray(array) for array in make_inputs(Problem.parse(shape), seed=SEED)]
        for stage in stages:
            prepare(*inputs, stage=stage)()
            cupy.cuda.Device().synchronize()


def launch_patterns() -> None:
    """Under ncu: every pattern, once each."""
    import cupy

    module = cupy.RawModule(code="".join(map(_kernel, KERNELS)))
    source, result = cupy.zeros(len(LANES) * 16, cupy.uint8), cupy.zeros(len(LANES), cupy.uint32)
    for kernel, _, offsets in patterns():
        module.get_function(kernel)((1,), (len(LANES),), (cupy.asarray(offsets, cupy.int32), source, result))
        cupy.cuda.Device().synchronize()


def main() -> int:
    """Exit status 0 when every launch was profiled."""
    parser = argparse.ArgumentParser(description="Nsight Compute's counters for the stages and the patterns.")
    parser.add_argument("--out", type=Path, help="where to write the JSON lines")
    parser.add_argument("--stages", nargs="*", default=list(CUDA_STAGES))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--launch", choices=("stages", "patterns"), help=argparse.SUPPRESS)
    parser.add_argument("--connect", help=argparse.SUPPRESS)  # what every worker gets, and this one has no use for
    options = parser.parse_args()
    options.stages = [registry.get(registry.resolve(name)).id for name in options.stages]
    if options.launch == "stages":
        launch_stages(options.stages, options.shapes)
        return 0
    if options.launch == "patterns":
        launch_patterns()
        return 0
    if options.out is None:
        parser.error("wanted --out and a path")

    from flashlab.record import provenance
    from flashlab.run import gpu

    identity = {"gpu": gpu.info(0).name, **provenance.source().model_dump()}
    run_stages = ("--launch", "stages", "--stages", *options.stages, "--shapes", *options.shapes)
    stages = [
        (f"attention_{stage}", {"stage": stage, "shape": shape}) for shape in options.shapes for stage in options.stages
    ]
    singles = [(kernel, {"pattern": name, "kernel": kernel, "offsets": at}) for kernel, name, at in patterns()]
    known = profile.available()
    print(f"ncu knows {len(known) or 'an untold number of'} metrics here", file=sys.stderr)

    complete = True
    lines: list[dict[str, object]] = []
    for expected, arguments, groups in (
        (stages, run_stages, (HARDWARE, SASS)),
        (singles, ("--launch", "patterns"), (BANKS,)),
    ):
        collected: list[dict[str, float]] = [{} for _ in expected]
        for group in groups:
            there = [name for name in group if not known or name.split(".")[0] in known]
            print(f"unknown here: {', '.join(sorted(set(group) - set(there))) or 'none'}", file=sys.stderr)
            began = time.monotonic()
            launches = profile.under_ncu(
                there,
                [sys.executable, __file__, *arguments],
                kernels="^(attention|pattern)_",
                options=Options(timeout_s=NCU_TIMEOUT_S, note=lambda line: print(line, file=sys.stderr)),
            )
            print(f"{len(launches)} of {len(expected)} launches, {time.monotonic() - began:.0f} s", file=sys.stderr)
            complete = complete and len(launches) == len(expected)
            # They come in the order of the launches; a run that was broken off has fewer.
            if any(found.kernel != wanted for found, (wanted, _) in zip(launches, expected, strict=False)):
                print(f"wanted the launches in order, got {[found.kernel for found in launches]}", file=sys.stderr)
                complete = False
                continue
            for into, launch in zip(collected, launches, strict=False):
                into.update(launch.metrics)
        lines += [
            {**what, **identity, "metrics": metrics}
            for (_, what), metrics in zip(expected, collected, strict=True)
            if metrics
        ]
        # After each part, so that what is there is not lost with the rest.
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} of {len(stages) + len(singles)} launches in {options.out}")
    return 0 if complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlashlabError as error:
        sys.exit(f"counters_ncu: {error}")
