"""Attention on inputs in FP8: right at FP8's precision for any data and length, and what is off is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shared import needs_compiler, tiers

import flashlab
from flashlab.build import compiler, sass
from flashlab.core import errors
from flashlab.core.paths import KERNELS, SITE
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import FP8, STAGES, Stage
from flashlab.run.fp8 import LARGEST, STAGE
from flashlab.verify import on_cpu, oracle
from flashlab.verify.verdict import check

E4M3 = ml_dtypes.float8_e4m3fn
every_stage = pytest.mark.parametrize("stage", FP8.values(), ids=FP8)


# --- the registry -----------------------------------------------------------------------------------------------------


@every_stage
def test_a_stage_for_fp8_is_whole_and_no_rung(stage: Stage) -> None:
    assert registry.faults(stage) == ()
    assert stage.id not in {*STAGES, *registry.RUNGS}
    assert stage.by_name_only
    for variant in stage.variants:
        assert all(value in stage.params[name].choices for name, value in variant.items())
    text = stage.page.read_text(encoding="utf-8")
    sections = ("title", "question", "built", "prediction", "result", "code")
    assert all(f'--8<-- "{stage.folder}{stage.id}.md:{section}"' in text for section in sections)


def test_every_file_of_the_folder_belongs_to_a_stage() -> None:
    assert {path.name for path in (KERNELS / "fp8").glob("*.cu")} == {stage.source.name for stage in FP8.values()}
    assert {path.stem for path in (SITE / "fp8").glob("*.md")} == set(FP8)


@every_stage
@tiers
def test_it_compiles_without_spills_and_multiplies_fp8(stage: Stage, whole: bool) -> None:
    """The whole: its variants, one kernel each."""
    work = compiler.jobs([stage], stage.archs)
    if whole:
        work = tuple(replace(work[0], overrides=variant) for variant in stage.variants)
    for job, result in zip(work, compiler.compile_many(work), strict=True):
        assert not isinstance(result, Exception), job.label
        assert result.resources.spill_store_bytes == result.resources.stack_bytes == 0, job.label
    tensor = {one.opcode for one in sass.disassemble(result.code, stage.entry) if sass.classify(one) == "tensor"}
    assert any(opcode.startswith("QGMMA") for opcode in tensor)
    assert not any(opcode.startswith("HGMMA") for opcode in tensor)


# --- the kernel -------------------------------------------------------------------------------------------------------

HARD = [
    ("1x2x1x130x517x128", "full", "normal"),
    ("2x2x1x77x203x128", "causal", "normal"),
    ("1x1x1x70x900x128", "full", "sink_first"),
    ("1x1x1x70x900x128", "causal", "sink_last"),
    ("1x1x1x70x900x128", "full", "rising"),
    ("1x1x1x70x900x128", "full", "falling"),
    ("1x1x1x70x900x128", "causal", "scale10"),
    ("1x1x1x70x900x128", "full", "steps"),
    ("1x1x1x70x900x128", "full", "one_hot"),
    ("1x1x1x70x900x128", "full", "zeros"),
    ("1x2x1x70x900x128", "causal", "row_scales"),
]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "mask", "kind"),
    [
        pytest.param(*case, id="-".join(case), marks=pytest.mark.exhaustive if number % 2 else ())
        for number, case in enumerate(HARD)
    ],
)
def test_sums_that_are_moved_and_put_aside_stay_right(shape: str, mask: str, kind: str) -> None:
    """With FLUSH_TILES=4 the sums go to shared memory twice or more, and references move after that."""
    problem = Problem.parse(shape, mask=mask, inputs=kind)
    values = oracle.make_inputs(problem, seed=3)
    verdict, ran = on_cpu.emulated_verdict(STAGE, problem, values, params={"FLUSH_TILES": 4, "TILE_KV": 64}, races=True)
    assert verdict.passed, verdict.reason
    if kind in ("sink_first", "falling", "steps", "scale10"):
        assert ran.fallbacks is not None
        assert ran.fallbacks.renormalized > 0


@needs_compiler
def test_rows_whose_exponentials_fp32_cannot_hold_are_computed_again() -> None:
    problem = Problem.parse("1x1x1x64x700x128")
    q, k, v = (x.astype(np.float32) for x in oracle.make_inputs(problem, seed=0))
    q, k = (20 * q).astype(np.float16), (20 * k).astype(np.float16)
    verdict, ran = on_cpu.emulated_verdict(
        STAGE, problem, (q, k, v.astype(np.float16)), params={"FLUSH_TILES": 4, "TILE_KV": 64}
    )
    assert verdict.passed, verdict.reason
    assert ran.fallbacks is not None
    assert ran.fallbacks.recomputed > 0


@needs_compiler
@pytest.mark.parametrize(
    ("wanted", "mistake"),
    [
        ("at / 4 * 2 + at % 2 + at % 4 / 2 * 8", "at"),
        ("O_reg[i] * V_scale", "O_reg[i]"),
        ("fp8.K_scale[kv_head]", "fp8.K_scale[0]"),
        ("__uint_as_float(word[w] << 16) * factor[w % 2]", "__uint_as_float(word[w] << 16)"),
        ("for (int i = 0; i < O_COLUMNS / 2; ++i) O_reg[i] = 0.0f;\n  }\n};", "}\n};"),
    ],
)
def test_mistakes_are_found(wanted: str, mistake: str, tmp_path: Path) -> None:
    text = registry.get(STAGE).source.read_text(encoding="utf-8")
    assert text.count(wanted) == 1
    copy = tmp_path / "wrong.cu"
    copy.write_text(text.replace(wanted, mistake), encoding="utf-8")
    problem = Problem.parse("2x2x2x70x600x128", inputs="sink_first")
    values = oracle.make_inputs(problem, seed=3)
    values[1][1] *= np.float16(0.25)  # heads with scales of their own
    verdict, _ = on_cpu.emulated_verdict(STAGE, problem, values, params={"FLUSH_TILES": 4, "TILE_KV": 64}, source=copy)
    assert not verdict.passed


# --- the calls --------------------------------------------------------------------------------------------------------


def _values(*shape: int, seed: int = 0, size: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def test_quantised_numbers_are_near_and_a_head_of_zeros_stays_one() -> None:
    x = _values(2, 3, 50, 16, size=1000.0)
    x[1, 2] = 0
    stored, scale = flashlab.quantize_e4m3(x.swapaxes(1, 2).copy().swapaxes(1, 2))
    assert (stored.dtype, stored.shape, scale.dtype, scale.shape) == (E4M3, x.shape, np.float32, (2, 3))
    assert stored.flags.c_contiguous
    assert scale[1, 2] == 1
    wide = stored.astype(np.float32)
    assert np.abs(wide[:, :2]).max(axis=(-2, -1)) == pytest.approx(LARGEST)
    large = np.abs(x) > np.abs(x).max() / 1000
    error = np.abs(wide * scale[..., None, None] - x)
    assert (error[large] <= np.abs(x)[large] * 2.0**-4 * 1.001).all()
    with pytest.raises(errors.ShapeError, match="wanted \\(batch, heads, length, head_dim\\)"):
        flashlab.quantize_e4m3(x[0])


def test_a_head_that_holds_an_infinity_is_lost_alone_and_without_a_warning() -> None:
    x = _values(1, 2, 4, 128)
    x[0, 0, 1, 2] = np.inf
    stored, scale = flashlab.quantize_e4m3(x)
    assert np.isinf(scale[0, 0])
    assert np.isfinite(stored[0, 1].astype(np.float32)).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_smallest_numbers_are_no_nan(library: str) -> None:
    """A scale below FP32's normal numbers has few digits: by such a one the largest number came out beyond e4m3's."""
    make: Any = np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy
    for largest in np.geomspace(1e-45, 1e-34, 400, dtype=np.float32):
        stored, scale = flashlab.quantize_e4m3(make(np.array([[[[largest, -largest, largest / 2]]]], np.float32)))
        assert (abs(np.asarray(stored if library == "numpy" else stored.float()).astype(np.float32)) <= LARGEST).all()
        assert float(scale.max()) > 0


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (None, errors.DeviceError, "x: wanted a NumPy array.* got None"),
        ([[[[1.0]]]], errors.DeviceError, "x: wanted a NumPy array.* got list"),
        (np.full((1, 1, 1, 1), 1e300), errors.DTypeError, "x: wanted float32 or float16 or bfloat16, got float64"),
        (np.ones((1, 1, 1, 1), np.complex64), errors.DTypeError, "x: wanted .* got complex64"),
        (np.ones((1, 1, 1, 1), bool), errors.DTypeError, "x: wanted .* got bool"),
        (np.ones((1, 1, 1, 1), np.int32), errors.DTypeError, "x: wanted .* got int32"),
    ],
)
def test_what_cannot_be_quantised_is_refused(x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashlab.quantize_e4m3(x)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_attention_of_what_is_stored(causal: bool) -> None:
    """Against float64 on the numbers that are stored: what remains is the rounding of probabilities."""
    q, k, v = _values(2, 4, 70, 128), _values(2, 2, 300, 128, seed=1), _values(2, 2, 300, 128, seed=2)
    stored, scales = zip(*(flashlab.quantize_e4m3(x) for x in (q, k, v)), strict=True)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, lse = flashlab.fp8_attention(*stored, **named, causal=causal, dtype="float16", return_lse=True)
    exact = [x.astype(np.float32) * scale[..., None, None] for x, scale in zip(stored, scales, strict=True)]
    expected, expected_lse = oracle.attention(*exact, causal=causal)
    error = np.abs(out.astype(np.float64) - expected)
    assert out.dtype == np.float16
    assert np.sqrt((error**2).mean()) < 0.04 * np.sqrt((expected**2).mean())
    assert np.allclose(lse, expected_lse, atol=1e-4)
    assert check(out, lse, q, k, v, causal=causal, dtype="float16", precision="e4m3_scaled").passed


@needs_compiler
def test_without_scales_numbers_count_as_they_are_and_strided_inputs_work() -> None:
    q, k, v = (_values(1, 20, 2, 128, seed=seed).astype(E4M3).swapaxes(1, 2) for seed in range(3))
    out = np.full((1, 2, 20, 130), 7, ml_dtypes.bfloat16)[..., 1:129]  # rows on no boundary
    assert flashlab.fp8_attention(q, k, v, out=out) is out
    expected, _ = oracle.attention(*(x.astype(np.float32) for x in (q, k, v)), causal=False)
    assert np.abs(out.astype(np.float64) - expected).max() < 0.15
    again = flashlab.fp8_attention(*(np.ascontiguousarray(x) for x in (q, k, v)))
    assert again.dtype == ml_dtypes.bfloat16
    assert np.array_equal(again, out)


def test_what_is_off_is_refused_with_what_works() -> None:
    x = _values(1, 2, 20, 128).astype(E4M3)
    with pytest.raises(errors.DTypeError, match=r"q: wanted float8_e4m3fn, got float16. `flashlab.quantize_e4m3\(q\)`"):
        flashlab.fp8_attention(x.astype(np.float16), x, x)
    with pytest.raises(errors.DTypeError, match="wanted 'float16' or 'bfloat16' for the output, got 'float32'"):
        flashlab.fp8_attention(x, x, x, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(errors.ShapeError, match=r"k_scale: wanted \(batch, heads\), \(1, 2\), got shape \(2,\)"):
        flashlab.fp8_attention(x, x, x, k_scale=np.ones(2, np.float32))
    with pytest.raises(errors.DTypeError, match=r'v_scale: wanted float32, got float64. `v_scale.astype\("float32"\)`'):
        flashlab.fp8_attention(x, x, x, v_scale=np.ones((1, 2)))
    with pytest.raises(errors.DeviceError, match=r"q_scale: .* `numpy.asarray\(q_scale, dtype=numpy.float32\)` makes"):
        flashlab.fp8_attention(x, x, x, q_scale=[[1.0, 1.0]])
    with pytest.raises(errors.DTypeError, match=r"q: wanted .* got float8_e4m3fn. `flashlab.fp8_attention` takes it"):
        flashlab.attention(x, x, x)
    with pytest.raises(
        errors.ShapeError, match=r"q: wanted 4 dimensions \(batch, heads, length, head_dim\), got shape"
    ):
        flashlab.fp8_attention(x[0], x, x)
    wide = np.zeros((1, 2, 20, 136), E4M3)[..., :128]
    with pytest.raises(errors.LayoutError, match="k: wanted rows on 16-byte boundaries"):
        flashlab.fp8_attention(x, wide, x)
    small = x[..., :64].copy()
    with pytest.raises(errors.UnsupportedError, match="takes head dim 128, got 64"):
        flashlab.fp8_attention(small, small, small)
    with pytest.raises(errors.ShapeError, match="v: wanted the shape of k"):
        flashlab.fp8_attention(x, x, x[:, :, :10])


def test_the_yardstick_scales_each_head() -> None:
    """Numbers a thousand times larger have the same relative error, which e4m3 without scales cuts off."""
    q, k, v = (x.astype(np.float16) for x in (_values(1, 1, 64, 128, seed=seed) for seed in range(3)))
    large = (v.astype(np.float32) * 1000).astype(np.float16)
    out = oracle.plain(q, k, v, causal=False, dtype="float16", precision="e4m3_scaled").astype(np.float64)
    scaled = oracle.plain(q, k, large, causal=False, dtype="float16", precision="e4m3_scaled").astype(np.float64)
    size = np.sqrt((out**2).mean())
    assert np.sqrt(((scaled / 1000 - out) ** 2).mean()) < 0.06 * size
    cut = oracle.plain(q, k, large, causal=False, dtype="float16", precision="e4m3").astype(np.float64)
    assert np.sqrt(((cut / 1000 - out) ** 2).mean()) > 0.3 * size


@needs_compiler
def test_an_output_right_behind_8_bit_inputs_overlaps_none() -> None:
    """An element of e4m3 is a byte: what lies between the first and the last is half of what it is in 16 bits."""
    memory = np.zeros(3 * 2560 + 5120, np.uint8)
    q, k, v = (memory[i * 2560 : (i + 1) * 2560].view(E4M3).reshape(1, 1, 20, 128) for i in range(3))
    v[...] = 2
    out = memory[3 * 2560 :].view(np.float16).reshape(1, 1, 20, 128)
    assert (flashlab.fp8_attention(q, k, v, out=out, dtype="float16") == 2).all()
    with pytest.raises(errors.LayoutError, match="out: wanted memory apart from v, got memory that overlaps it"):
        flashlab.fp8_attention(
            q, k, v, out=memory[2 * 2560 : 4 * 2560].view(np.float16).reshape(out.shape), dtype="float16"
        )
    with pytest.raises(errors.DTypeError, match="out: wanted bfloat16, got float16"):
        flashlab.fp8_attention(q, k, v, out=out)
