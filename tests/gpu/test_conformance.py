"""The same kernel files on a GPU and on the CPU emulation: one description runs both, and they must agree.

To the bit where memory is moved and where IEEE 754 fixes the rounding; within what a file's first lines allow where the
chip rounds in a way of its own (ex2.approx, the sums of the tensor cores).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from emulation import kernel_file, on_gpu, sm90_cases
from shared import NO_COMPILER

from flashlab.build import compiler
from flashlab.core.paths import ROOT
from flashlab.kernels.registry import capability
from flashlab.run import emulator, gpu
from flashlab.run.emulator import Emulated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FEATURES = sorted((ROOT / "tests/emulation/conformance").glob("*.cu"))
CORRECT = sorted((ROOT / "tests/wrong/emulation").glob("*.cu"))
"""The seeded bugs' correct variants: small kernels of every mechanism, copy engine and tensor cores included."""
CASES = sm90_cases.all_cases()


@pytest.fixture(scope="module")
def builds() -> Iterator[dict[Path, Future[Emulated]]]:
    """Every file for the CPU, compiled on all cores; their machine code for the GPU goes to the cache meanwhile."""
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    arch = gpu.info(0).arch
    assert arch is not None
    try:
        for path in (*FEATURES, *CORRECT):
            pool.submit(compiler.compile_file, path, entry=path.stem, arch=arch, defines={}, may_spill=True)
        for case in CASES:
            what = {"entry": case.file, "arch": arch, "defines": case.defines, "may_spill": True}
            pool.submit(compiler.compile_file, case.source, **what)
        yield {path: pool.submit(emulator.build_file, path, entry=path.stem) for path in (*FEATURES, *CORRECT)}
    finally:
        pool.shutdown(cancel_futures=True)


def _arch(path: Path) -> str:
    """What to compile it for; skips where the GPU does not have what it needs."""
    arch = gpu.info(0).arch
    if "ptx_sm90.cuh" in path.read_text(encoding="utf-8") and arch != "sm_90a":
        pytest.skip(f"needs sm_90a; this GPU is {arch}")
    if capability(arch) < (9, 0) and path.stem in ("matrices", "bf16_arithmetic", "fp8_conversions"):
        pytest.skip(f"needs instructions of sm_90; this GPU is {arch}")
    return arch


@pytest.mark.parametrize("path", [*FEATURES, *CORRECT], ids=lambda path: path.stem)
def test_chip_and_emulation_agree(path: Path, builds: dict[Path, Future[Emulated]]) -> None:
    file = kernel_file.read(path)
    chip = kernel_file.run_on_gpu(file, _arch(path))
    assert not kernel_file.difference(file, chip, file.expected()), "the chip is not what NumPy says"
    report, arrays = kernel_file.emulate(file, builds[path].result())
    assert report.status == "ok", report.message
    outputs = {name: chip[name] for name in file.outputs()}
    differs = [name for name in outputs if kernel_file.difference(file, arrays, {name: outputs[name]})]
    assert not differs, "\n".join(kernel_file.difference(file, arrays, {name: outputs[name]}) for name in differs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_tensor_copies_and_products_on_the_chip(case: sm90_cases.Case) -> None:
    """What test_sm90.py wants of the emulation, wanted of the chip."""
    arch = gpu.info(0).arch
    if arch != "sm_90a":
        pytest.skip(f"needs sm_90a; this GPU is {arch}")
    arguments = [
        argument.tensor_map if isinstance(argument, sm90_cases.Map) else argument for argument in case.arguments
    ]
    on_gpu.launch(
        case.source,
        arguments,
        entry=case.file,
        arch=arch,
        grid=case.grid,
        block=case.block,
        smem_bytes=case.smem_bytes,
        defines=case.defines,
    )
    assert not case.difference()
