"""A tensor map as a test describes it, and as the driver and the emulator each write it down."""

from __future__ import annotations

import ctypes
import importlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from flashlab import emulator, gpu

Array = npt.NDArray[Any]

MAP_BYTES = 128
MAX_RANK = 5
_MAP_MARK = 0x50414D54  # "TMAP"


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled; everything innermost first."""

    array: Array
    data_type: int
    """CUtensorMapDataType."""
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes; that of the innermost dimension, an element, left out."""
    box: tuple[int, ...]
    swizzle: int
    """CUtensorMapSwizzle."""
    nan_fill: bool = False

    def encoded(self, address: int) -> bytes:
        """For the array at that address of the GPU."""
        driver = importlib.import_module("cuda.bindings.driver")
        fill = "NAN_REQUEST_ZERO_FMA" if self.nan_fill else "NONE"
        tensor_map = gpu.call(
            "cuTensorMapEncodeTiled",
            driver.CUtensorMapDataType(self.data_type),
            len(self.dims),
            address,
            [driver.cuuint64_t(n) for n in self.dims],
            [driver.cuuint64_t(n) for n in self.strides],
            [driver.cuuint32_t(n) for n in self.box],
            [driver.cuuint32_t(1) for _ in self.dims],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(self.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )
        return ctypes.string_at(tensor_map.getPtr(), MAP_BYTES)

    def emulated(self, pointer: emulator.Pointer) -> emulator.Structure:
        """What kernels/emulation/async.h calls a TensorMap; its address, the first 8 bytes, is that of `pointer`."""

        def padded(values: tuple[int, ...], length: int) -> list[int]:
            return [*values, *[0] * (length - len(values))]

        rank = len(self.dims)
        head = struct.pack("<QIBBBB", 0, _MAP_MARK, self.data_type, rank, self.swizzle, self.nan_fill)
        body = struct.pack(
            "<4Q15I",
            *padded(self.strides, MAX_RANK - 1),
            *padded(self.dims, MAX_RANK),
            *padded(self.box, MAX_RANK),
            *padded((1,) * rank, MAX_RANK),
        )
        raw = (ctypes.c_ubyte * MAP_BYTES).from_buffer_copy((head + body).ljust(MAP_BYTES, b"\0"))
        return emulator.Structure(value=raw, pointers={0: pointer})
