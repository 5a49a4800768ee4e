"""The bytes that are counted from L2, and what a data sheet says."""

from __future__ import annotations

import pytest
import synthetic

from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.query.roofline import DATASHEETS, l2_bytes

FULL = Problem.parse(FIRST_SHAPE)
CAUSAL = Problem.parse(FIRST_SHAPE, mask="causal")


def test_l2_traffic_reads_keys_and_values_once_a_query_tile() -> None:
    heads, head_bytes = 16 * 16, 2 * 2048 * 64
    assert l2_bytes(FULL, 2048) == heads * head_bytes * 4
    assert l2_bytes(FULL, 64) == heads * head_bytes * (2 + 2 * 32)
    # A tile that is larger than the problem reads what the problem has.
    assert l2_bytes(FULL, 4096) == l2_bytes(FULL, 2048)
    # Causal tiles stop at their diagonal: half, and half a tile more.
    assert l2_bytes(CAUSAL, 64) == heads * head_bytes * (2 + 2 * (32 + 1) / 2)


def test_l2_traffic_of_odd_lengths() -> None:
    problem = Problem.parse("1x1x1x5x7x64", mask="causal")
    # Tiles of rows 0-1, 2-3 and 4 read 4, 6 and 7 keys.
    assert l2_bytes(problem, 2) == 2 * 64 * (2 * 5 + 2 * (4 + 6 + 7))
    blind = Problem.parse("1x1x1x7x2x64", mask="causal")
    # Rows 0 to 4 see nothing.
    assert l2_bytes(blind, 1) == 2 * 64 * (2 * 7 + 2 * (1 + 2))


@pytest.mark.parametrize("slug", DATASHEETS)
def test_every_peak_has_a_source_and_makes_sense(slug: str) -> None:
    sheet = DATASHEETS[slug]
    assert "http" in sheet.source
    for ceiling in ("tensor_float16", "fp32_fma", "copy"):
        peak = sheet.peak(ceiling)
        assert peak is not None
        assert peak > 0
    assert sheet.tensor_tflops > 1.9 * sheet.fp32_tflops or "GeForce" in sheet.title


SMS_AND_RATES = {
    "nvidia-h200": (132, 4096, 256),
    "nvidia-h100-80gb-hbm3": (132, 4096, 256),
    "nvidia-h100-pcie": (114, 4096, 256),
    "nvidia-a100-sxm4-40gb": (108, 2048, 128),
    "nvidia-a100-sxm4-80gb": (108, 2048, 128),
    "nvidia-a100-80gb-pcie": (108, 2048, 128),
    "nvidia-l4": (58, 1024, 256),
    "nvidia-l40s": (142, 1024, 256),
    "tesla-t4": (40, 1024, 128),
    "nvidia-geforce-rtx-3090": (82, 512, 256),
    "nvidia-geforce-rtx-4090": (128, 512, 256),
    "nvidia-geforce-rtx-5090": (170, 512, 256),
}
"""SMs, and operations a clock and SM: dense 16-bit tensor with float32 sums, FP32."""


@pytest.mark.parametrize("slug", DATASHEETS)
def test_every_peak_follows_from_its_clock(slug: str) -> None:
    sheet = DATASHEETS[slug]
    if slug not in SMS_AND_RATES:
        assert sheet.tensor_mhz is sheet.fp32_mhz is None
        return
    sms, tensor, fp32 = SMS_AND_RATES[slug]
    assert sheet.tensor_mhz is not None
    assert sheet.fp32_mhz is not None
    assert sheet.tensor_tflops == pytest.approx(sms * tensor * sheet.tensor_mhz / 1e6, rel=0.01)
    assert sheet.fp32_tflops == pytest.approx(sms * fp32 * sheet.fp32_mhz / 1e6, rel=0.01)


def test_the_tensor_cores_peak_at_a_clock_is_the_data_sheets() -> None:
    hopper = [slug for slug, (_, tensor, _) in SMS_AND_RATES.items() if tensor == 4096]
    assert hopper
    for slug in hopper:
        sheet, sms = DATASHEETS[slug], SMS_AND_RATES[slug][0]
        gpu = synthetic.gpu().model_copy(update={"compute_capability": (9, 0), "sm_count": sms})
        assert gpu.tensor_percent(sheet.tensor_tflops, sheet.tensor_mhz) == pytest.approx(100, rel=0.01)
    assert gpu.tensor_percent(100.0, None) is None
    assert gpu.model_copy(update={"compute_capability": (3, 5)}).tensor_percent(100.0, 745.0) is None
