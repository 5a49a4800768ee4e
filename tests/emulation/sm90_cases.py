"""Launches of the kernels sm90_*.cu with what they must give, to the bit: the same on the CPU emulation and on a chip.

Inputs are small integers where sums are compared, so that no order of adding them matters.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from emulation.tensor_map import MAX_RANK, TensorMap

from flashlab.run import emulator

Array = npt.NDArray[Any]

KERNELS = Path(__file__).parent / "kernels"
SPANS = (0, 32, 64, 128)
"""Bytes of each CUtensorMapSwizzle."""
DATA_TYPES: dict[Any, int] = {np.uint8: 0, np.uint16: 1, np.uint32: 2, np.int32: 3, np.float16: 6, np.float32: 7}
"""CUtensorMapDataType."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Map:
    """A tensor map of an array, or of its first elements where `dims` is smaller."""

    array: Array
    """C-contiguous in its last dimension; rows' starts are 16 bytes apart, or a multiple of it."""
    box: tuple[int, ...]
    """As the array's shape: outermost first."""
    swizzle: int = 0
    """CUtensorMapSwizzle."""
    nan_fill: bool = False
    access: emulator.Access = "r"

    @property
    def fields(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Dims, strides (the first, an element, left out) and box, innermost first."""
        return self.array.shape[::-1], self.array.strides[-2::-1], self.box[::-1]

    @property
    def data_type(self) -> int:
        return DATA_TYPES[self.array.dtype.type]

    @property
    def tensor_map(self) -> TensorMap:
        dims, strides, box = self.fields
        return TensorMap(
            array=self.array,
            data_type=self.data_type,
            dims=dims,
            strides=strides,
            box=box,
            swizzle=self.swizzle,
            nan_fill=self.nan_fill,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One launch."""

    label: str
    file: str
    arguments: tuple[Any, ...]
    """Arrays, maps, numbers, bytes: the kernel's parameters."""
    wanted: tuple[tuple[Array, Array], ...]
    """Arrays among the arguments, and what they must hold afterwards."""
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] = (128,)
    cluster: tuple[int, ...] = (1,)
    smem_bytes: int = 0
    defines: Mapping[str, int | str] = field(default_factory=dict)
    tolerance: float = 0.0
    """Largest difference; 0: the same bits."""

    @property
    def source(self) -> Path:
        return KERNELS / f"{self.file}.cu"

    def emulate(self, schedule: str = "ascending", *, hooks: bool = False) -> emulator.Report:
        """Run it on the CPU; arrays are written in place."""
        built = emulator.build_file(self.source, entry=self.file, defines=self.defines, hooks=hooks)
        arguments: list[Any] = []
        for argument in self.arguments:
            if isinstance(argument, Map):
                pointer = emulator.Pointer(array=argument.array, access=argument.access)
                arguments.append(argument.tensor_map.as_argument(pointer))
            else:
                arguments.append(argument)
        return emulator.launch(
            built,
            arguments,
            grid=self.grid,
            block=self.block,
            cluster=self.cluster,
            smem_bytes=self.smem_bytes,
            schedule=schedule,
            timeout_s=30,
        )

    def difference(self) -> str:
        """Empty where every array holds what it must."""
        for index, (got, want) in enumerate(self.wanted):
            if self.tolerance:
                same = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= self.tolerance
            else:
                bits = np.dtype(f"u{got.itemsize}")
                same = got.view(bits) == want.astype(got.dtype).view(bits)
            if not same.all():
                at = tuple(int(i) for i in np.argwhere(~same)[0])
                count = np.count_nonzero(~same)
                return (
                    f"{self.label}, output {index}{at}: wanted {want[at]}, got {got[at]}; {count} of {same.size} differ"
                )
        return ""


# --- wgmma ---

ROWS = 64
MAX_N = 256
ROW_BYTES = 128
E4M3 = (0x00, 0x38, 0x40, 0x44)
"""The bits of 0, 1, 2, 3."""
E5M2 = (0x00, 0x3C, 0x40, 0x42)


def _encode(values: Array, kind: int) -> Array:
    """Integers from -3 to 3 as the bytes of f16, bf16, e4m3 or e5m2: one row of 128 bytes for each of theirs."""
    if kind == 0:
        return values.astype(np.float16).view(np.uint8)
    if kind == 1:
        upper: Array = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return upper.view(np.uint8)
    codes = np.array(E4M3 if kind == 2 else E5M2, np.uint8)
    encoded: Array = codes[np.abs(values)] | np.where(values < 0, 0x80, 0).astype(np.uint8)
    return encoded


def wgmma_case(*, shapes: bool, n: tuple[int, int] = (8, MAX_N)) -> Case:
    """Every N of a range (`shapes`), or every type, swizzle and major of N = 96."""
    rng = np.random.default_rng(7)
    lengths = [ROW_BYTES // 2, ROW_BYTES // 2, ROW_BYTES, ROW_BYTES]
    a_values = [rng.integers(-3, 4, (ROWS, k)) for k in lengths]
    b_values = [rng.integers(-3, 4, (MAX_N, k)) for k in lengths]
    cases = range(3 * (n[0] // 8 - 1), 3 * (n[1] // 8)) if shapes else range(96)
    d = rng.integers(-9, 10, (len(cases), ROWS, MAX_N)).astype(np.float32)
    wanted = d.copy()
    for index, case in enumerate(cases):
        kind, layout = (0, 0) if shapes else (case // 24, case % 6)
        if kind >= 2 and layout >= 2:
            continue  # 8-bit types have K-major layouts alone
        columns = 8 * (case // 3 + 1) if shapes else 96
        sign = -1 if not shapes and layout in (1, 2) else 1
        wanted[index, :, :columns] += sign * (a_values[kind] @ b_values[kind][:columns].T)
    return Case(
        label=f"every N from {n[0]} to {n[1]}" if shapes else "every type and layout",
        file="sm90_wgmma",
        arguments=(
            np.stack([_encode(a, kind) for kind, a in enumerate(a_values)]),
            np.stack([_encode(b, kind) for kind, b in enumerate(b_values)]),
            d,
            cases[0],
        ),
        wanted=((d, wanted),),
        grid=(len(cases),),
        smem_bytes=ROWS * ROW_BYTES + MAX_N * ROW_BYTES,
        defines={"SHAPES": 1, "FIRST_N": n[0], "LAST_N": n[1]} if shapes else {"SHAPES": 0},
    )


# --- tensor copies ---

TENSOR_SMEM_BYTES = 32 * 1024


def swizzled(offset: Array, swizzle: int) -> Array:
    """Where byte `offset` of a packed box lies in shared memory, from a multiple of 1024 on."""
    exchanged: Array = offset ^ ((offset >> 7 & ((1 << swizzle) - 1)) << 4)
    return exchanged


def tensor_case(
    *,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    at: tuple[int, ...],
    dtype: Any = np.float16,
    swizzle: int = 0,
    nan_fill: bool = False,
    add: bool = False,
    label: str = "",
) -> Case:
    """A box into shared memory and out again; all outermost first."""
    rng = np.random.default_rng(3)
    itemsize = np.dtype(dtype).itemsize
    padding = -shape[-1] * itemsize % 16 // itemsize
    padded = (*shape[:-1], shape[-1] + padding)
    source = rng.integers(1, 100, padded).astype(dtype)[..., : shape[-1]]
    target = rng.integers(1, 100, padded).astype(dtype)[..., : shape[-1]]
    wanted_target = target.copy()
    fill: Any = 0
    if nan_fill and np.dtype(dtype).kind == "f":
        fill = np.uint32(0x7FFFFFFF).view(np.float32) if itemsize == 4 else np.uint16(0x7FF7).view(np.float16)
    tile = np.full(box, fill, dtype)
    inside = tuple(slice(max(0, -x), max(0, min(b, n - x))) for x, b, n in zip(at, box, shape, strict=True))
    there = tuple(slice(max(0, x), max(0, min(n, x + b))) for x, b, n in zip(at, box, shape, strict=True))
    tile[inside] = source[there]
    stores = min(at) >= 0  # a box that starts before the tensor can be read, not written
    if stores:
        wanted_target[there] = (target[there] if add else 0) + tile[inside]
    packed = tile.reshape(-1).view(np.uint8)
    wanted_seen = np.empty_like(packed)
    wanted_seen[swizzled(np.arange(packed.size), swizzle)] = packed
    seen = np.zeros_like(packed)
    coordinates = struct.pack("<5i", *at[::-1], *[0] * (MAX_RANK - len(at)))
    return Case(
        label=label or f"{np.dtype(dtype).name} {shape} box {box} at {at} swizzle {SPANS[swizzle]}",
        file="sm90_tensor",
        arguments=(
            Map(array=source, box=box, swizzle=swizzle, nan_fill=nan_fill),
            Map(array=target, box=box, swizzle=swizzle, access="rw"),
            seen,
            coordinates,
            len(shape),
            packed.size,
            int(add) if stores else 2,
        ),
        wanted=((seen, wanted_seen), (target, wanted_target)),
        block=(64,),
        smem_bytes=TENSOR_SMEM_BYTES,
    )


STEP = 8
"""16 bytes of 2-byte elements: what a box's first coordinate is a multiple of."""


def tensor_cases() -> list[Case]:
    """Ranks 2 to 5, every swizzle, inside, before the first and past the last element in every dimension."""
    cases: list[Case] = []
    for rank in range(2, MAX_RANK + 1):
        for swizzle, span in enumerate(SPANS):
            inner = (span or 48) // 2
            shape = (*(3, 4, 5, 13)[4 - (rank - 1) :], 70)
            box = (*(2, 2, 3, 8)[4 - (rank - 1) :], inner)
            past = tuple(n - b + 1 + d for d, (n, b) in enumerate(zip(shape, box, strict=True)))
            past = (*past[:-1], -(-past[-1] // STEP) * STEP)
            for at in ((1,) * (rank - 1) + (STEP,), (-1,) * (rank - 1) + (-STEP,), past):
                cases.append(tensor_case(shape=shape, box=box, at=at, swizzle=swizzle))
    dtype: Any
    for dtype, inner in ((np.uint8, 128), (np.float32, 32), (np.int32, 16)):
        cases.append(
            tensor_case(shape=(20, 100), box=(9, inner), at=(-2, 96), dtype=dtype, swizzle=3 if inner > 16 else 2)
        )
    cases.append(tensor_case(shape=(20, 100), box=(9, 128), at=(17, 16), dtype=np.uint8, swizzle=3))
    cases.append(tensor_case(shape=(20, 40), box=(8, 32), at=(16, -8), nan_fill=True, label="NaN outside"))
    for dtype in (np.float16, np.float32, np.int32):
        cases.append(
            tensor_case(shape=(20, 40), box=(8, 16), at=(15, 32), dtype=dtype, add=True, label=f"add {dtype.__name__}")
        )
    cases.append(tensor_case(shape=(3, 20, 40), box=(2, 8, 64), at=(2, 15, 8), swizzle=3, add=True, label="add 3D"))
    return cases


# --- an attention kernel ---


def attention_case(length: int, heads: int = 2) -> Case:
    """Against float64; P is rounded to fp16."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((heads, length, 64)).astype(np.float16) for _ in range(3))
    out = np.zeros_like(q)
    scale = 1 / np.sqrt(64)
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = (weights / weights.sum(axis=-1, keepdims=True)) @ v.astype(np.float64)
    maps = tuple(Map(array=array, box=(1, 64, 64), swizzle=3) for array in (q, k, v))
    return Case(
        label=f"attention of {length}",
        file="sm90_attention",
        arguments=(*maps, out, length, np.float32(scale * np.log2(np.e))),
        wanted=((out, wanted),),
        grid=(-(-length // 64), heads),
        block=(256,),
        smem_bytes=5 * 64 * 64 * 2 + 1024,
        tolerance=2e-3,
    )


# --- a cluster ---


def cluster_case(num_clusters: int = 2) -> Case:
    """Two blocks of a cluster see each other."""
    n = 64
    blocks = 2 * num_clusters
    source = np.arange(blocks * n, dtype=np.int32).reshape(blocks, n)
    result = np.zeros((blocks, 6, n), np.int32)
    wanted = np.zeros_like(result)
    thread = np.arange(n)
    for block in range(blocks):
        other = block % 2 ^ 1
        wanted[block] = [
            source[block // 2 * 2],
            source[block // 2 * 2 + 1],
            1000 * other + thread,
            7 * thread + other,
            1000 * other + thread,
            np.full(n, 2),
        ]
    return Case(
        label="cluster",
        file="sm90_cluster",
        arguments=(Map(array=source, box=(1, n)), result),
        wanted=((result, wanted),),
        grid=(blocks,),
        block=(n,),
        cluster=(2, 1, 1),
    )


# --- copies that are no tensors' ---


def copies_case() -> Case:
    """Two rows in, two rows out."""
    rows = np.arange(512, dtype=np.int32).reshape(2, 256)
    out = np.zeros_like(rows)
    wanted = np.stack([rows[0] + 1, 2 * rows[1] + 1])
    return Case(label="copies", file="sm90_copies", arguments=(rows, out), wanted=((out, wanted),), block=(64,))


def all_cases() -> list[Case]:
    """Every one."""
    return [
        wgmma_case(shapes=True),
        wgmma_case(shapes=False),
        *tensor_cases(),
        attention_case(128),
        attention_case(203),
        cluster_case(),
        copies_case(),
    ]
