"""What a kernel is launched with: its structures, as kernels/common declares them, tensor maps and the grid."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashlab.build import triton_code
from flashlab.core.problem import BYTES_PER_ELEMENT, DType, Problem
from flashlab.kernels.text import fields
from flashlab.run.arrays import DeviceArray
from flashlab.run.plan import Plan
from flashlab.run.tensor_map import DATA_TYPES, MAP_BYTES, SWIZZLE_64B, SWIZZLE_128B, TensorMap

if TYPE_CHECKING:
    from flashlab.build.compiler import LaunchShape

PANELS = {64: SWIZZLE_128B, 32: SWIZZLE_64B}
"""Columns of a tile's panels to their swizzle: the widest whose columns divide the head dim."""
WARP_ROWS = 16
"""Rows of a TMA store of O: a warp's, as kernels/common/hopper.cuh has it."""
CPU_RESIDENT_BLOCKS = 3
"""The grid of a persistent kernel on a CPU: few, so that each takes several work tiles. As many SMs, to a kernel that
says how many blocks each has."""
SPLITS = (1, 2, 4, 8, 16)
"""Blocks that the keys of a tile may be split over: those of a cluster."""
NEARLY = 0.85
"""A choice of splits fills the GPU nearly as well as the best where it keeps this share of it as busy: FlashAttention's
own rule for its splits."""
WORK_COUNTERS = 2
"""Unsigned integers in which a persistent kernel's tile scheduler counts."""
MAX_SHARES = 4096
"""Blocks of a launch that shares keys equally, at most, and its counters: kernels/common/shares.cuh."""


class TensorView(ctypes.Structure):
    """kernels/common/attention.cuh, `TensorView`: where an array lies, with strides in elements."""

    _fields_ = fields("common/attention.cuh", "TensorView")


_params = partial(fields, "common/attention.cuh", "AttentionParams", TensorView=TensorView)


class AttentionParams(ctypes.Structure):
    """kernels/common/attention.cuh, `AttentionParams`."""

    _fields_ = _params()


class FeatureParams(AttentionParams):
    """The same of a kernel that is compiled for some of `Problem.features`."""

    _fields_ = _params("SOFTCAP")[len(_params()) :]  # ctypes adds them to its base's


class VarlenParams(FeatureParams):
    """The same of a kernel for sequences of lengths of their own."""

    _fields_ = _params("VARLEN")[len(_params("SOFTCAP")) :]


class AttentionMaps(ctypes.Structure):
    """kernels/common/hopper.cuh, `AttentionMaps`."""

    _fields_ = tuple((name, ctypes.c_ubyte * MAP_BYTES) for name in "QKVO")


def params_for(problem: Problem, scale: float, views: Mapping[str, DeviceArray]) -> AttentionParams:
    """The kernel's first argument; of `views` Q, K, V and O count. `LSE`, `work`, `fallbacks` and the `cu_seqlens` are
    null."""
    kind = VarlenParams if problem.varlen else FeatureParams if problem.features else AttentionParams
    params = kind(
        **{name: TensorView(views[name].pointer, *views[name].strides[:3]) for name in "QKVO"},
        **{name: getattr(problem, name) for name in ("q_heads", "kv_heads", "q_len", "kv_len", "batch")},
        scale_log2=(problem.softcap or scale) * math.log2(math.e),
    )
    if isinstance(params, FeatureParams):
        params.window_left, params.window_right = problem.reach
        params.cap_scale = scale / (problem.softcap or 1.0)
    if isinstance(params, VarlenParams):
        params.total_q, params.total_k = views["Q"].shape[2], views["K"].shape[2]
    return params


def tile_map(array: DeviceArray, dtype: DType, rows: int, panels: int = 0, *, varlen: bool = False) -> TensorMap:
    """A tensor map whose box is `rows` rows of one head, as kernels/common/hopper.cuh describes it; `panels` 0: all.

    With `varlen` the last dimension runs over rows as well, so that a sequence's last row can be the map's: any row of
    the array is the sum of two coordinates, of which the second is where its sequence ends.
    """
    batch, heads, length, head_dim = array.shape
    panel = next(columns for columns in PANELS if head_dim % columns == 0)
    panel_bytes = panel * BYTES_PER_ELEMENT
    # Nothing is ever `stride` away in a dimension of one, whose stride may be anything: the map wants a sound one.
    batch_stride, head_stride, row_stride = (
        stride * BYTES_PER_ELEMENT if n > 1 else panel_bytes
        for n, stride in zip(array.shape[:3], array.strides[:3], strict=True)
    )
    return TensorMap(
        data_type=DATA_TYPES[dtype],
        dims=(panel, length, head_dim // panel, heads, length + 1 if varlen else batch),
        strides=(row_stride, panel_bytes, head_stride, row_stride if varlen else batch_stride),
        origin=-length * row_stride if varlen else 0,
        box=(panel, rows, panels or head_dim // panel, 1, 1),
        swizzle=PANELS[panel],
    )


def tile_maps(planned: Plan, shape: LaunchShape, arrays: Mapping[str, DeviceArray]) -> dict[str, TensorMap]:
    """The tensor maps of Q, K, V and O; none where they cannot describe them, or the kernel takes none."""
    if not (planned.aligned and planned.stage.tensor_maps):
        return {}
    maps = {}
    for name, array in arrays.items():
        rows = {"Q": shape.box_q, "O": WARP_ROWS}.get(name, shape.box_kv)
        panels = shape.panels_kv if name in ("K", "V") else 0
        maps[name] = tile_map(array, planned.problem.dtype, rows, panels, varlen=planned.problem.varlen)
    return maps


def maps_for(encoded: Mapping[str, bytes]) -> AttentionMaps:
    """The second argument of a kernel that takes tensor maps, of Q, K, V, O; zeros where there are none."""
    absent = bytes(MAP_BYTES)
    return AttentionMaps.from_buffer_copy(b"".join(encoded.get(name, absent) for name in "QKVO"))


def triton_arguments(params: AttentionParams) -> dict[str, int | float]:
    """The arguments of a kernel in Triton, by the names of `triton_code.ARGUMENTS`; null pointers are 0."""
    views = {name: getattr(params, name) for name in "QKVO"}
    strides = {
        f"{name}_{step}": int(getattr(view, f"{step}_stride"))
        for name, view in views.items()
        for step in ("batch", "head", "row")
    }
    sizes = {name: int(getattr(params, name)) for name in ("q_heads", "kv_heads", "q_len", "kv_len")}
    pointers = {name: int(view.data or 0) for name, view in views.items()} | {"LSE": int(params.LSE or 0)}
    return {**pointers, **strides, **sizes, "wants_lse": int(bool(params.LSE)), "scale_log2": float(params.scale_log2)}


_TRITON_TYPES: Mapping[str, Any] = {"i64": ctypes.c_longlong, "i32": ctypes.c_int, "fp32": ctypes.c_float}


def triton_parameters(params: AttentionParams) -> list[Any]:
    """The same as ctypes values in order, with null pointers for what Triton may add."""
    values = triton_arguments(params)
    of_type = {name: _TRITON_TYPES.get(kind, ctypes.c_void_p) for name, kind in triton_code.ARGUMENTS.items()}
    hidden = [ctypes.c_void_p() for _ in range(triton_code.HIDDEN_POINTERS)]
    return [*(kind(values[name]) for name, kind in of_type.items()), *hidden]


WHOLE = 15 / 16
"""Of the blocks that could run, so many at least must be left where shares of keys keep within tiles: a crossing costs
more than that share of the GPU, by d3_equal_share with SPLITS=8 at four sequences of 8,192 keys on an H200."""


def splits_for(problem: Problem, shape: LaunchShape, sms: int, most: int) -> int:
    """Blocks that the keys of a tile are split over, of a kernel that does that; `most`: what the GPU allows.

    The fewest that keep the SMs, at one block each, nearly as busy as the best choice: all read keys until the last
    ends, and what is split more is combined from more parts. A block has enough loads in flight for its SM; to fill
    the places of a second one by more splits was slower on record (site/decode/d0_split_kv.md). No more than there are
    keys for, so that each block has some.
    """
    keys = _seen_keys(problem) // shape.split_keys
    able = [splits for splits in SPLITS if splits <= max(1, min(most, keys))]
    tiles = _packed_tiles(problem, shape) * problem.kv_heads * problem.batch

    def filled(splits: int) -> float:
        waves = tiles * splits / sms
        return waves / math.ceil(waves)

    best = max(map(filled, able))
    return next(splits for splits in able if filled(splits) >= NEARLY * best)


def _seen_keys(problem: Problem) -> int:
    """Keys that some query sees, be it in another window than others."""
    return min(problem.kv_len, problem.q_len + sum(problem.reach))


def _packed_tiles(problem: Problem, shape: LaunchShape) -> int:
    """Tiles of the rows of all query heads that share a K/V head."""
    return -(-(problem.q_heads // problem.kv_heads * problem.q_len) // shape.tile_q)


def grid_for(problem: Problem, shape: LaunchShape, resident_blocks: int = CPU_RESIDENT_BLOCKS) -> tuple[int, int, int]:
    """Blocks: query tiles, query heads, batch; of a persistent kernel no more than are resident at once.

    Whole clusters, at least one. Of a kernel that splits keys: tiles of packed rows times splits, K/V heads, batch; of
    one that shares them equally, blocks that all have some, and no more for a tile than it can combine.
    """
    cluster = max(1, shape.cluster)
    if shape.tile_blocks:
        tiles = _packed_tiles(problem, shape) * problem.kv_heads * problem.batch
        splits = min(shape.tile_blocks, max(1, _seen_keys(problem) // shape.split_keys))
        blocks = min(tiles * splits, resident_blocks, MAX_SHARES)
        if shape.whole_tiles:
            block_tiles = -(-tiles // blocks)  # 1 where each tile has a block or more
            whole = tiles * (blocks // tiles) if block_tiles == 1 else tiles // block_tiles
            if tiles % block_tiles == 0 and whole >= WHOLE * blocks:
                blocks = whole
        return (blocks, 1, 1)
    if shape.split_keys:
        return (_packed_tiles(problem, shape) * cluster, problem.kv_heads, problem.batch)
    clusters = -(-problem.q_len // (shape.tile_q * cluster))  # a head
    if shape.persistent:
        resident = max(1, resident_blocks // cluster)
        return (min(clusters * problem.q_heads * problem.batch, resident) * cluster, 1, 1)
    return (clusters * cluster, problem.q_heads, problem.batch)


def resident_blocks(shape: LaunchShape, sms: int, blocks_per_sm: int) -> int:
    """Blocks of a persistent kernel that are resident at once; `blocks_per_sm`: what an SM has room for."""
    return sms * max(1, min(blocks_per_sm, shape.sm_blocks or blocks_per_sm))


def fitted(
    problem: Problem,
    shape: LaunchShape,
    *,
    sms: int | None = None,
    blocks_per_sm: int | None = None,
    most_splits: int = max(SPLITS),
) -> tuple[LaunchShape, tuple[int, int, int]]:
    """A problem's launch, with the blocks of a cluster chosen where the kernel leaves them to it, and its grid.

    `blocks_per_sm` and `most_splits` are what a GPU of so many SMs has room for. On a CPU, where none are given, an SM
    has as many blocks as the kernel wants.
    """
    sms = CPU_RESIDENT_BLOCKS if sms is None else sms
    if shape.split_keys and not shape.cluster:
        shape = replace(shape, cluster=splits_for(problem, shape, sms, most_splits))
    room = max(1, shape.sm_blocks) if blocks_per_sm is None else blocks_per_sm
    return shape, grid_for(problem, shape, resident_blocks(shape, sms, room))


def workspace(shape: LaunchShape, grid: tuple[int, int, int]) -> tuple[int, int]:
    """32-bit words of the memory behind `AttentionParams.work`, and how many of them, the first, are counters, which
    are 0 before a launch and after it; the others hold anything."""
    counters = MAX_SHARES if shape.part_words else WORK_COUNTERS
    words = counters + 2 * grid[0] * shape.part_words
    return words, words if shape.zero_parts else counters
