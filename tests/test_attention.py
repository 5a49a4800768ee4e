"""What the public call refuses and what it tells a kernel, without a GPU."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from emulation import hopper_sum
from shared import needs_compiler

import flashlab
from flashlab import attention
from flashlab.build import compiler
from flashlab.build.compiler import LaunchShape, compile_file
from flashlab.core import errors
from flashlab.core.problem import DTYPES, DType, Problem
from flashlab.kernels import registry
from flashlab.measure.timer import MicroParams
from flashlab.record.checks import Fallbacks
from flashlab.run import arrays as arrays_module
from flashlab.run import choice, gpu, recipes
from flashlab.run.arguments import (
    MAX_SHARES,
    AttentionMaps,
    AttentionParams,
    FeatureParams,
    TensorView,
    VarlenParams,
    grid_for,
    params_for,
    tile_map,
    tile_maps,
)
from flashlab.run.arrays import DeviceArray, contiguous_strides
from flashlab.run.attention import prepare
from flashlab.run.fp8 import Fp8Params
from flashlab.run.lru import LruCache
from flashlab.run.paged import PagedCache
from flashlab.run.plan import plan
from flashlab.run.tensor_map import TensorMap
from flashlab.show.trial import _aligned_like_cuda
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

ARCH = "sm_90a"
attention_module = sys.modules["flashlab.run.attention"]  # the package's attribute of that name is the function
EARLIER = tuple(
    stage
    for stage in (*registry.STAGES.values(), *registry.DEAD_ENDS.values())
    if stage.language == "cuda" and not stage.tensor_maps and stage.id != "tile48"
)
"""tests/test_hopper.py and tests/test_triton_code.py ask the others; tile48 is kept because its output is wrong."""


def array(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    pointer: int = 1 << 20,
    dtype: str = "float16",
    device: int = 0,
    readonly: bool = False,
) -> DeviceArray:
    return DeviceArray(
        pointer=pointer,
        shape=shape,
        strides=strides or contiguous_strides(shape),
        dtype=dtype,
        device=device,
        owner=None,
        library="other",
        readonly=readonly,
    )


def qkv(
    batch: int = 2, heads: int = 4, kv_heads: int = 4, q_len: int = 8, kv_len: int = 8, dim: int = 64, **more: Any
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    kv = (batch, kv_heads, kv_len, dim)
    return (
        array(batch, heads, q_len, dim, **more),
        array(*kv, pointer=1 << 24, **more),
        array(*kv, pointer=1 << 25, **more),
    )


OUT = 1 << 26


def test_a_sound_call_picks_the_best_stage_and_the_usual_scale() -> None:
    found = plan(*qkv(q_len=3, kv_len=5, kv_heads=2), arch=ARCH, causal=True)
    assert found.problem == Problem(
        batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=5, head_dim=64, dtype="float16", mask="causal"
    )
    assert found.stage is registry.best(found.problem, ARCH)
    assert found.scale == 0.125
    assert found.aligned
    assert plan(*qkv(), arch=ARCH, stage="00_naive", scale=2).scale == 2.0


def test_the_package_exports_the_calls() -> None:
    assert flashlab.attention is attention
    assert flashlab.prepare is prepare
    assert flashlab.prepare.__doc__
    with pytest.raises((errors.NoGpuError, errors.DeviceError)):
        flashlab.attention(np.zeros((1, 1, 1, 64), np.float16), None, None)


# --- on the CPU ---


HOST_PROBLEM = Problem(batch=2, q_heads=4, kv_heads=2, q_len=33, kv_len=50, head_dim=64, mask="causal")


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_run_on_the_cpu(dtype: DType) -> None:
    problem = replace(HOST_PROBLEM, dtype=dtype)
    q, k, v = make_inputs(problem)
    kept = [x.copy() for x in (q, k, v)]
    out, lse = flashlab.attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, out.dtype, lse.dtype) == (q.shape, q.dtype, np.float32)
    assert check(out, lse, q, k, v, causal=True, dtype=dtype).reason == ""
    assert all((x.view(np.uint16) == y.view(np.uint16)).all() for x, y in zip((q, k, v), kept, strict=True))
    named = flashlab.attention(q, k, v, causal=True, device="cpu", stage=registry.best(problem, None).id)
    assert (named.view(np.uint16) == out.view(np.uint16)).all()


@needs_compiler
def test_any_strides_scale_params_and_an_output_of_the_callers() -> None:
    packed = make_inputs(replace(HOST_PROBLEM, q_heads=3, kv_heads=3, q_len=50))[0].transpose(0, 2, 1, 3)
    packed = np.ascontiguousarray(np.concatenate([packed, packed[:, ::-1], packed[::-1]], axis=2))
    q, k, v = (packed[:, :, i : i + 3].transpose(0, 2, 1, 3) for i in (0, 3, 6))
    out = np.zeros((2, 3, 50, 65), np.float16)
    given = flashlab.attention(
        q, k, v, scale=0.5, out=out[..., :64], stage="01_coalesced", params={"TILE_KV": 32}, device="cpu"
    )
    assert np.shares_memory(given, out)
    assert (out[..., 64] == 0).all()
    assert check(given, None, q, k, v, causal=False, dtype="float16", scale=0.5).reason == ""
    reversed_rows = flashlab.attention(q[:, :, ::-1], k, v, scale=0.5)
    assert check(reversed_rows[:, :, ::-1], None, q, k, v, causal=False, dtype="float16", scale=0.5).reason == ""


@needs_compiler
@pytest.mark.parametrize("stage", ["wmma_no_smem", "04_wmma_qk"])
def test_rows_may_lie_in_reverse_order(stage: str) -> None:
    """WMMA loads from global memory want boundaries of 32 bytes, and an unsigned stride."""
    arrays = [_aligned_like_cuda(values)[:, :, ::-1] for values in make_inputs(Problem.parse("1x2x32x64"))]
    out = flashlab.attention(*arrays, stage=stage)
    assert check(out, None, *arrays, causal=False, dtype="float16").reason == ""


@needs_compiler
def test_other_libraries_hand_over_host_memory_through_dlpack() -> None:
    class Foreign:
        def __init__(self, values: Any) -> None:
            self.values = values

        def __dlpack__(self, **options: Any) -> Any:
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    q, k, v = make_inputs(HOST_PROBLEM)
    out = flashlab.attention(Foreign(q), Foreign(k), Foreign(v), causal=True)
    assert isinstance(out, np.ndarray)
    assert (out == flashlab.attention(q, k, v, causal=True)).all()


@needs_compiler
@pytest.mark.parametrize("schedule", ["descending", "seeded:3"])
def test_emulate_reports(schedule: str) -> None:
    q, k, v = make_inputs(HOST_PROBLEM)
    ran = flashlab.emulate(q, k, v, causal=True, stage="05_wmma", schedule=schedule, races=True)
    assert ran.report.status == "ok"
    assert ran.report.findings == ()
    assert {str(counter.place).partition(":")[0] for counter in ran.report.counters} >= {"kernels/05_wmma.cu"}
    assert ran.kernel.hooks
    assert check(ran.out, ran.lse, q, k, v, causal=True, dtype="float16").reason == ""


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stage", EARLIER, ids=lambda stage: stage.id)
def test_a_row_that_sees_a_nan_is_nan_and_so_is_its_log_sum_exp(stage: registry.Stage, causal: bool) -> None:
    """A training loop finds a NaN by either; -inf would say that the row saw no key."""
    problem = Problem(batch=1, q_heads=2, kv_heads=2, q_len=40, kv_len=70, head_dim=64)
    q, k, v = make_inputs(problem, seed=0)
    k[0, 1, 50, 3] = np.nan
    found = flashlab.emulate(q, k, v, causal=causal, stage=stage.id)
    out, lse = np.asarray(found.out, np.float64), np.asarray(found.lse)
    sees = np.arange(40) + 70 - 40 >= 50 if causal else np.full(40, True)
    assert (np.isnan(out[0]).all(axis=-1) == np.stack([np.full(40, False), sees])).all()
    assert (np.isnan(lse[0]) == np.stack([np.full(40, False), sees])).all()


@needs_compiler
@needs_compiler
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("stage", ["00_naive", "08_swizzle", "17_around_the_loop", "d0_split_kv", "d15_short_starts"])
def test_scores_as_large_as_the_call_promises(stage: str, scale: float) -> None:
    """Each query takes the value of its best key, by far: most stages round a row's reference to FP32."""
    q, k, v = make_inputs(Problem.of(1, 2, 1, 16, 150, 64))
    scores = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3))
    factor = 2**27 / np.abs(scores).max()
    out, lse = flashlab.attention(q, k, v, scale=scale * factor, stage=stage, return_lse=True)
    assert np.array_equal(out, v[0, 0][scores.argmax(axis=3)])
    assert np.allclose(lse, factor * scores.max(axis=3), rtol=1e-6, atol=0)


def test_too_much_for_a_cpu_is_refused_with_an_estimate() -> None:
    q = np.zeros((1, 1, 1, 64), np.float16)
    long = np.broadcast_to(q, (64, 32, 8192, 64))
    with pytest.raises(
        errors.TooLargeError, match=r"would take about \d+ (hours|minutes) on .* timeout_s=None.*--insist"
    ) as caught:
        flashlab.attention(long, long, long)
    assert caught.value.seconds > 600


class _OnGpu:
    """A stand-in for what cannot be had here: an array on a GPU."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}


class _Unexportable:
    """An array that cannot be handed over, as JAX has them over several devices."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("only unsharded arrays")

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("only unsharded arrays")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"device": "tpu"}, errors.ParameterError, "device: wanted cpu, gpu, cuda"),
        (
            {"q": _OnGpu(), "device": "cpu"},
            errors.DeviceError,
            r"q: wanted a NumPy array, .* on a GPU.*cupy.asnumpy\(q\)",
        ),
        ({"k": _OnGpu()}, errors.DeviceError, r"k: wanted a NumPy array, .* on a GPU"),
        ({"v": [1.0]}, errors.DeviceError, "v: wanted a NumPy array, .*, got list"),
        ({"v": None}, errors.DeviceError, "v: wanted a NumPy array, .*, got None$"),
        ({"stream": 0}, errors.ParameterError, "stream: wanted None"),
        ({"stage": "99_none"}, errors.UnknownStageError, "00_naive"),
        ({"params": {"NONE": 1}}, errors.ParameterError, "no parameter"),
        ({"q": np.zeros((1, 1, 1, 64), np.float32)}, errors.DTypeError, "float16 or bfloat16, got float32"),
        (
            {"q": np.zeros((1, 1, 1, 64), ">f2")},
            errors.DTypeError,
            r'byte order, got >f2\. `q\.astype\("float16"\)` works',
        ),
        (
            {"q": np.zeros((1, 1, 1, 64), [("x", "f2"), ("y", "u1")])["x"]},
            errors.LayoutError,
            r"strides of whole elements, got .* bytes\. `ascontiguousarray\(q\)` makes one",
        ),
        ({"q": _Unexportable()}, errors.DeviceError, "q: wanted a NumPy array, .* got _Unexportable: only unsharded"),
        ({"k": _Unexportable()}, errors.DeviceError, "k: wanted a NumPy array, .* got _Unexportable: only unsharded"),
        ({"q": np.zeros((1, 1, 64), np.float16)}, errors.ShapeError, "4 dimensions"),
        (
            {"k": np.ma.zeros((1, 1, 1, 64), np.float16)},
            errors.DTypeError,
            r"k: wanted .* masked array.*`k.filled\(\)`",
        ),
        ({"out": np.zeros((1, 1, 1, 64), np.float32)}, errors.DTypeError, "out: wanted the type of q"),
        (
            {"q": np.zeros((1, 1, 0, 64), np.float16), "out": np.zeros((1, 1, 0, 64), np.float16)},
            errors.ShapeError,
            "q: wanted at least one element",
        ),
        ({"q": np.zeros((1, 1, 1, 96), np.float16)}, errors.ShapeError, "head dim"),
    ],
)
def test_bad_input_on_the_cpu_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    one = np.zeros((1, 1, 1, 64), np.float16)
    call: dict[str, Any] = {"q": one, "k": one, "v": one, **changes}
    with pytest.raises(error, match=words):
        flashlab.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, errors.DeviceError, r"q: wanted a NumPy array, a torch or CuPy tensor, .* got None$"),
        ([[1.0]], errors.DeviceError, r"got list\. `numpy\.asarray\(q, dtype=numpy\.float16\)` makes an array of it"),
        (1.5, errors.DeviceError, r"got float\. `numpy\.asarray"),
        ("q", errors.DeviceError, r"q: wanted .* got str$"),
        (
            np.zeros((1, 1, 1, 64), np.float32),
            errors.DTypeError,
            r'q: wanted float16 or bfloat16, got float32\. `q\.astype\("float16"\)` works',
        ),
        (np.zeros((1, 1, 1, 64), np.int64), errors.DTypeError, "q: wanted float16 or bfloat16, got int64"),
    ],
)
@pytest.mark.parametrize("call", [flashlab.attention, flashlab.emulate])
def test_what_is_no_array_of_ours_is_refused_with_what_works(
    call: Any, value: Any, error: type[Exception], words: str
) -> None:
    """Before anything asks for a GPU, and the same for every entry point."""
    if call is flashlab.emulate:
        words = words.replace("a NumPy array, a torch or CuPy tensor", "a NumPy array")
    with pytest.raises(error, match=words):
        call(value, value, value)


def test_a_torch_tensor_of_another_type_is_advised_in_torchs_words() -> None:
    q = array(1, 1, 1, 64, dtype="float32")
    with pytest.raises(errors.DTypeError, match=r"got float32\. `q\.half\(\)` works"):
        plan(*(replace(q, library="torch"),) * 3, arch=ARCH)


def test_the_public_calls_are_documented_and_lazy() -> None:
    for name in ("attention", "emulate", "prepare"):
        text = getattr(flashlab, name).__doc__
        assert "Args:" in text
        assert "Raises:" in text
    assert {"attention", "emulate", "prepare"} <= set(dir(flashlab))
    program = "import sys, flashlab; print([name for name in sys.modules if 'flashlab.run' in name or name == 'numpy'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_first_call_need_not_import_the_drivers_bindings() -> None:
    """They take tens of milliseconds, and a first call without compilation should take less than 50."""
    pytest.importorskip("cuda.bindings.driver")
    program = "import sys, flashlab; flashlab.attention; print('cuda.bindings.driver' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_read_only_output_is_refused() -> None:
    one = np.zeros((1, 1, 1, 64), np.float16)
    out = one.copy()
    out.flags.writeable = False
    with pytest.raises(errors.LayoutError, match="read-only"):
        flashlab.attention(one, one, one, out=out)


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_host_memory_is_refused_where_a_gpu_was_asked_for(device: str) -> None:
    one = np.zeros((1, 1, 1, 64), np.float16)
    with pytest.raises((errors.NoGpuError, errors.DeviceError)):
        flashlab.attention(one, one, one, device=device)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ((array(8, 64), array(8, 64), array(8, 64)), errors.ShapeError, "4 dimensions"),
        (qkv(q_len=0), errors.ShapeError, "at least one element"),
        (qkv(kv_len=0), errors.ShapeError, "no keys"),
        (qkv(batch=0), errors.ShapeError, "at least one element"),
        ((qkv()[0], qkv(dim=128)[1], qkv(dim=128)[2]), errors.ShapeError, "head dim of q, 64, got 128"),
        ((qkv()[0], qkv(batch=3)[1], qkv(batch=3)[2]), errors.ShapeError, "batch of q, 2, got 3"),
        ((qkv()[0], qkv()[1], qkv(kv_len=9)[2]), errors.ShapeError, "shape of k"),
        (qkv(heads=4, kv_heads=3), errors.ShapeError, "multiple of kv_heads"),
        (qkv(heads=65536, kv_heads=65536), errors.ShapeError, "q_heads: wanted at most 65535, got 65536"),
        (qkv(batch=65536), errors.ShapeError, "batch: wanted at most 65535, got 65536"),
        (qkv(dtype="float32"), errors.DTypeError, "float16 or bfloat16, got float32"),
        ((*qkv()[:2], qkv(dtype="bfloat16")[2]), errors.DTypeError, "one type"),
        ((*qkv()[:2], qkv(device=1)[2]), errors.DeviceError, "got GPU 1"),
        ((*qkv()[:2], array(2, 4, 8, 64, strides=(2048, 512, 1, 8))), errors.LayoutError, "contiguous last dimension"),
        (
            (array(2, 4, 8, 64, pointer=4097), *qkv()[1:]),
            errors.LayoutError,
            r"multiple of 2, got 0x1001\. A copy works",
        ),
        (qkv(dim=80), errors.UnsupportedError, "head dim"),
        (qkv(dim=63), errors.UnsupportedError, "head dim"),
    ],
)
def test_unsound_arrays_are_refused(arrays: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(*arrays, arch=ARCH)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": float("nan")}, errors.ParameterError, "finite"),
        ({"scale": float("inf")}, errors.ParameterError, "finite"),
        ({"scale": "1"}, errors.ParameterError, "finite"),
        ({"scale": True}, errors.ParameterError, "finite"),
        (
            {"scale": 1e39},
            errors.ParameterError,
            r"scale: wanted a finite number of magnitude at most 2.36e\+38, .* got 1e\+39",
        ),
        ({"scale": -3e38}, errors.ParameterError, "finite"),
        ({"scale": 10**400}, errors.ParameterError, "finite"),
        ({"softcap": 3e38}, errors.ParameterError, "softcap: wanted a positive finite number"),
        ({"softcap": 10**400}, errors.ParameterError, "softcap: wanted a positive finite number"),
        ({"softcap": -1.0}, errors.ParameterError, "softcap: wanted a positive finite number"),
        ({"softcap": None}, errors.ParameterError, "softcap: wanted a positive finite number"),
        (
            {"softcap": 1e-39, "scale": 1.0},
            errors.ParameterError,
            "softcap: wanted scale / softcap to fit float32 for scale 1,",
        ),
        ({"causal": 1}, errors.ParameterError, "True or False"),
        ({"stage": 5}, errors.UnknownStageError, "stage: wanted a stage's id as text, such as '.*', got 5"),
        ({"stage": ["05_wmma"]}, errors.UnknownStageError, "stage: wanted a stage's id as text"),
        ({"stage": "06"}, errors.UnknownStageError, "06_cp_async"),
        ({"stage": "06_cp_async", "arch": "sm_75"}, errors.UnsupportedError, "Runnable on sm_75: 00_naive"),
        ({"out": array(2, 4, 8, 128, pointer=OUT)}, errors.ShapeError, "shape of q"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, dtype="bfloat16")}, errors.DTypeError, "type of q"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, device=1)}, errors.DeviceError, "GPU 1"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, readonly=True)}, errors.LayoutError, "read-only"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(0, 512, 64, 1))}, errors.LayoutError, "distinct address"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(2048, 512, 32, 1))}, errors.LayoutError, "distinct address"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(8192, 2048, 128, 2))}, errors.LayoutError, "contiguous last"),
        ({"out": qkv()[0]}, errors.LayoutError, "apart from q"),
        ({"out": array(2, 4, 8, 64, pointer=(1 << 24) - 64)}, errors.LayoutError, "apart from k"),
    ],
)
def test_unsound_options_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(*qkv(), **{"arch": ARCH, **options})


def test_a_soft_cap_may_be_a_number_of_numpy() -> None:
    found = plan(*qkv(), arch=ARCH, softcap=np.float32(2))  # type: ignore[arg-type]
    assert (found.problem.softcap, type(found.problem.softcap)) == (2.0, float)


@pytest.mark.parametrize("value", [1, "no", None, np.True_])
@pytest.mark.parametrize("flag", ["causal", "return_lse"])
def test_every_call_wants_flags_to_be_true_or_false(flag: str, value: Any) -> None:
    one, pool, stored = (np.zeros((1, 1, 1, 128), kind) for kind in (np.float16, np.float16, ml_dtypes.float8_e4m3fn))
    pages = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    row, ends = one[0], np.asarray([0, 1], np.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1}
    calls: tuple[Callable[..., Any], ...] = (
        lambda **flags: flashlab.attention(one, one, one, **flags),
        lambda **flags: flashlab.emulate(one, one, one, **flags),
        lambda **flags: flashlab.fp8_attention(stored, stored, stored, **flags),
        lambda **flags: flashlab.paged_attention(one, pool, pool, *pages, **flags),
        lambda **flags: flashlab.varlen_attention(row, row, row, **lengths, **flags),
    )
    for call in calls:
        with pytest.raises(errors.ParameterError, match=f"{flag}: wanted True or False"):
            call(**{flag: value})


@pytest.mark.parametrize(
    ("call", "flag"),
    [
        (flashlab.emulate, "races"),
        (flashlab.emulate, "count_fallbacks"),
        (flashlab.prepare, "may_spill"),
        (flashlab.prepare, "count_fallbacks"),
    ],
)
def test_flags_of_one_call_are_true_or_false_too(call: Callable[..., Any], flag: str) -> None:
    one = np.zeros((1, 1, 1, 64), np.float16)
    with pytest.raises(errors.ParameterError, match=f"{flag}: wanted True or False, got 1"):
        call(one, one, one, **{flag: 1})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"params": [("TILE_KV", 64)]},
            errors.ParameterError,
            r"params: wanted a mapping from tunables to values, such as {",
        ),
        ({"params": "a"}, errors.ParameterError, "params: wanted"),
        ({"params": {1: 64}}, errors.ParameterError, "params: wanted"),
        ({"device": ["cpu"]}, errors.ParameterError, r"device: wanted cpu, gpu, cuda, .* got \['cpu'\]"),
        ({"source": 5}, errors.ParameterError, "source: wanted the path of an edited copy of the stage's file"),
        ({"source": "no/such.cu"}, errors.ParameterError, r"source: wanted a CUDA C\+\+ file, got .*/no/such\.cu"),
        ({"sequences": ([0, 1], [0, 1], 1)}, errors.ParameterError, r"got tuple\. `flashlab.Sequences\(\*sequences\)`"),
        ({"timeout_s": "a"}, errors.ParameterError, "timeout_s: wanted a positive number of seconds"),
        ({"timeout_s": 0}, errors.ParameterError, "timeout_s: wanted a positive number of seconds, .* got 0"),
        ({"timeout_s": -1.0}, errors.ParameterError, "timeout_s: wanted"),
        ({"threads": "a"}, errors.ParameterError, "threads: wanted a positive integer"),
        ({"threads": 0}, errors.ParameterError, "threads: wanted a positive integer"),
        ({"cancel": 1}, errors.ParameterError, "cancel: wanted a threading.Event, or None, got 1"),
        ({"surroundings": 3}, errors.ParameterError, "surroundings: wanted a NumPy array for .* out, lse, got int$"),
        ({"surroundings": {"k": [1]}}, errors.ParameterError, "surroundings: wanted .* got list for k"),
        ({"surroundings": {"O": np.zeros(9)}}, errors.ParameterError, "surroundings: wanted .* got ndarray for O"),
        ({"surroundings": {"q": np.zeros(9)}}, errors.LayoutError, "Q: wanted surroundings that the array lies in"),
    ],
)
def test_what_is_no_such_argument_is_refused_by_its_name(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    one = np.zeros((1, 1, 1, 64), np.float16)
    call: Any = flashlab.attention if "device" in change else flashlab.emulate
    with pytest.raises(error, match=words):
        call(one, one, one, **change)


@needs_compiler
def test_an_edited_source_may_be_named_by_text() -> None:
    one = np.ones((1, 1, 1, 64), np.float16)
    ran = flashlab.emulate(one, one, one, stage="01_coalesced", source=str(registry.get("01_coalesced").source))
    assert (ran.out == 1).all()


def test_a_log_sum_exp_lies_apart_and_may_be_written() -> None:
    memory = np.zeros(1 << 12, np.uint8)
    q, k, v, out = (memory[i << 9 : (i + 1) << 9].view(np.float16).reshape(1, 1, 4, 64) for i in range(4))
    for i, name in enumerate(("q", "k", "v", "out")):
        lse = memory[(i << 9) + 496 :][:16].view(np.float32).reshape(1, 1, 4)
        with pytest.raises(errors.LayoutError, match=f"lse: wanted memory apart from {name}, got memory that overlaps"):
            flashlab.emulate(q, k, v, out=out, lse=lse)
    lse = np.zeros((1, 1, 4), np.float32)
    lse.flags.writeable = False
    with pytest.raises(errors.LayoutError, match="lse: wanted memory that may be written, got a read-only"):
        flashlab.emulate(q, k, v, lse=lse)
    halfway = memory[2:18].view(np.float32).reshape(1, 1, 4)
    with pytest.raises(errors.LayoutError, match="lse: wanted an address that is a multiple of 4, got 0x"):
        flashlab.emulate(*(np.zeros((1, 1, 4, 64), np.float16) for _ in "qkv"), lse=halfway)
    with pytest.raises(errors.DeviceError, match=r"`numpy\.asarray\(lse, dtype=numpy\.float32\)` makes"):
        flashlab.emulate(q, k, v, lse=[0.0])


def test_time_that_a_cpu_takes_is_for_people() -> None:
    texts = [attention_module._duration(seconds) for seconds in (0.5, 1e-9, 45.2, 840, 7200)]
    assert texts == ["0.5 seconds", "1e-09 seconds", "45 seconds", "14 minutes", "2 hours"]


def test_any_outer_strides_are_taken() -> None:
    bshd = (8 * 4 * 64, 64, 4 * 64, 1)
    q = array(2, 4, 8, 64, strides=bshd)
    expanded = array(2, 4, 8, 64, strides=(0, 0, 64, 1), pointer=1 << 24)
    reversed_rows = array(2, 4, 8, 64, strides=(2048, 512, -64, 1), pointer=(1 << 25) + 7 * 128)
    out = array(2, 4, 8, 64, strides=bshd, pointer=OUT)
    assert plan(q, expanded, reversed_rows, out=out, arch=ARCH, stage="06_cp_async").aligned


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("strides", "offset"), [((2080, 520, 65, 1), 0), ((2048, 512, 64, 1), 2), ((2080, 516, 64, 1), 0), (None, 8)]
)
def test_one_misaligned_row_makes_the_call_misaligned(which: int, strides: tuple[int, ...] | None, offset: int) -> None:
    arrays = [*qkv(), array(2, 4, 8, 64, pointer=OUT)]
    arrays[which] = array(2, 4, 8, 64, strides=strides, pointer=arrays[which].pointer + offset)
    assert not plan(*arrays[:3], out=arrays[3], arch=ARCH, stage="06_cp_async").aligned


def test_strides_of_single_elements_do_not_matter() -> None:
    odd = array(1, 1, 1, 64, strides=(13, 7, 3, 1))
    k, v = (array(1, 1, 8, 64, strides=(5, 3, 64, 1), pointer=p) for p in (1 << 24, 1 << 25))
    for stage in registry.STAGES:
        assert plan(odd, k, v, arch=ARCH, stage=stage).aligned
        out = array(1, 1, 1, 64, strides=(0, 0, 0, 1), pointer=OUT)
        assert plan(odd, k, v, out=out, arch=ARCH, stage=stage).aligned


def test_a_stage_that_lacks_the_type_names_those_that_have_it() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"00_naive takes float16, got bfloat16. Runnable: "):
        plan(*qkv(dtype="bfloat16"), arch=ARCH, stage="00_naive")


def test_what_the_kernel_gets() -> None:
    q, k, v = qkv(kv_heads=2, q_len=9, kv_len=5)
    out = array(2, 4, 9, 64, strides=(8 * 4 * 64 * 2, 64, 4 * 64, 1), pointer=OUT)
    found = plan(q, k, v, out=out, arch=ARCH, scale=0.5)
    params = params_for(found.problem, found.scale, {"Q": q, "K": k, "V": v, "O": out})
    assert (params.q_heads, params.kv_heads, params.q_len, params.kv_len) == (4, 2, 9, 5)
    assert params.scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    assert (params.LSE, params.work, params.fallbacks) == (None, None, None)
    assert params.batch == 2
    assert (params.O.data, params.O.batch_stride, params.O.head_stride, params.O.row_stride) == (OUT, 4096, 64, 256)
    assert (params.K.data, params.K.batch_stride) == (1 << 24, 2 * 5 * 64)
    assert grid_for(found.problem, LaunchShape(threads=128, smem_bytes=0, tile_q=4)) == (3, 4, 2)


# --- stages with tensor maps, and persistent ones ---


@pytest.fixture
def sum_stage(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry.STAGES, hopper_sum.STAGE.id, hopper_sum.STAGE)
    return hopper_sum.STAGE.id


def test_a_persistent_grid_is_what_is_resident_and_at_most_the_tiles() -> None:
    shape = LaunchShape(threads=384, smem_bytes=0, tile_q=64, persistent=True)
    problem = Problem(batch=2, q_heads=3, kv_heads=3, q_len=65, kv_len=9, head_dim=64)
    assert grid_for(problem, shape, 132) == (12, 1, 1)
    assert grid_for(problem, shape, 7) == (7, 1, 1)
    assert grid_for(problem, shape) == (3, 1, 1)
    assert grid_for(replace(problem, batch=1, q_heads=1, kv_heads=1), shape) == (2, 1, 1)


def test_a_grid_is_in_whole_clusters_of_neighbouring_tiles() -> None:
    shape = LaunchShape(threads=384, smem_bytes=0, tile_q=64, persistent=True, cluster=2)
    problem = Problem(batch=2, q_heads=3, kv_heads=3, q_len=129, kv_len=9, head_dim=64)
    assert grid_for(problem, shape, 132) == (24, 1, 1)
    assert grid_for(problem, shape, 7) == (6, 1, 1)
    assert grid_for(problem, shape, 1) == (2, 1, 1)
    assert grid_for(problem, replace(shape, cluster=1), 7) == (7, 1, 1)
    assert grid_for(problem, replace(shape, persistent=False)) == (4, 3, 2)
    assert grid_for(problem, replace(shape, persistent=False, cluster=0)) == (3, 3, 2)


@pytest.mark.usefixtures("sum_stage")
def test_a_copy_of_k_and_v_may_have_fewer_panels_than_a_tile() -> None:
    arrays = {name: array(2, 4, 100, 128, pointer=OUT) for name in "QKVO"}
    found = plan(*(arrays[name] for name in "QKV"), arch=ARCH, stage=hopper_sum.STAGE.id)
    shape = LaunchShape(threads=384, smem_bytes=0, tile_q=128, box_q=64, box_kv=80, persistent=True, panels_kv=1)
    boxes = [
        one.box for each in (shape, replace(shape, panels_kv=0)) for one in tile_maps(found, each, arrays).values()
    ]
    assert boxes[:4] == [(64, 64, 2, 1, 1), (64, 80, 1, 1, 1), (64, 80, 1, 1, 1), (64, 16, 2, 1, 1)]
    assert boxes[4:] == [(64, 64, 2, 1, 1), (64, 80, 2, 1, 1), (64, 80, 2, 1, 1), (64, 16, 2, 1, 1)]


@pytest.mark.parametrize(("head_dim", "panels"), [(64, 1), (128, 2)])
def test_a_tensor_map_of_a_tile(head_dim: int, panels: int) -> None:
    bshd = array(2, 4, 100, head_dim, strides=(100 * 4 * head_dim, head_dim, 4 * head_dim, 1))
    found = tile_map(bshd, "float16", 80)
    assert found.dims == (64, 100, panels, 4, 2)
    assert found.strides == (4 * head_dim * 2, 128, head_dim * 2, 100 * 4 * head_dim * 2)
    assert found.box == (64, 80, panels, 1, 1)
    assert tile_map(bshd, "float16", 80, 1).box == (64, 80, 1, 1, 1)
    assert (found.data_type, found.swizzle, found.nan_fill) == (6, 3, False)
    assert tile_map(bshd, "bfloat16", 80).data_type == 9


def test_a_tensor_map_has_sound_strides_where_there_is_one_element() -> None:
    odd = array(1, 1, 1, 64, strides=(13, -7, 0, 1))
    assert tile_map(odd, "float16", 64).strides == (128, 128, 128, 128)
    assert tile_map(array(1, 3, 1, 64, strides=(13, 72, 0, 1)), "float16", 64).strides == (128, 128, 144, 128)


@pytest.mark.usefixtures("sum_stage")
@pytest.mark.parametrize(
    ("strides", "offset", "mappable"),
    [
        (None, 0, True),
        ((8 * 4 * 64, 64, 4 * 64, 1), 0, True),
        ((2080, 520, 72, 1), 0, True),
        (None, 8, False),
        ((2080, 520, 65, 1), 0, False),
        ((2048, 0, 64, 1), 0, False),
        ((2048, 512, -64, 1), 1024, False),
        ((2**39, 512, 64, 1), 0, False),
        ((2**38, 512, 64, 1), 0, True),
    ],
)
def test_what_a_tensor_map_can_describe(strides: tuple[int, ...] | None, offset: int, mappable: bool) -> None:
    k = array(2, 4, 8, 64, strides=strides, pointer=(1 << 24) + offset)
    q, _, v = qkv()
    found = plan(q, k, v, arch=ARCH, stage=hopper_sum.STAGE.id)
    assert found.aligned is mappable
    assert found.why_slow.startswith("" if mappable else "k ")
    one = array(1, 1, 1, 64, strides=(0, -1, 3, 1))
    assert plan(one, one, one, arch=ARCH, stage=hopper_sum.STAGE.id).aligned


def test_a_plan_says_why_it_is_slow(sum_stage: str) -> None:
    def why(stage: str, **of_v: Any) -> str:
        q, k, _ = qkv()
        return plan(q, k, array(2, 4, 8, 64, **{"pointer": 1 << 25, **of_v}), arch=ARCH, stage=stage).why_slow

    for stage in (sum_stage, "06_cp_async"):
        assert why(stage) == ""
        assert why(stage, pointer=(1 << 25) + 8) == "v starts at 0x2000008, no multiple of 16 bytes"
        assert why(stage, strides=(2080, 520, 65, 1)) == "v has a row stride of 130 bytes, no multiple of 16"
    assert why("06_cp_async", strides=(512, 0, 64, 1)) == ""
    for row in (-64, 1 << 32):
        assert why("06_cp_async", strides=(2048, 512, row, 1)) == ""
        assert why("wmma_no_smem", strides=(2048, 512, row, 1)) == (
            f"v has a row stride of {row} elements, and WMMA loads take 0 to 2^32 - 1; a copy works."
        )
    assert why(sum_stage, strides=(512, 0, 64, 1)) == (
        "v has a head stride of 0 bytes, and tensor maps take 1 to 1099511627775; a contiguous copy works. "
        "Shared heads are fast as fewer kv_heads."
    )
    backwards = why(sum_stage, strides=(2048, 512, -64, 1), pointer=(1 << 25) + 1024)
    assert backwards.startswith("v has a row stride of -128 bytes")


def _sum(q: Any, k: Any, v: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    return q + np.repeat(k, group, axis=1) + np.repeat(v, group, axis=1)


@needs_compiler
@pytest.mark.parametrize("races", [False, True], ids=["fast", "hooks"])
@pytest.mark.parametrize(("head_dim", "length"), [(64, 203), (128, 65), (128, 1)])
def test_tensor_maps_and_counters_reach_the_kernel(sum_stage: str, head_dim: int, length: int, races: bool) -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(-3, 4, (2, 4, length, head_dim)).astype(np.float16)
    k, v = (rng.integers(-3, 4, (2, length, 2, head_dim)).astype(np.float16).transpose(0, 2, 1, 3) for _ in range(2))
    ran = flashlab.emulate(q, k, v, stage=sum_stage, source=hopper_sum.SOURCE, races=races)
    shape = ran.kernel.launch_shape
    assert ran.plan.aligned
    assert shape is not None
    assert (shape.box_q, shape.box_kv, shape.persistent) == (64, 32, True)
    assert ran.report.findings == ()
    assert (ran.out == _sum(q, k, v)).all()
    back = (slice(None), slice(None), slice(None, None, -1))
    ran = flashlab.emulate(q[back], k[back], v[back], stage=sum_stage, source=hopper_sum.SOURCE, races=races)
    assert ran.plan.aligned is (length == 1)
    assert ran.report.findings == ()
    assert (ran.out == _sum(q, k, v)[back]).all()


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_clusters_and_copies_of_a_panel_reach_the_kernel(sum_stage: str, tmp_path: Path, head_dim: int) -> None:
    text = hopper_sum.SOURCE.read_text(encoding="utf-8")
    edits = [
        ("const LaunchShape launch_shape = {", "const ClusterLaunchShape launch_shape = {{"),
        ("TILE_Q, BOX_KV, 1};", "TILE_Q, BOX_KV, 1}, 1, 2};"),
        (
            "  __syncthreads();\n\n  for (",
            "  __syncthreads();\n  if (ptx::cluster_nctarank() != 2) __trap();\n\n  for (",
        ),
    ]
    for name in "KV":
        load = "ptx::cp_async_bulk_tensor_5d_load(s.{0}[box]{1}, &maps.{0}, &s.full, 0, row + box * BOX_KV, {2}, "
        each = "for (int panel = 0; panel < SUM_PANELS; ++panel) "
        edits.append((load.format(name, "", "0"), each + load.format(name, "[panel]", "panel")))
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    edited = tmp_path / "edited.cu"
    edited.write_text(text, encoding="utf-8")
    rng = np.random.default_rng(1)
    q, k, v = (rng.integers(-3, 4, (1, 3, 65, head_dim)).astype(np.float16) for _ in range(3))
    ran = flashlab.emulate(q, k, v, stage=sum_stage, source=edited, races=True)
    shape = ran.kernel.launch_shape
    assert shape is not None
    assert (shape.panels_kv, shape.cluster) == (1, 2)
    assert ran.report.findings == ()
    assert (ran.out == _sum(q, k, v)).all()


@needs_compiler
def test_counters_that_are_left_behind_are_an_error(sum_stage: str, tmp_path: Path) -> None:
    text = hopper_sum.SOURCE.read_text(encoding="utf-8")
    assert text.count("atomicExch(&p.work[0], 0u);") == 1
    edited = tmp_path / "edited.cu"
    edited.write_text(text.replace("atomicExch(&p.work[0], 0u);", ""), encoding="utf-8")
    q = np.zeros((1, 1, 65, 64), np.float16)
    with pytest.raises(errors.EmulationError, match=r"wanted its counters back at 0 .*, got, by place, \{0: 4\}"):
        flashlab.emulate(q, q, q, stage=sum_stage, source=edited)


ENCODED = TensorMap.encoded


class _Launches:
    """A GPU of 4 SMs, two blocks each, as far as `prepare` asks it; launches are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[dict[str, Any]] = []
        self.maps: list[tuple[str, tuple[Any, ...]]] = []
        self.counters = 1 << 30
        self.size_bytes = self.zero_bytes = 8
        monkeypatch.setattr(recipes, "by_layout", LruCache(64))
        for name in ("require", "load"):
            monkeypatch.setattr(gpu, name, lambda *_, **__: None)
        monkeypatch.setattr(arrays_module, "on_device", lambda obj, *_: obj)
        monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(arch=ARCH, sm_count=4, slug="nobody"))
        monkeypatch.setattr(gpu, "blocks_per_sm", lambda *_: 2)
        monkeypatch.setattr(gpu, "context", lambda _: nullcontext())
        monkeypatch.setattr(gpu, "Zeroed", self.zeroed)
        monkeypatch.setattr(gpu, "Launch", lambda _, **how: self.made.append(how))
        monkeypatch.setattr(TensorMap, "encoded", lambda _, address: struct.pack("<Q", address).ljust(128, b"m"))

    def zeroed(self, device: int, size_bytes: int, stream: int, zero_bytes: int | None = None) -> Any:
        assert (device, size_bytes, stream) == (0, self.size_bytes, 5)
        assert zero_bytes in (None, self.zero_bytes)
        self.counters += 512
        return SimpleNamespace(pointer=self.counters, read=lambda: bytearray(struct.pack("<2I", 3, 70000)))


@pytest.mark.parametrize("mappable", [True, False])
def test_what_a_gpu_is_asked_to_launch(monkeypatch: pytest.MonkeyPatch, sum_stage: str, mappable: bool) -> None:
    there = _Launches(monkeypatch)
    q, k, v = qkv(q_len=130, kv_len=130)
    if not mappable:
        k = array(2, 4, 130, 64, strides=(0, 0, 64, 1), pointer=k.pointer)
    out = array(2, 4, 130, 64, pointer=OUT)
    call: dict[str, Any] = {"stage": sum_stage, "source": hopper_sum.SOURCE, "out": out, "stream": 5}
    prepared = prepare(q, k, v, **call)
    assert prepared.plan.aligned is mappable
    prepare(q, k, v, **call)
    first, second = there.made
    assert (first["grid"], first["block"], first["stream"]) == ((8, 1, 1), (128, 1, 1), 5)
    params, maps = first["params"]
    assert params.work == (1 << 30) + 512
    assert second["params"][0].work == (1 << 30) + 1024
    addresses = [struct.unpack("<Q", bytes(getattr(maps, name))[:8])[0] for name in "QKVO"]
    assert addresses == ([q.pointer, k.pointer, v.pointer, out.pointer] if mappable else [0, 0, 0, 0])
    assert any(bytes(maps)) is mappable


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_prepared_call_is_not_copied(monkeypatch: pytest.MonkeyPatch, copied: Callable[[Any], Any]) -> None:
    _Launches(monkeypatch)
    prepared = prepare(*qkv(), stage="01_coalesced", out=array(2, 4, 8, 64, pointer=OUT), stream=5)
    with pytest.raises(errors.InputError, match=r"neither copied nor pickled.* `flashlab\.prepare` .* works"):
        copied(prepared)


def test_equal_shares_are_launched_on_as_many_blocks_as_are_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Launches(monkeypatch)
    q, k, v = qkv(q_len=1, kv_len=700)  # 8 tiles
    call: dict[str, Any] = {"stage": "d3_equal_share", "out": array(2, 4, 1, 64, pointer=OUT), "stream": 5}
    for blocks, params in ((8, {}), (4, {"MIN_BLOCKS": 1})):
        there.zero_bytes = 4 * MAX_SHARES
        there.size_bytes = there.zero_bytes + 2 * blocks * 4 * 16 * (64 + 2)
        prepare(q, k, v, **call, params=params)
        made = there.made[-1]
        assert (made["grid"], made["cluster"], made["early"]) == ((blocks, 1, 1), 1, True)
        assert made["params"][0].work == there.counters


def test_fallbacks_are_counted_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Launches(monkeypatch)
    q, k, v = qkv(q_len=130)
    call: dict[str, Any] = {"stage": "01_coalesced", "out": array(2, 4, 130, 64, pointer=OUT), "stream": 5}
    assert prepare(q, k, v, **call).fallbacks() is None
    assert prepare(q, k, v, **call, count_fallbacks=True).fallbacks() == Fallbacks(renormalized=3, recomputed=70000)
    assert [made["params"][0].fallbacks for made in there.made] == [None, (1 << 30) + 512]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_emulation_counts_fallbacks_on_request(dtype: str) -> None:
    q, k, v = make_inputs(Problem.parse("1x1x1x16x500x64", dtype=dtype))
    ran = flashlab.emulate(q, k, v, stage="13_overlap", count_fallbacks=True)
    assert ran.fallbacks == Fallbacks(renormalized=0, recomputed=0)
    growing = np.linspace(40, 0, 500)[:, None].astype(k.dtype)  # towards the first key, which it comes to last
    ran = flashlab.emulate(abs(q), abs(k) * growing, v, stage="13_overlap", count_fallbacks=True)
    assert ran.fallbacks is not None
    assert ran.fallbacks.recomputed > 0
    assert flashlab.emulate(q, k, v, stage="13_overlap").fallbacks is None


def test_an_ordinary_stage_gets_no_maps_and_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Launches(monkeypatch)
    q, k, v = qkv(q_len=130)
    prepare(q, k, v, stage="01_coalesced", out=array(2, 4, 130, 64, pointer=OUT), stream=5)
    (made,) = there.made
    (params,) = made["params"]
    assert params.work is None
    assert made["grid"] == (2, 4, 2)


def _table(stage: str, parameters: dict[str, int], problem: str, **kind: str) -> choice.Table:
    how = {"shape": problem, "mask": "full", "dtype": "float16", **kind}
    rest = {"time_us": 1.0, "tile_q": 64, "variants": 2, "run": "20260101T000000Z-0000000"}
    row = choice.Row.model_validate({"stage": stage, **how, "parameters": parameters, **rest})
    return choice.Table(gpu="nobody", arch=ARCH, sm_count=4, rows=(row,))


def test_what_won_on_a_gpu_is_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Launches(monkeypatch)
    stage = registry.get("01_coalesced")
    found = _table(stage.id, {**stage.parameters(64), "THREADS": 64}, "1x1x1x64", mask="causal")
    monkeypatch.setattr(choice, "table", lambda gpu, _: found if gpu == "nobody" else None)
    q, k, v = qkv(q_len=256)
    call: dict[str, Any] = {"stage": stage.id, "out": array(2, 4, 256, 64, pointer=OUT), "stream": 5}
    for options in ({"causal": True}, {}, {"causal": True, "params": {"THREADS": 256}}):
        prepare(q, k, v, **call, **options)
    assert [made["block"][0] for made in there.made] == [64, 64, 256]
    q, k, v = qkv(q_len=256, dim=128)
    prepare(q, k, v, **{**call, "out": array(2, 4, 256, 128, pointer=OUT)})
    assert there.made[-1]["block"][0] == stage.parameters(128)["THREADS"], "another head dim is another kernel"


def test_without_a_stage_the_records_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Launches(monkeypatch)
    stage = registry.get("01_coalesced")
    found = _table(stage.id, {**stage.parameters(64), "THREADS": 64}, "1x1x1x64")
    monkeypatch.setattr(choice, "table", lambda gpu, _: found if gpu == "nobody" else None)
    q, k, v = qkv(q_len=256)
    prepared = prepare(q, k, v, out=array(2, 4, 256, 64, pointer=OUT), stream=5)
    assert prepared.plan.stage is stage
    assert prepared.cubin.parameters["THREADS"] == there.made[-1]["block"][0] == 64
    # Nothing of that head dim is on record.
    q, k, v = qkv(q_len=256, dim=128)
    wide = prepare(q, k, v, out=array(2, 4, 256, 128, pointer=OUT), stream=5)
    assert wide.plan.stage is registry.best(wide.plan.problem, ARCH)


def test_another_gpus_choice_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _Launches(monkeypatch)
    attention_module._warn_of_kin.cache_clear()
    found = replace(_table("01_coalesced", registry.get("01_coalesced").parameters(64), "1x1x1x64"), gpu="kin")
    monkeypatch.setattr(choice, "_tables", lambda *_: (found,))
    for length in (256, 128):
        q, k, v = qkv(q_len=length)
        prepared = prepare(q, k, v, out=array(2, 4, length, 64, pointer=OUT), stream=5)
        assert prepared.plan.stage.id == "01_coalesced"
    (message,) = caplog.messages
    assert message.startswith("nobody has no table of choices: stages are selected by the table of kin")
    attention_module._warn_of_kin.cache_clear()


# --- what is kept between calls ---


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `plan`, each the first of a layout."""
    made: list[Any] = []
    there = attention_module.plan

    def noted(*arrays: Any, **options: Any) -> Any:
        made.append((arrays, options))
        return there(*arrays, **options)

    monkeypatch.setattr(attention_module, "plan", noted)
    return made


@pytest.mark.usefixtures("sum_stage")
def test_a_layout_is_planned_once_and_addresses_are_each_calls_own(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any]
) -> None:
    there = _Launches(monkeypatch)
    encoded: dict[int, Any] = {}

    def encode(function: str, *arguments: Any) -> Any:
        _, _, address, *_ = arguments
        assert (function, address in encoded) == ("cuTensorMapEncodeTiled", False)
        encoded[address] = ctypes.create_string_buffer(struct.pack("<Q", address).ljust(128, b"m"), 128)
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded[address]))

    monkeypatch.setattr(gpu, "call", encode)
    monkeypatch.setattr(TensorMap, "encoded", ENCODED)
    ENCODED.cache_clear()
    for shift in (0, 1 << 12, 0):
        q, k, v = (replace(one, pointer=one.pointer + shift) for one in qkv(q_len=130, kv_len=130))
        out = array(2, 4, 130, 64, pointer=OUT + shift)
        prepare(q, k, v, stage=hopper_sum.STAGE.id, source=hopper_sum.SOURCE, out=out, stream=5)
        params, maps = there.made[-1]["params"]
        assert [getattr(params, name).data for name in "QKVO"] == [one.pointer for one in (q, k, v, out)]
        addresses = [struct.unpack("<Q", bytes(getattr(maps, name))[:8])[0] for name in "QKVO"]
        assert addresses == [one.pointer for one in (q, k, v, out)]
    assert len(planned) == 1
    assert len(encoded) == 8, "a tensor map is made once an address"
    structures = [id(argument) for made in there.made for argument in made["params"]]
    assert len(set(structures)) == len(structures), "threads may launch at the same time"


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"scale": 0.5},
        {"params": {"THREADS": 64}},
        {"stage": "00_naive"},
        {"q": {"pointer": (1 << 20) + 8}},
        {"k": {"strides": (0, 0, 64, 1)}},
        {"out": {"strides": (4 * 8 * 64, 64, 4 * 64, 1)}},
    ],
)
def test_another_layout_or_option_is_planned_anew(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, planned: list[Any]
) -> None:
    _Launches(monkeypatch)
    q, k, v = qkv()
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "out": array(2, 4, 8, 64, pointer=OUT)}
    call |= {"stage": "01_coalesced", "stream": 5}
    prepare(**call)
    prepare(**call)
    assert len(planned) == 1
    arrays = {name: replace(call[name], **to) for name, to in change.items() if name in ("q", "k", "out")}
    prepare(**{**call, **change, **arrays})
    assert len(planned) == 2


def test_a_kept_layout_refuses_what_the_first_call_would(monkeypatch: pytest.MonkeyPatch) -> None:
    _Launches(monkeypatch)
    q, k, v = qkv()
    call: dict[str, Any] = {"stage": "01_coalesced", "stream": 5}
    prepare(q, k, v, out=array(2, 4, 8, 64, pointer=OUT), **call)
    with pytest.raises(errors.LayoutError, match="apart from k"):
        prepare(q, k, v, out=array(2, 4, 8, 64, pointer=k.pointer), **call)
    with pytest.raises(errors.LayoutError, match="read-only"):
        prepare(q, k, v, out=array(2, 4, 8, 64, pointer=OUT, readonly=True), **call)
    with pytest.raises(errors.DeviceError, match="got GPU 1"):
        prepare(q, replace(k, device=1), v, out=array(2, 4, 8, 64, pointer=OUT), **call)
    with pytest.raises(errors.ParameterError, match="True or False"):
        prepare(q, k, v, out=array(2, 4, 8, 64, pointer=OUT), causal=0, **call)  # type: ignore[arg-type]
    with pytest.raises(errors.ParameterError, match="finite"):
        prepare(q, k, v, out=array(2, 4, 8, 64, pointer=OUT), scale=[1.0], **call)  # type: ignore[arg-type]


def test_an_edited_source_and_a_new_table_are_noticed(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any], tmp_path: Path
) -> None:
    _Launches(monkeypatch)
    q, k, v = qkv()
    source = tmp_path / "edited.cu"
    text = registry.get("01_coalesced").source.read_text(encoding="utf-8")
    source.write_text(text, encoding="utf-8")
    call: dict[str, Any] = {"stage": "01_coalesced", "stream": 5, "source": source}
    call["out"] = array(2, 4, 8, 64, pointer=OUT)
    first = prepare(q, k, v, **call)
    source.write_text(text + "\n__global__ void another() {}\n", encoding="utf-8")
    os.utime(source, ns=(1, 1))
    second = prepare(q, k, v, **call)
    assert len(planned) == 2
    assert first.cubin.sha256 != second.cubin.sha256
    monkeypatch.setattr(choice, "table", lambda *_: None)
    monkeypatch.setattr(choice, "stamps", lambda *_: (7,))
    prepare(q, k, v, **call)
    assert len(planned) == 3


def test_an_edited_header_and_a_file_of_the_same_age_are_noticed(
    monkeypatch: pytest.MonkeyPatch, planned: list[Any], tmp_path: Path
) -> None:
    _Launches(monkeypatch)
    common = tmp_path / "common"
    shutil.copytree(compiler.COMMON, common)
    monkeypatch.setattr(compiler, "COMMON", common)
    q, k, v = qkv()
    source = tmp_path / "edited.cu"
    source.write_bytes(registry.get("01_coalesced").source.read_bytes())
    call: dict[str, Any] = {"stage": "01_coalesced", "stream": 5, "source": source}
    call["out"] = array(2, 4, 8, 64, pointer=OUT)
    first = prepare(q, k, v, **call)
    for file, old, new in (
        (common / "attention.cuh", "LN_2 = 0.69", "LN_2 = 0.70"),
        (source, "extern", "static __device__ int another;\nextern"),
    ):
        age = file.stat().st_mtime_ns
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")
        os.utime(file, ns=(age, age))
        count = len(planned)
        second = prepare(q, k, v, **call)
        assert len(planned) == count + 1
        assert second.cubin.options == first.cubin.options
        assert not second.cubin.cached
        prepare(q, k, v, **call)
        assert len(planned) == count + 1


# --- structures ---


def _constants(source: str, tmp_path: Path, names: int) -> tuple[int, ...]:
    """Integers that a compiled file exports as `constants`."""
    path = tmp_path / "layout.cu"
    path.write_text(source, encoding="utf-8")
    cubin = compile_file(
        path, entry="nothing", arch=ARCH, defines={"HEAD_DIM": 64, "CAUSAL": 0, "ALIGNED": 1, "ELEMENT": "__half"}
    )
    elf = ELFFile(io.BytesIO(cubin.code))
    (symbol,) = elf.get_section_by_name(".symtab").get_symbol_by_name("constants")
    section = elf.get_section(symbol["st_shndx"])
    start = symbol["st_value"]
    return struct.unpack(f"<{names}i", section.data()[start : start + 4 * names])


def _fields(structure: type[ctypes.Structure]) -> dict[str, int]:
    kinds = reversed(structure.__mro__)
    return {name: getattr(structure, name).offset for kind in kinds for name, *_ in vars(kind).get("_fields_", ())}


@pytest.mark.parametrize(
    ("header", "name", "structure", "macro"),
    [
        ("attention.cuh", "AttentionParams", AttentionParams, ""),
        ("attention.cuh", "AttentionParams", FeatureParams, "#define WINDOW 1\n"),
        ("attention.cuh", "AttentionParams", VarlenParams, "#define VARLEN 1\n"),
        ("attention.cuh", "TensorView", TensorView, ""),
        ("hopper.cuh", "AttentionMaps", AttentionMaps, ""),
        ("fp8.cuh", "Fp8Params", Fp8Params, ""),
        ("paged.cuh", "PagedCache", PagedCache, ""),
        ("micro.cuh", "MicroParams", MicroParams, ""),
    ],
)
def test_structures_agree_with_the_compiler(
    header: str, name: str, structure: type[ctypes.Structure], macro: str, tmp_path: Path
) -> None:
    fields = _fields(structure)
    offsets = ", ".join(f"(int)offsetof({name}, {field})" for field in fields)
    source = (
        f'{macro}#include <cuda/std/cstddef>\n#include "{header}"\n'
        f'extern "C" __device__ const int constants[] = {{(int)sizeof({name}), {offsets}}};\n'
        'extern "C" __global__ void nothing() {}\n'
    )
    assert _constants(source, tmp_path, 1 + len(fields)) == (ctypes.sizeof(structure), *fields.values())
