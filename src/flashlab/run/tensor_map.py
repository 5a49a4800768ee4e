"""TMA tensor maps: one description of an array, encoded for the driver or for the emulator.

The limits are those of cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management").
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from flashlab.core.problem import DType
from flashlab.run import gpu

MAP_BYTES = 128
MAX_RANK = 5
MAX_STRIDE_BYTES = 2**40
"""Exclusive upper bound of strides."""
DATA_TYPES: dict[DType, int] = {"float16": 6, "bfloat16": 9}
"""CUtensorMapDataType."""
SWIZZLE_64B, SWIZZLE_128B = 2, 3
"""CUtensorMapSwizzle."""
_EMULATED_MARK = 0x50414D54  # "TMAP", kernels/emulation/async.h


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled except the address; the innermost dimension comes first."""

    data_type: int
    """CUtensorMapDataType."""
    dims: tuple[int, ...]
    """In elements."""
    strides: tuple[int, ...]
    """In bytes, without the innermost dimension, whose stride is one element."""
    box: tuple[int, ...]
    """Size of the box that one TMA instruction copies, in elements."""
    swizzle: int = 0
    """CUtensorMapSwizzle."""
    nan_fill: bool = False
    """Whether out-of-bounds elements read as NaN instead of 0."""
    origin: int = 0
    """Byte offset from the array's address to the element at coordinates 0, possibly outside the array."""

    @cached_property
    def _arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of cuTensorMapEncodeTiled before and after the address."""
        driver = importlib.import_module("cuda.bindings.driver")
        fill = "NAN_REQUEST_ZERO_FMA" if self.nan_fill else "NONE"
        return (driver.CUtensorMapDataType(self.data_type), len(self.dims)), (
            [driver.cuuint64_t(n) for n in self.dims],
            [driver.cuuint64_t(n) for n in self.strides],
            [driver.cuuint32_t(n) for n in self.box],
            [driver.cuuint32_t(1) for _ in self.dims],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(self.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,  # a hint
            getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - allocators reuse addresses
    def encoded(self, address: int) -> bytes:
        """Encode the tensor map for an array at a GPU address: 128 bytes.

        Raises:
            LaunchError: the driver rejects the arguments.
        """
        before, after = self._arguments
        tensor_map = gpu.call("cuTensorMapEncodeTiled", *before, (address + self.origin) % 2**64, *after)
        return ctypes.string_at(tensor_map.getPtr(), MAP_BYTES)

    def emulated(self) -> bytes:
        """Encode the tensor map for the emulator (kernels/emulation/async.h).

        The first 8 bytes are for the address of the array plus `origin`.
        """

        def padded(values: tuple[int, ...], length: int) -> list[int]:
            return [*values, *[0] * (length - len(values))]

        rank = len(self.dims)
        head = struct.pack("<QIBBBB", 0, _EMULATED_MARK, self.data_type, rank, self.swizzle, self.nan_fill)
        body = struct.pack(
            "<4Q15I",
            *padded(self.strides, MAX_RANK - 1),
            *padded(self.dims, MAX_RANK),
            *padded(self.box, MAX_RANK),
            *padded((1,) * rank, MAX_RANK),
        )
        return (head + body).ljust(MAP_BYTES, b"\0")
