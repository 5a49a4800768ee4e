"""What the public call refuses and what it tells a kernel, without a GPU."""

from __future__ import annotations

import ctypes
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

import flashlab
from flashlab import attention, errors, gpu, stages
from flashlab.attention import AttentionParams, TensorView, grid_for, params_for, plan
from flashlab.compiler import LaunchShape, compile_file
from flashlab.gpu import DeviceArray
from flashlab.problem import Problem
from flashlab.timing import MicroParams

ARCH = "sm_90a"


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
        strides=strides or gpu.contiguous_strides(shape),
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
    assert found.stage is stages.best(found.problem, ARCH)
    assert found.scale == 0.125
    assert found.aligned
    assert plan(*qkv(), arch=ARCH, stage="00_naive", scale=2).scale == 2.0


def test_the_package_exports_the_call() -> None:
    assert flashlab.attention is attention
    with pytest.raises((errors.NoGpuError, errors.DeviceError)):
        flashlab.attention(np.zeros((1, 1, 1, 64), np.float16), None, None)


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
        (qkv(heads=65536, kv_heads=65536), errors.ShapeError, "65535 as heads"),
        (qkv(batch=65536), errors.ShapeError, "65535 as batch"),
        (qkv(dtype="float32"), errors.DTypeError, "float16 or bfloat16, got float32"),
        ((*qkv()[:2], qkv(dtype="bfloat16")[2]), errors.DTypeError, "one type"),
        ((*qkv()[:2], qkv(device=1)[2]), errors.DeviceError, "got GPU 1"),
        ((*qkv()[:2], array(2, 4, 8, 64, strides=(2048, 512, 1, 8))), errors.LayoutError, "contiguous last dimension"),
        ((array(2, 4, 8, 64, pointer=4097), *qkv()[1:]), errors.LayoutError, "multiple of 2"),
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
        ({"causal": 1}, errors.ParameterError, "True or False"),
        ({"stage": "06"}, errors.UnknownStageError, "06_cp_async"),
        ({"stage": "06_cp_async", "arch": "sm_75"}, errors.UnsupportedError, "Runnable: 00_naive"),
        ({"out": array(2, 4, 8, 128, pointer=OUT)}, errors.ShapeError, "shape of q"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, dtype="bfloat16")}, errors.DTypeError, "type of q"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, device=1)}, errors.DeviceError, "GPU 1"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, readonly=True)}, errors.LayoutError, "read-only"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(0, 512, 64, 1))}, errors.LayoutError, "address of its own"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(2048, 512, 32, 1))}, errors.LayoutError, "of its own"),
        ({"out": array(2, 4, 8, 64, pointer=OUT, strides=(8192, 2048, 128, 2))}, errors.LayoutError, "contiguous last"),
        ({"out": qkv()[0]}, errors.LayoutError, "apart from q"),
        ({"out": array(2, 4, 8, 64, pointer=(1 << 24) - 64)}, errors.LayoutError, "apart from k"),
    ],
)
def test_unsound_options_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(*qkv(), **{"arch": ARCH, **options})


def test_any_outer_strides_are_taken() -> None:
    bshd = (8 * 4 * 64, 64, 4 * 64, 1)
    q = array(2, 4, 8, 64, strides=bshd)
    expanded = array(2, 4, 8, 64, strides=(0, 0, 64, 1), pointer=1 << 24)
    reversed_rows = array(2, 4, 8, 64, strides=(2048, 512, -64, 1), pointer=(1 << 25) + 7 * 128)
    out = array(2, 4, 8, 64, strides=bshd, pointer=OUT)
    found = plan(q, expanded, reversed_rows, out=out, arch=ARCH)
    assert found.aligned


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("strides", "offset"), [((2080, 520, 65, 1), 0), ((2048, 512, 64, 1), 2), ((2080, 516, 64, 1), 0), (None, 8)]
)
def test_one_misaligned_row_makes_the_call_misaligned(which: int, strides: tuple[int, ...] | None, offset: int) -> None:
    arrays = [*qkv(), array(2, 4, 8, 64, pointer=OUT)]
    arrays[which] = array(2, 4, 8, 64, strides=strides, pointer=arrays[which].pointer + offset)
    assert not plan(*arrays[:3], out=arrays[3], arch=ARCH).aligned


def test_strides_of_single_elements_do_not_matter() -> None:
    odd = array(1, 1, 1, 64, strides=(13, 7, 3, 1))
    k, v = (array(1, 1, 8, 64, strides=(5, 3, 64, 1), pointer=p) for p in (1 << 24, 1 << 25))
    assert plan(odd, k, v, arch=ARCH).aligned
    assert plan(odd, k, v, out=array(1, 1, 1, 64, strides=(0, 0, 0, 1), pointer=OUT), arch=ARCH).aligned


def test_a_stage_that_lacks_the_type_names_those_that_have_it() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"00_naive takes float16, got bfloat16. Runnable: "):
        plan(*qkv(dtype="bfloat16"), arch=ARCH, stage="00_naive")


def test_what_the_kernel_is_told() -> None:
    q, k, v = qkv(kv_heads=2, q_len=9, kv_len=5)
    out = array(2, 4, 9, 64, strides=(8 * 4 * 64 * 2, 64, 4 * 64, 1), pointer=OUT)
    found = plan(q, k, v, out=out, arch=ARCH, scale=0.5)
    told = params_for(found, q, k, v, out, None)
    assert (told.q_heads, told.kv_heads, told.q_len, told.kv_len) == (4, 2, 9, 5)
    assert told.scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    assert told.LSE is None
    assert (told.O.data, told.O.batch_stride, told.O.head_stride, told.O.row_stride) == (OUT, 4096, 64, 256)
    assert (told.K.data, told.K.batch_stride) == (1 << 24, 2 * 5 * 64)
    assert params_for(found, q, k, v, out, 4096).LSE == 4096
    assert grid_for(found.problem, LaunchShape(threads=128, smem_bytes=0, tile_q=4)) == (3, 4, 2)


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
    return {name: getattr(structure, name).offset for name, *_ in structure._fields_}


@pytest.mark.parametrize(
    ("header", "name", "structure"),
    [
        ("attention.cuh", "AttentionParams", AttentionParams),
        ("attention.cuh", "TensorView", TensorView),
        ("micro.cuh", "MicroParams", MicroParams),
    ],
)
def test_structures_agree_with_the_compiler(
    header: str, name: str, structure: type[ctypes.Structure], tmp_path: Path
) -> None:
    fields = _fields(structure)
    offsets = ", ".join(f"(int)offsetof({name}, {field.rstrip('_')})" for field in fields)
    source = (
        f'#include <cuda/std/cstddef>\n#include "{header}"\n'
        f'extern "C" __device__ const int constants[] = {{(int)sizeof({name}), {offsets}}};\n'
        'extern "C" __global__ void nothing() {}\n'
    )
    assert _constants(source, tmp_path, 1 + len(fields)) == (ctypes.sizeof(structure), *fields.values())
