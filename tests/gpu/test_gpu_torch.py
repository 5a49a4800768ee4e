"""The operator in torch and the attention in transformers, on a GPU."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import shared

import flashlab

# The libraries' own warnings are not under test here, but where a test says so.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SHAPES = ((1, 8, 8, 512, 512, 64), (2, 8, 2, 300, 700, 128), (4, 32, 8, 1, 2048, 128), (1, 16, 16, 4096, 4096, 128))


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    importlib.import_module("flashlab.torch")
    return torch


def qkv(torch: Any, shape: tuple[int, ...], dtype: str = "float16") -> list[Any]:
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = shape
    return [
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=getattr(torch, dtype))
        for heads, length in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_operator_is_the_public_call(torch: Any, shape: tuple[int, ...], dtype: str) -> None:
    q, k, v = qkv(torch, shape, dtype)
    for causal in (False, True):
        wanted = flashlab.attention(q, k, v, causal=causal, return_lse=True)
        for _ in range(3):
            out, lse = flashlab.torch.attention(q, k, v, causal=causal, return_lse=True)
            assert torch.equal(out, wanted[0])
            assert torch.equal(lse, wanted[1])
            assert torch.equal(torch.ops.flashlab.attention(q, k, v, causal), wanted[0])


@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
def test_opcheck(torch: Any, operator: str) -> None:
    checked = torch.library.opcheck(getattr(torch.ops.flashlab, operator).default, (*qkv(torch, SHAPES[1]), True))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_whole_without_a_word_of_ours(torch: Any, mode: str) -> None:
    def double(q: Any, k: Any, v: Any) -> Any:
        return flashlab.torch.attention(2 * q, k, v, causal=True) + 1

    torch._dynamo.reset()
    compiled = torch.compile(double, fullgraph=True, mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in SHAPES[:2]:
            arrays = qkv(torch, shape)
            for _ in range(3):
                torch.testing.assert_close(compiled(*arrays), double(*arrays), atol=2e-3, rtol=2e-3)
    assert not [
        str(one.message) for one in caught if "flashlab" in str(one.message) or "raph break" in str(one.message)
    ]


def test_a_graph_replays_beside_calls_on_the_stream_that_it_was_captured_on(torch: Any) -> None:
    """Persistent kernels count work tiles: a graph must have counters of its own."""
    capturing, replaying = torch.cuda.Stream(), torch.cuda.Stream()
    static, others = qkv(torch, SHAPES[3]), qkv(torch, SHAPES[3])
    wanted = [flashlab.attention(*arrays, causal=True) for arrays in (static, others)]
    with torch.cuda.stream(capturing):
        flashlab.torch.attention(*static, causal=True)
        flashlab.torch.attention(*static, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capturing):
        captured = flashlab.torch.attention(*static, causal=True)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(replaying):
            graph.replay()
        with torch.cuda.stream(capturing):
            out = flashlab.torch.attention(*others, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted[0])
    assert torch.equal(out, wanted[1])


def test_repeated_calls_follow_streams_devices_and_addresses(torch: Any) -> None:
    for stage in (None, "12_persistent"):
        calls = [qkv(torch, SHAPES[0]) for _ in range(40)]
        wanted = [torch.nn.functional.scaled_dot_product_attention(*call) for call in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        outs = []
        for index, call in enumerate(calls * 2):
            with torch.cuda.stream(streams[index % 4]):
                outs.append(flashlab.attention(*call, stage=stage))
        torch.cuda.synchronize()
        for out, right in zip(outs, wanted * 2, strict=True):
            torch.testing.assert_close(out, right, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_says_the_same_as_with_sdpa(torch: Any, dtype: str) -> None:
    model = shared.llama(torch, layers=4, heads=8, head_dim=128).to("cuda", getattr(torch, dtype))
    ids = torch.randint(1, 128, (2, 777), device="cuda")
    logits, tokens = {}, {}
    for name in ("sdpa", "flashlab"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(ids).logits.float()
            tokens[name] = model.generate(ids, max_new_tokens=32, do_sample=False)
    tolerance = 5e-3 if dtype == "float16" else 4e-2
    torch.testing.assert_close(logits["flashlab"], logits["sdpa"], atol=tolerance, rtol=tolerance)
    if dtype == "float16":
        assert torch.equal(tokens["flashlab"][:, :785], tokens["sdpa"][:, :785])


@pytest.mark.parametrize("kind", shared.WINDOWED_MODELS)
def test_a_model_with_windows_says_the_same_as_eager(torch: Any, kind: str) -> None:
    model = shared.windowed(torch, kind, 100).to("cuda", torch.bfloat16)
    ids = torch.randint(1, 128, (2, 777), device="cuda")
    logits = {}
    for name in ("eager", "flashlab"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(ids).logits.float()
            assert model.generate(ids, max_new_tokens=8, do_sample=False).shape == (2, 785)
    torch.testing.assert_close(logits["flashlab"], logits["eager"], atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize("kind", ["Llama", *shared.WINDOWED_MODELS])
def test_packed_sequences_are_apart_from_each_other(torch: Any, kind: str) -> None:
    """As the model says of one sequence after the other, with this operator and with eager attention."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    if kind == "Llama":
        model = shared.llama(torch, layers=2, heads=8, head_dim=128)
    else:
        model = shared.windowed(torch, kind, 100)
    model = model.to("cuda", torch.float16)
    lengths = (1, 300, 777, 64)
    sequences = [torch.randint(1, 128, (length,)).tolist() for length in lengths]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": sequence} for sequence in sequences])
    batch = {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}
    wanted = []
    with torch.no_grad():
        for name in ("eager", "flashlab"):
            model.set_attn_implementation(name)
            ids = [torch.tensor([sequence], device="cuda") for sequence in sequences]
            wanted.append(torch.cat([model(one, use_cache=False).logits for one in ids], 1))
        packed = model(**{**batch, "labels": None}, use_cache=False).logits
    assert packed.shape == (1, sum(lengths), 128)
    scale = max(1.0, float(wanted[0].abs().max()))
    for logits in wanted:
        assert float((packed - logits).abs().max()) <= 5e-3 * scale


@pytest.mark.parametrize("kind", ["Llama", *shared.WINDOWED_MODELS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_says_the_same_as_eager(torch: Any, kind: str, side: str) -> None:
    """Also with the first part of the prompts in the cache, and for padding on the left, token after token."""
    if kind == "Llama":
        model = shared.llama(torch, layers=2, heads=8, head_dim=128)
    else:
        model = shared.windowed(torch, kind, 100)
    model = model.to("cuda", torch.float16)
    ids = torch.randint(1, 128, (4, 777), device="cuda")
    columns, lengths = torch.arange(777, device="cuda")[None], torch.tensor([300, 777, 1, 64], device="cuda")[:, None]
    mask = columns >= 777 - lengths if side == "left" else columns < lengths
    said: dict[str, list[Any]] = {}
    for name in ("eager", "flashlab"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            said[name] = [model(ids, attention_mask=mask).logits[mask]]
            cache = model(ids[:, :500], attention_mask=mask[:, :500]).past_key_values
            rest = model(ids[:, 500:], attention_mask=mask, past_key_values=cache).logits
            said[name].append(rest[mask[:, 500:]])
            if side == "left":
                said[name].append(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    for logits, by_eager in zip(said["flashlab"][:2], said["eager"], strict=False):
        assert float((logits - by_eager).abs().max()) <= 5e-3 * max(1.0, float(by_eager.abs().max()))
    if side == "left" and kind == "Llama":
        assert torch.equal(said["flashlab"][2], said["eager"][2])
