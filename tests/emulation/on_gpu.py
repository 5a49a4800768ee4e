"""Launch any kernel file on a GPU with NumPy arrays, numbers and tensor maps: the counterpart of `emulator.launch`."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from emulation.tensor_map import TensorMap

from flashlab.build import compiler
from flashlab.core.errors import LaunchError
from flashlab.run import gpu

Array = npt.NDArray[Any]

DEVICE = 0
_HANG_S = 20.0
"""These kernels take microseconds."""
_hung: list[str] = []
"""A kernel that never ended: the GPU takes no other from this process."""


def launch(
    source: Path,
    arguments: Sequence[Any],
    *,
    entry: str,
    arch: str,
    grid: Sequence[int],
    block: Sequence[int],
    smem_bytes: int = 0,
    defines: Mapping[str, int | str] | None = None,
) -> None:
    """Run a kernel once, on arrays that are copied to the GPU and back in place.

    Args:
        arguments: a NumPy array (any strides), a `TensorMap`, a NumPy scalar, an integer, or bytes for each parameter.
            A cluster's size is the kernel's own: `__cluster_dims__`.

    Raises:
        CompileError: the file does not compile.
        LaunchError: the driver refused the launch or broke it off, or the kernel did not end.
    """
    if _hung:
        raise LaunchError(f"wanted a GPU that takes launches, got one on which {_hung[0]} never ended")
    cubin = compiler.compile_file(source, entry=entry, arch=arch, defines=defines or {}, may_spill=True)
    driver = importlib.import_module("cuda.bindings.driver")
    memory = _Memory()
    with gpu.context(DEVICE):
        try:
            values = [_value(argument, memory) for argument in arguments]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            function = gpu.load(cubin, DEVICE, smem_bytes=smem_bytes)
            sizes = [*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3]]
            stream = driver.CUstream(0)
            gpu.call("cuLaunchKernel", function.handle, *sizes, smem_bytes, stream, ctypes.addressof(pointers), 0)
            _wait(driver, stream, entry)
            memory.take_back()
        finally:
            memory.free()


def _wait(driver: Any, stream: Any, entry: str) -> None:
    deadline = time.monotonic() + _HANG_S
    while True:
        (status,) = driver.cuStreamQuery(stream)
        if status == driver.CUresult.CUDA_SUCCESS:
            return
        if status != driver.CUresult.CUDA_ERROR_NOT_READY:
            raise LaunchError(f"running {entry}: {gpu.describe(status)}")
        if time.monotonic() > deadline:
            _hung.append(entry)
            raise LaunchError(f"running {entry}: not done after {_HANG_S:g} s")


def _value(argument: Any, memory: _Memory) -> Any:
    """The parameter's bytes, where the driver can read them."""
    if isinstance(argument, np.ndarray):
        raw = memory.place(argument).to_bytes(8, "little")
    elif isinstance(argument, TensorMap):
        raw = argument.encoded(memory.place(argument.array))
    elif isinstance(argument, np.generic):
        raw = argument.tobytes()
    elif isinstance(argument, int):  # the kernel reads as many of them as its parameter has
        raw = argument.to_bytes(8, "little", signed=argument < 0)
    else:
        raw = bytes(argument)
    return (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw)


class _Memory:
    """Copies of host arrays on the GPU: of everything between an array's first and last byte."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], int] = {}

    def place(self, array: Array) -> int:
        """Address of the array's first element there."""
        low, high = np.lib.array_utils.byte_bounds(array)
        if (low, high) not in self._copies:
            address = int(gpu.call("cuMemAlloc", high - low))
            self._copies[low, high] = address
            gpu.call("cuMemcpyHtoD", address, low, high - low)
        return self._copies[low, high] + array.ctypes.data - low

    def take_back(self) -> None:
        for (low, high), address in self._copies.items():
            gpu.call("cuMemcpyDtoH", low, address, high - low)

    def free(self) -> None:
        if _hung:
            return  # it would wait for the kernel
        for address in self._copies.values():
            gpu.call("cuMemFree", address)
