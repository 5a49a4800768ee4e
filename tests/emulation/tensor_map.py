"""A tensor map of a NumPy array."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from flashlab.run import emulator, tensor_map

Array = npt.NDArray[Any]

MAX_RANK = tensor_map.MAX_RANK


class _Bytes(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("others", ctypes.c_ubyte * (tensor_map.MAP_BYTES - 8)))


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorMap(tensor_map.TensorMap):
    """A map, and the array it describes."""

    array: Array

    def as_argument(self, pointer: emulator.Pointer) -> emulator.Structure:
        """For the emulator; the address is that of `pointer`."""
        return emulator.Structure(value=_Bytes.from_buffer_copy(self.emulated()), pointers={"address": pointer})
