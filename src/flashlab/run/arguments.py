"""Launch arguments of kernels: the structures declared in kernels/common, tensor maps, and the grid."""

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
"""Swizzle by panel width, in columns; a tile uses the widest panel that divides the head dim."""
WARP_ROWS = 16
"""Rows per TMA store of O, those of one warp (kernels/common/hopper.cuh)."""
CPU_RESIDENT_BLOCKS = 3
"""CTAs of a persistent kernel on a CPU: few, so that each processes several work tiles. Also the number of SMs assumed
for kernels with a fixed number of CTAs per SM."""
SPLITS = (1, 2, 4, 8, 16)
"""Cluster sizes over which the keys of a tile may be split."""
NEARLY = 0.85
"""A number of splits is acceptable if its SM utilisation is at least this share of the best: the heuristic of
FlashAttention."""
WORK_COUNTERS = 2
"""Number of unsigned counters of the tile scheduler of a persistent kernel."""
MAX_SHARES = 4096
"""Maximum number of CTAs, and of counters, of a launch that shares keys equally: kernels/common/shares.cuh."""


class TensorView(ctypes.Structure):
    """`TensorView` of kernels/common/attention.cuh: address of an array, and strides in elements."""

    _fields_ = fields("common/attention.cuh", "TensorView")


_params = partial(fields, "common/attention.cuh", "AttentionParams", TensorView=TensorView)


class AttentionParams(ctypes.Structure):
    """`AttentionParams` of kernels/common/attention.cuh."""

    _fields_ = _params()


class FeatureParams(AttentionParams):
    """`AttentionParams` of a kernel compiled for some of `Problem.features`."""

    _fields_ = _params("SOFTCAP")[len(_params()) :]  # ctypes prepends the fields of the base


class VarlenParams(FeatureParams):
    """`AttentionParams` of a kernel for packed sequences."""

    _fields_ = _params("VARLEN")[len(_params("SOFTCAP")) :]


class AttentionMaps(ctypes.Structure):
    """`AttentionMaps` of kernels/common/hopper.cuh."""

    _fields_ = tuple((name, ctypes.c_ubyte * MAP_BYTES) for name in "QKVO")


def params_for(problem: Problem, scale: float, views: Mapping[str, DeviceArray]) -> AttentionParams:
    """Build the first kernel argument from the views of Q, K, V and O; `LSE`, `work`, `fallbacks` and the `cu_seqlens`
    stay null."""
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
    """Build a tensor map whose box is `rows` rows of one head (kernels/common/hopper.cuh); `panels` 0 means all panels.

    With `varlen`, the last dimension also runs over rows, so that loads are clipped at the end of a sequence: a row is
    the sum of two coordinates, of which the second is the end of its sequence.
    """
    batch, heads, length, head_dim = array.shape
    panel = next(columns for columns in PANELS if head_dim % columns == 0)
    panel_bytes = panel * BYTES_PER_ELEMENT
    # The stride of a dimension of size 1 is never used and may be anything, but the map requires a valid one.
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
    """Build the tensor maps of Q, K, V and O; empty on the slow path, or if the stage uses none."""
    if not (planned.aligned and planned.stage.tensor_maps):
        return {}
    maps = {}
    for name, array in arrays.items():
        rows = {"Q": shape.box_q, "O": WARP_ROWS}.get(name, shape.box_kv)
        panels = shape.panels_kv if name in ("K", "V") else 0
        maps[name] = tile_map(array, planned.problem.dtype, rows, panels, varlen=planned.problem.varlen)
    return maps


def maps_for(encoded: Mapping[str, bytes]) -> AttentionMaps:
    """Build the second argument of a kernel with tensor maps of Q, K, V and O; missing maps are zeros."""
    absent = bytes(MAP_BYTES)
    return AttentionMaps.from_buffer_copy(b"".join(encoded.get(name, absent) for name in "QKVO"))


def triton_arguments(params: AttentionParams) -> dict[str, int | float]:
    """Arguments of a Triton kernel, by the names of `triton_code.ARGUMENTS`; null pointers are 0."""
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
    """`triton_arguments` as ctypes values in order, followed by null pointers for Triton's hidden parameters."""
    values = triton_arguments(params)
    of_type = {name: _TRITON_TYPES.get(kind, ctypes.c_void_p) for name, kind in triton_code.ARGUMENTS.items()}
    hidden = [ctypes.c_void_p() for _ in range(triton_code.HIDDEN_POINTERS)]
    return [*(kind(values[name]) for name, kind in of_type.items()), *hidden]


WHOLE = 15 / 16
"""Minimum share of the possible CTAs that must remain for shares of keys to be aligned to tiles: crossing tiles costs
more than the idle rest, by d3_equal_share with SPLITS=8 at four sequences of 8,192 keys on an H200."""


def splits_for(problem: Problem, shape: LaunchShape, sms: int, most: int) -> int:
    """Number of CTAs over which a split-KV kernel splits the keys of a tile, at most `most`, the limit of the GPU.

    Returns the smallest number whose SM utilisation, at one CTA per SM, is close to the best: more splits cost more to
    combine. One CTA has enough loads in flight for its SM; filling a second slot with more splits was slower on record
    (site/decode/d0_split_kv.md). Every CTA gets at least one block of keys.
    """
    keys = seen_keys(problem) // shape.split_keys
    able = [splits for splits in SPLITS if splits <= max(1, min(most, keys))]
    tiles = _packed_tiles(problem, shape) * problem.kv_heads * problem.batch

    def filled(splits: int) -> float:
        waves = tiles * splits / sms
        return waves / math.ceil(waves)

    best = max(map(filled, able))
    return next(splits for splits in able if filled(splits) >= NEARLY * best)


def seen_keys(problem: Problem) -> int:
    """Number of keys that at least one query sees."""
    return min(problem.kv_len, problem.q_len + sum(problem.reach))


def _packed_tiles(problem: Problem, shape: LaunchShape) -> int:
    """Number of query tiles per K/V head, which pack the rows of all its query heads."""
    return -(-(problem.q_heads // problem.kv_heads * problem.q_len) // shape.tile_q)


def grid_for(problem: Problem, shape: LaunchShape, resident_blocks: int = CPU_RESIDENT_BLOCKS) -> tuple[int, int, int]:
    """Grid of a kernel: (query tiles, query heads, batch), or for a persistent kernel at most the resident CTAs.

    Whole clusters, at least one. For a split-KV kernel: (packed query tiles · splits, K/V heads, batch). For one that
    shares keys equally: as many CTAs as have keys, and per tile no more than it can combine.
    """
    cluster = max(1, shape.cluster)
    if shape.tile_blocks:
        tiles = _packed_tiles(problem, shape) * problem.kv_heads * problem.batch
        splits = min(shape.tile_blocks, max(1, seen_keys(problem) // shape.split_keys))
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
    """Number of resident CTAs of a persistent kernel; `blocks_per_sm` is the occupancy."""
    return sms * max(1, min(blocks_per_sm, shape.sm_blocks or blocks_per_sm))


def fitted(
    problem: Problem,
    shape: LaunchShape,
    *,
    sms: int | None = None,
    blocks_per_sm: int | None = None,
    most_splits: int = max(SPLITS),
) -> tuple[LaunchShape, tuple[int, int, int]]:
    """Launch shape and grid of a problem, choosing the cluster size of kernels that leave it to the launch.

    `sms`, `blocks_per_sm` (occupancy) and `most_splits` (maximum cluster size) describe the GPU; the defaults are for a
    CPU.
    """
    sms = CPU_RESIDENT_BLOCKS if sms is None else sms
    if shape.split_keys and not shape.cluster:
        shape = replace(shape, cluster=splits_for(problem, shape, sms, most_splits))
    room = max(1, shape.sm_blocks) if blocks_per_sm is None else blocks_per_sm
    return shape, grid_for(problem, shape, resident_blocks(shape, sms, room))


def workspace(shape: LaunchShape, grid: tuple[int, int, int]) -> tuple[int, int]:
    """Size of `AttentionParams.work` in 32-bit words, and how many of them, from the start, are counters, which are 0
    before and after a launch; the rest is uninitialised."""
    counters = MAX_SHARES if shape.part_words else WORK_COUNTERS
    words = counters + 2 * grid[0] * shape.part_words
    return words, words if shape.zero_parts else counters
