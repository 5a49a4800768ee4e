"""Attention on inputs in FP8 on a GPU: right at any length, on other streams, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

import flashlab
from flashlab.kernels import registry
from flashlab.run import gpu
from flashlab.run.fp8 import STAGE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    stage = registry.get(STAGE)
    if gpu.info().arch not in stage.archs:
        pytest.skip(f"needs {stage.needs}")


def _stored(*shapes: tuple[int, ...]) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """e4m3, the scales by their names, and the numbers that the two stand for, in float64."""
    made = [flashlab.quantize_e4m3(torch.randn(shape, device="cuda")) for shape in shapes]
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (scale for _, scale in made), strict=True))
    return [x for x, _ in made], scales, [x.double() * scale[..., None, None].double() for x, scale in made]


def _right(q: Any, k: Any, v: Any, causal: bool) -> Any:
    q_len, kv_len = q.shape[2], k.shape[2]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    mask = mask.tril(kv_len - q_len) if causal else mask
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.where(mask.any(-1)[:, None], attend(q, k, v, attn_mask=mask, enable_gqa=True), 0.0)


def _relative(out: Any, expected: Any) -> float:
    return float(((out.double() - expected).square().mean() / expected.square().mean()).sqrt())


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed: int) -> None:
    torch.manual_seed(seed)
    kv_heads, group = int(torch.randint(1, 3, ())), (1, 4)[seed % 2]
    batch, q_len, kv_len = (int(torch.randint(1, most, ())) for most in (4, 700, 1500))
    causal = bool(seed // 2 % 2)
    shapes = [(batch, kv_heads * group, q_len, 128), *[(batch, kv_heads, kv_len, 128)] * 2]
    stored, scales, exact = _stored(*shapes)
    out = flashlab.fp8_attention(*stored, **scales, causal=causal, dtype="float16")
    assert _relative(out, _right(*exact, causal)) < 0.04


@pytest.mark.parametrize("kv_len", [1024, 8192, 65536])
def test_the_error_does_not_grow_with_the_length(kv_len: int) -> None:
    torch.manual_seed(0)
    stored, scales, exact = _stored((1, 2, 64, 128), *[(1, 2, kv_len, 128)] * 2)
    expected = _right(*exact, False)
    assert _relative(flashlab.fp8_attention(*stored, **scales), expected) < 0.04


def test_a_graph_replays_on_other_numbers() -> None:
    torch.manual_seed(0)
    stored, scales, _ = _stored(*[(2, 4, 300, 128)] * 3)
    out = torch.empty((2, 4, 300, 128), dtype=torch.bfloat16, device="cuda")
    flashlab.fp8_attention(*stored, **scales, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashlab.fp8_attention(*stored, **scales, out=out)
    others, other_scales, exact = _stored(*[(2, 4, 300, 128)] * 3)
    for mine, other in zip(stored, others, strict=True):
        mine.copy_(other)
    for name, scale in other_scales.items():
        scales[name].copy_(scale)
    graph.replay()
    assert _relative(out, _right(*exact, False)) < 0.04


def test_another_stream_and_an_unaligned_output() -> None:
    torch.manual_seed(0)
    stored, scales, exact = _stored(*[(1, 2, 200, 128)] * 3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = torch.empty((1, 2, 200, 131), dtype=torch.float16, device="cuda")[..., 1:129]
    flashlab.fp8_attention(*stored, **scales, dtype="float16", out=out, stream=stream)
    stream.synchronize()
    assert _relative(out, _right(*exact, False)) < 0.04


def test_what_the_call_makes_for_itself_is_ready_on_another_stream() -> None:
    """Scales of 1, and V as the attention reads it: the current stream, which is busy, has no part in them."""
    torch.manual_seed(0)
    stored, _, _ = _stored(*[(1, 2, 200, 128)] * 3)
    expected = flashlab.fp8_attention(*stored, dtype="float16")
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(20):
        torch.cuda._sleep(10**7)
        flashlab.fp8_attention(*stored, dtype="float16", out=out, stream=stream)
        # Where the call's own memory was, if the current stream had that.
        torch.full((1 << 16,), 0x7FFF, dtype=torch.int16, device="cuda")
        stream.synchronize()
        assert torch.equal(out, expected)
        out.zero_()
        torch.cuda.synchronize()
