"""Attention on FP8 (e4m3) inputs: `quantize_e4m3` and `fp8_attention`.

f0_e4m3 has two kernels: one transposes V, the other computes attention. As the runner of the stage
(`attention._runner`), this module also runs it on the 16-bit inputs of any problem, which are quantised once, by torch
or NumPy, and again when a torch tensor has been written. Only the two kernels are timed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import ml_dtypes
import numpy as np

from flashlab.build import compiler
from flashlab.build.compiler import Variant
from flashlab.core.errors import DeviceError, DTypeError, EmulationError, LayoutError, ShapeError
from flashlab.core.problem import DType
from flashlab.kernels import registry
from flashlab.kernels.text import fields
from flashlab.run import arrays, emulator, gpu, recipes
from flashlab.run.arguments import (
    WARP_ROWS,
    WORK_COUNTERS,
    AttentionParams,
    TensorView,
    maps_for,
    params_for,
    tile_map,
)
from flashlab.run.arrays import (
    HOST,
    DeviceArray,
    Place,
    TorchCopies,
    contiguous_strides,
    on_device,
    on_host,
    torch_stream,
)
from flashlab.run.attention import EmulatedCall, run_on_cpu
from flashlab.run.plan import (
    ROW_ALIGNMENT_BYTES,
    Plan,
    check_contiguous,
    check_dtype,
    check_layout,
    check_out,
    outputs_of,
    planned,
    problem_of,
    tunables,
    why_slow,
)

if TYPE_CHECKING:
    from flashlab.run.tensor_map import TensorMap

STAGE = "f0_e4m3"
TRANSPOSE = "transpose_f0_e4m3"
"""The kernel that transposes V, in the same file."""
LARGEST = 448.0
"""The largest number of e4m3."""
_WGMMA_ROWS = 64
_STEP_KEYS = 32
_COPY_ROWS = 34
"""BLOCK_COPY_ROWS of f0_e4m3.cu: 128-byte rows that hold 32 keys of V."""
_ROW_BYTES = 128
_TRANSPOSE_THREADS = 256


class Fp8Params(ctypes.Structure):
    """kernels/common/fp8.cuh, `Fp8Params`."""

    _fields_ = fields("common/fp8.cuh", "Fp8Params", TensorView=TensorView)


# --- the public calls -------------------------------------------------------------------------------------------------


def quantize_e4m3(x: Any) -> tuple[Any, Any]:
    """Quantise to FP8 (e4m3) with one scale per head, which maps its largest magnitude to 448, the e4m3 maximum.

    Args:
        x: (batch, heads, length, head_dim), float16, bfloat16 or float32: a torch tensor or NumPy array.

    Returns:
        `(e4m3, scale)`, with x ≈ e4m3 · scale: float8_e4m3fn of the shape of x, contiguous, and float32 (batch, heads),
        normal numbers. A head that contains an infinity or NaN is not recoverable.

    Raises:
        ShapeError: x does not have four non-empty dimensions.
        DTypeError, DeviceError: x has another dtype, or is not a torch tensor or NumPy array.
    """
    view = arrays.place_of(x, None, None, "x").view(x, "x")
    check_dtype("x", view, "float32", *get_args(DType))
    if view.library != "torch" and view.device != HOST:
        raise DeviceError(f"x: wanted a torch tensor, or a NumPy array, got {type(x).__name__} on {view.place}")
    if len(view.shape) != 4 or 0 in view.shape:
        raise ShapeError(f"x: wanted (batch, heads, length, head_dim), none of them 0, got shape {view.shape}")
    of_torch = view.library == "torch"
    library: Any = importlib.import_module("torch") if of_torch else np
    wide = x.float() if of_torch else view.owner.astype("float32", order="C")
    scale = library.amax(library.abs(wide), (-2, -1)) / LARGEST
    smallest = library.full_like(scale, library.finfo(scale.dtype).tiny)  # below it, quotients lose precision
    scale = library.where(scale == 0, library.ones_like(scale), library.maximum(scale, smallest))
    with np.errstate(invalid="ignore"):  # inf / inf, in a head that is not recoverable
        scaled = wide / scale[..., None, None]
    if of_torch:
        return scaled.to(library.float8_e4m3fn).contiguous(), scale
    return scaled.astype(ml_dtypes.float8_e4m3fn), scale


def fp8_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    causal: bool = False,
    scale: float | None = None,
    dtype: DType = "bfloat16",
    out: Any | None = None,
    return_lse: bool = False,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
) -> Any:
    """Compute attention on FP8 (e4m3) inputs, on an sm_90 GPU, on the caller's stream, or emulated on the CPU.

    Args:
        q: (batch, q_heads, q_len, 128), float8_e4m3fn: a torch tensor, or on the CPU a NumPy array (ml_dtypes), such
            as `quantize_e4m3` returns. Rows, heads and sequences start on 16-byte boundaries.
        k: (batch, kv_heads, kv_len, 128), likewise; kv_heads divides q_heads.
        v: like `k`.
        q_scale: dequantisation scale of q, float32 (batch, q_heads), contiguous, on the device of q; default: 1.
        k_scale: likewise for k, float32 (batch, kv_heads).
        v_scale: likewise for v, float32 (batch, kv_heads).
        causal: whether to apply a causal mask, aligned bottom right, as in `flashlab.attention`.
        scale: finite factor on the scores; default: 1/sqrt(head_dim).
        dtype: dtype of the output, float16 or bfloat16.
        out: output array of the shape of q and of `dtype`; default: a new contiguous array of the caller's library.
        return_lse: whether to also return the log-sum-exp of the scores, float32 (batch, q_heads, q_len) (natural log,
            -inf if a query sees no key).
        stream: as in `flashlab.attention`.
        params: tunables of f0_e4m3, by name.

    Returns:
        The output (batch, q_heads, q_len, 128), or (output, lse).

    Raises:
        InputError: invalid arguments (ShapeError, DTypeError, LayoutError, DeviceError, ParameterError).
        UnsupportedError: the kernel does not support this call here.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: see there.
    """
    arrays.refuse_gradients(q=q, k=k, v=v, out=out, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    if dtype not in get_args(DType):
        raise DTypeError(f"dtype: wanted {' or '.join(map(repr, get_args(DType)))} for the output, got {dtype!r}")
    here = arrays.place_of(q, stream)
    inputs = {name: _stored(here.view(of, name), name) for name, of in (("q", q), ("k", k), ("v", v))}
    problem = problem_of({name: replace(array, dtype=dtype) for name, array in inputs.items()}, causal)
    for name, array in inputs.items():
        _check_rows(name, array)
        check_layout(name, array, inputs["q"])
    heads = {"Q": problem.q_heads, "K": problem.kv_heads, "V": problem.kv_heads}
    scales = {}
    for (name, count), given in zip(heads.items(), (q_scale, k_scale, v_scale), strict=True):
        wanted, of = (problem.batch, count), f"{name.lower()}_scale"
        made = _ones(here, wanted) if given is None else given
        scales[f"{name}_scale"] = _scale(of, here.view(made, of), wanted, inputs["q"])
    if out is not None:
        check_out(here.view(out, "out"), inputs, dtype)
        check_layout("out", here.view(out, "out"), inputs["q"])
    made = outputs_of(here, inputs, out, return_lse=return_lse, dtype=dtype)
    plan = planned(problem, registry.get(STAGE), scale, {"out": made.out_view}, tensor_maps=True)
    call = _Call(plan, dict(zip("QKVO", (*inputs.values(), made.out_view), strict=True)), scales)
    if here.stream is None:
        run_on_cpu(plan, call.views, made.lse_view, tunables(params), call.on_cpu)
    else:
        _run_on_gpu(call, here, made.lse_view, tunables(params))
    return (made.out, made.lse) if return_lse else made.out


def _ones(here: Place, shape: tuple[int, ...]) -> Any:
    with here.enqueued():
        made = here.empty(shape, "float32")
        made[...] = 1
    return made


def _stored(view: DeviceArray, name: str) -> DeviceArray:
    if view.dtype != "float8_e4m3fn":
        raise DTypeError(
            f"{name}: wanted float8_e4m3fn, got {view.dtype}. `flashlab.quantize_e4m3({name})` makes one and its scale."
        )
    return view


def _check_rows(name: str, view: DeviceArray) -> None:
    if reason := why_slow(name, view, tensor_maps=True):
        raise LayoutError(
            f"{name}: wanted rows on {ROW_ALIGNMENT_BYTES}-byte boundaries, as in a contiguous copy; {reason}"
        )


def _scale(name: str, view: DeviceArray, wanted: tuple[int, int], q: DeviceArray) -> DeviceArray:
    check_dtype(name, view, "float32")
    if view.shape != wanted:
        raise ShapeError(f"{name}: wanted (batch, heads), {wanted}, got shape {view.shape}")
    check_contiguous(name, view)
    check_layout(name, view, q)
    return view


# --- a call -----------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A validated call: the arguments of both kernels, apart from memory allocated for them."""

    plan: Plan
    """Slow if rows of the output do not start on 16-byte boundaries."""
    views: Mapping[str, DeviceArray]
    """Q, K and V in e4m3, and O."""
    scales: Mapping[str, DeviceArray]
    """`Q_scale`, `K_scale` and `V_scale`."""

    @property
    def params(self) -> AttentionParams:
        """The first argument, without the addresses that `params_for` does not set."""
        return params_for(self.plan.problem, self.plan.scale, self.views)

    @property
    def blocks_shape(self) -> tuple[int, int, int, int]:
        """Shape of the transposed V: 128-byte rows per sequence and K/V head, in 16-bit elements."""
        rows = -(-self.plan.problem.kv_len // _STEP_KEYS) * _COPY_ROWS
        return (self.plan.problem.batch, self.plan.problem.kv_heads, rows, _ROW_BYTES // 2)

    @property
    def transpose_grid(self) -> tuple[int, int, int]:
        """Grid of the transpose kernel, whose CTAs process 32 keys each."""
        return (-(-self.plan.problem.kv_len // _STEP_KEYS), self.plan.problem.kv_heads, self.plan.problem.batch)

    @property
    def of_fp8(self) -> Fp8Params:
        """The third argument, without addresses."""
        return Fp8Params(V=TensorView(self.views["V"].pointer, *self.views["V"].strides[:3]))

    def on_cpu(self, run: EmulatedCall) -> list[emulator.Structure]:
        """Run the transpose kernel on the CPU and return the arguments of the attention kernel, for `EmulatedCall`."""
        stored = {name: self.views[name].owner.view(np.uint8) for name in "QKV"}
        stored |= {name: scale.owner for name, scale in self.scales.items()}
        blocks = emulator.Pointer(array=np.zeros(self.blocks_shape, np.uint16), name="V_blocks")
        of_inputs = {name: emulator.Pointer(array=array, access="r", name=name) for name, array in stored.items()}
        pointers = {**run.pointers, **of_inputs, "V_blocks": blocks}
        first, fp8 = (
            emulator.Structure(value=structure, pointers=pointers) for structure in (self.params, self.of_fp8)
        )
        kernel, plan = run.kernel, self.plan
        variant = Variant.of(
            plan.stage, plan.problem, aligned=plan.aligned, overrides=kernel.parameters, source=kernel.source
        )
        transpose = emulator.build_file(kernel.source, entry=TRANSPOSE, defines=variant.macros, hooks=kernel.hooks)
        report = emulator.launch(transpose, [first, fp8], grid=self.transpose_grid, block=(_TRANSPOSE_THREADS, 1, 1))
        if report.findings:
            raise EmulationError(f"{TRANSPOSE} on the CPU: {report.findings[0]}", report=report)
        maps = self.maps(kernel.parameters["TILE_KV"])
        value = maps_for({name: tensor_map.emulated() for name, tensor_map in maps.items()})
        within = {name: blocks if name == "V" else pointers[name] for name in maps}
        return [first, emulator.Structure(value=value, pointers=within), fp8]

    def maps(self, tile_kv: int) -> dict[str, TensorMap]:
        """The tensor maps, which treat two e4m3 elements as one 16-bit element."""
        dtype = self.plan.problem.dtype
        made = {
            name: tile_map(_in_pairs(self.views[name]), dtype, rows)
            for name, rows in (("Q", _WGMMA_ROWS), ("K", tile_kv))
        }
        blocks = replace(self.views["V"], shape=self.blocks_shape, strides=contiguous_strides(self.blocks_shape))
        made["V"] = replace(tile_map(blocks, dtype, tile_kv // _STEP_KEYS * _COPY_ROWS), swizzle=0)
        if self.plan.aligned:
            made["O"] = tile_map(self.views["O"], dtype, WARP_ROWS)
        return made


def _in_pairs(view: DeviceArray) -> DeviceArray:
    *outer, head_dim = view.shape
    return replace(view, shape=(*outer, head_dim // 2), strides=(*(step // 2 for step in view.strides[:3]), 1))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _run_on_gpu(call: _Call, here: Place, lse: DeviceArray | None, params: Mapping[str, int]) -> None:
    if arrays.library_of(here.like) != "torch":  # no other library has e4m3 on a GPU
        raise DTypeError(f"q: wanted a torch tensor of float8_e4m3fn on a GPU, got {type(here.like).__name__}")
    gpu.require()
    plan, device, stream = call.plan, call.plan.device, here.stream
    assert stream is not None
    info = gpu.info(device)
    plan.stage.require(plan.problem, info.arch)
    job = compiler.Job.of(plan.stage, plan.problem, arch=info.arch, aligned=plan.aligned, overrides=params)
    code = recipes.loaded(job, device)
    counters, own = recipes.work_memory(here.like, device, stream, (WORK_COUNTERS, WORK_COUNTERS)), call.params
    own.LSE, own.work = None if lse is None else lse.pointer, counters[1]
    with here.enqueued():  # released when this returns, possibly before the kernels start
        blocks = here.empty(call.blocks_shape, "int16")
    with gpu.context(device):
        _launches(call, own, code, blocks.data_ptr(), stream)()


def _launches(
    call: _Call, params: AttentionParams, code: recipes.Loaded, blocks: int, stream: int
) -> Callable[[], None]:
    """Build the launch of both kernels; `blocks`: address of the transposed V."""
    of_fp8, device = call.of_fp8, call.plan.device
    of_fp8.V_blocks = blocks
    for name, view in call.scales.items():
        setattr(of_fp8, name, view.pointer)
    addresses = {name: view.pointer for name, view in call.views.items()} | {"V": blocks}
    with gpu.context(device):
        of_maps = call.maps(code.cubin.parameters["TILE_KV"])
        maps = {name: tensor_map.encoded(addresses[name]) for name, tensor_map in of_maps.items()}
    transpose = gpu.Launch(
        gpu.load(replace(code.cubin, entry=TRANSPOSE), device, smem_bytes=0),
        grid=call.transpose_grid,
        block=(_TRANSPOSE_THREADS, 1, 1),
        smem_bytes=0,
        params=[params, of_fp8],
        stream=stream,
    )
    shape, grid = code.fitted(call.plan.problem)
    attention = recipes.launch_of(code.function, shape, grid, [params, maps_for(maps), of_fp8], stream)

    def launch() -> None:
        transpose()
        attention()

    return launch


def passes(
    recipe: recipes.Recipe, views: Mapping[str, DeviceArray], params: AttentionParams, stream: int
) -> Callable[[], None]:
    """Run f0_e4m3 on 16-bit arrays, quantised by torch, and again when a torch tensor has been written. See
    `attention._runner`."""
    stored = TorchCopies({name: views[name].owner for name in "QKV"}, quantize_e4m3, stream)
    made = {name: on_device(x, name) for name, (x, _) in stored.made.items()}
    scales = {f"{name}_scale": on_device(scale, name) for name, (_, scale) in stored.made.items()}
    call = _Call(recipe.plan, {**views, **made}, scales)
    own = call.params
    own.LSE, own.work, own.fallbacks = params.LSE, params.work, params.fallbacks
    with torch_stream(stream, recipe.plan.device):
        blocks = stored.made["V"][0].new_empty(call.blocks_shape, dtype=importlib.import_module("torch").int16)
    return stored.before(_launches(call, own, recipe.code, blocks.data_ptr(), stream), blocks)


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def emulated_passes(run: EmulatedCall) -> list[emulator.Structure]:
    """Run f0_e4m3 on the CPU on 16-bit arrays, quantised by NumPy. See `attention._runner`."""
    narrow = np.float16 if run.planned.problem.dtype == "float16" else ml_dtypes.bfloat16
    stored = {name: quantize_e4m3(run.views[name].owner.view(narrow)) for name in "QKV"}
    views = {name: on_host(x, name) for name, (x, _) in stored.items()}
    scales = {f"{name}_scale": on_host(scale, name) for name, (_, scale) in stored.items()}
    return _Call(run.planned, {**run.views, **views}, scales).on_cpu(run)
