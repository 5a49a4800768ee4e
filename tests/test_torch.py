"""The operator in torch and the attention in transformers, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import shared
from shared import needs_compiler

import flashlab
from flashlab.core import errors

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
import flashlab.torch  # noqa: E402 - needs torch

STAGE = "01_coalesced"  # compiles fastest


def qkv(q_len: int = 40, kv_len: int = 50, dtype: Any = torch.float16) -> tuple[Any, Any, Any]:
    made = torch.Generator().manual_seed(q_len)
    shapes = (2, 4, q_len, 64), (2, 2, kv_len, 64), (2, 2, kv_len, 64)
    return tuple(torch.randn(shape, generator=made).to(dtype) for shape in shapes)  # type: ignore[return-value]


def test_without_torch_the_error_says_what_installs_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from flashlab.core.errors import MissingPackageError\n"
        "try: import flashlab.torch\n"
        "except MissingPackageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'flashlab[gpu]'" in done.stdout


@needs_compiler
@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(operator: str, causal: bool) -> None:
    q, k, v = qkv()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    call = getattr(torch.ops.flashlab, operator).default
    checked = torch.library.opcheck(call, (q, k, v, causal, 0.2, STAGE))
    assert set(checked.values()) == {"SUCCESS"}


@needs_compiler
@pytest.mark.parametrize(("dtype", "stage"), [(torch.float16, STAGE), (torch.bfloat16, "06_cp_async")])
def test_the_operator_is_the_public_call(dtype: Any, stage: str) -> None:
    q, k, v = qkv(dtype=dtype)
    out, lse = flashlab.torch.attention(q, k, v, causal=True, scale=0.2, stage=stage, return_lse=True)
    expected = flashlab.attention(q, k, v, causal=True, scale=0.2, stage=stage, return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert torch.equal(out, torch.ops.flashlab.attention(q, k, v, causal=True, scale=0.2, stage=stage))


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_watches_operators_sees_the_call() -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    operators: list[str] = []
    arrays = qkv()
    expected = flashlab.torch.attention(*arrays, stage=STAGE)
    with Seen():
        assert torch.equal(flashlab.torch.attention(*arrays, stage=STAGE), expected)
    assert "flashlab.attention.default" in operators
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(flashlab.torch.attention(*arrays, stage=STAGE), expected)
    assert "flashlab::attention" in {event.key for event in profile.key_averages()}
    traced = torch.jit.trace(lambda *inputs: flashlab.torch.attention(*inputs, stage=STAGE), arrays)
    others = [array.flip(-1) for array in arrays]
    others[2] = 2 * others[2]
    assert torch.equal(traced(*others), flashlab.attention(*others, stage=STAGE))


@needs_compiler
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_without_a_warning_and_for_any_length(backend: str) -> None:
    def double(q: Any, k: Any, v: Any) -> Any:
        out, lse = flashlab.torch.attention(2 * q, k, v, causal=True, stage=STAGE, return_lse=True)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(double, backend=backend, fullgraph=True)
    for lengths in ((40, 50), (7, 9), (1, 33)):
        arrays = qkv(*lengths)
        for got, wanted in zip(compiled(*arrays), double(*arrays), strict=True):
            assert torch.equal(got, wanted)


@needs_compiler
def test_a_cache_in_pages_is_an_operator_too() -> None:
    q, *pools = (torch.randn(shape).half() for shape in ((2, 4, 1, 64), (5, 2, 16, 64), (5, 2, 16, 64)))
    table, lengths = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.tensor([20, 7], dtype=torch.int32)
    call = (q, *pools, table, lengths)
    checked = torch.library.opcheck(torch.ops.flashlab.paged_attention.default, call)
    assert set(checked.values()) == {"SUCCESS"}
    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.flashlab.paged_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*call), flashlab.paged_attention(*call))
    named = torch.ops.flashlab.paged_attention(*call, stage="d12_paged_ends")
    assert torch.equal(named, flashlab.paged_attention(*call, stage="d12_paged_ends"))
    with pytest.raises(errors.UnknownStageError, match="wanted one that reads a paged cache"):
        torch.ops.flashlab.paged_attention(*call, stage="16_ones_column")
    with pytest.raises(errors.InputError, match="q: wanted a tensor that needs no gradient"):
        torch.ops.flashlab.paged_attention(q.requires_grad_(), *call[1:])


@needs_compiler
def test_gradients_are_refused_with_what_works() -> None:
    q, k, v = qkv()
    k.requires_grad_()
    with pytest.raises(errors.InputError, match=r"k: wanted a tensor that needs no gradient.*torch\.no_grad"):
        flashlab.torch.attention(q, k, v, stage=STAGE)
    compiled = torch.compile(lambda *inputs: flashlab.torch.attention(*inputs, stage=STAGE), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"k: wanted a tensor that needs no gradient.*torch\.no_grad"):
        compiled(q, k, v)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), flashlab.attention(q, k, v, stage=STAGE))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and sparse tensors
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.to("meta"), "got a torch tensor on meta, which has no data"),
        (lambda x: x.to_sparse(), r"got a torch tensor with layout torch.sparse_coo. `[qkx].to_dense\(\)`"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "got a nested tensor. `flashlab.varlen_attention` takes"),
        (torch._neg_view, r"negative bit set. `[qkx].resolve_neg\(\)` works"),
        (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), r"without memory. `[qkx].clone\(\)` works"),
        (torch._subclasses.FakeTensorMode().from_tensor, "without memory, .* operators of `flashlab.torch` take"),
    ],
)
def test_tensors_without_strides_in_memory_are_refused_with_what_works(make: Any, words: str) -> None:
    q, k, v = qkv()
    for call in (
        lambda: flashlab.attention(make(q), k, v),
        lambda: flashlab.attention(q, make(k), v),
        lambda: flashlab.quantize_e4m3(make(q)),
    ):
        with pytest.raises(errors.DeviceError, match=words):
            call()


@needs_compiler
def test_autograd_is_told_of_an_output_that_is_written() -> None:
    q, k, v = qkv()
    out, weight = torch.zeros_like(q), torch.ones((), dtype=q.dtype, requires_grad=True)
    product = (weight * out).sum()  # whose gradient is made of what `out` held
    flashlab.attention(q, k, v, stage=STAGE, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        out = torch.zeros_like(q)
        assert flashlab.attention(q, k, v, stage=STAGE, out=out) is out


def test_what_torch_would_cast_or_print_whole_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(errors.DeviceError, match=r"k: wanted a torch tensor, got ndarray\. `flashlab"):
        flashlab.torch.attention(q, k.numpy(), v)
    with pytest.raises(errors.ParameterError, match="causal: wanted True or False, got None"):
        flashlab.torch.attention(q, k, v, causal=None)  # type: ignore[arg-type] # to torch it is False
    with pytest.raises(errors.ParameterError, match="return_lse: wanted True or False, got 'no'"):
        flashlab.torch.attention(q, k, v, return_lse="no")  # type: ignore[arg-type]


def test_a_tensor_of_vmap_is_for_the_operators() -> None:
    q, k, v = qkv()
    with pytest.raises(errors.DeviceError, match=r"v: .* without memory, .* operators of `flashlab\.torch` take"):
        torch.vmap(lambda x: flashlab.attention(q, k, x))(v[None])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized tensors
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.to(torch.float8_e5m2), r"got float8_e5m2\. `k\.half\(\)` works"),
        (lambda x: x.to(torch.complex64).conj(), r"got complex64\. `k\.half\(\)` works"),
        (
            lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
            r"got qint8\. `k\.dequantize\(\)\.half\(\)` works",
        ),
    ],
)
def test_a_type_that_numpy_lacks_is_advised_in_torchs_words(make: Any, words: str) -> None:
    q, k, v = qkv()
    with pytest.raises(errors.DTypeError, match=f"k: wanted float16 or bfloat16, {words}"):
        flashlab.attention(q, make(k), v)


def _lost(call: Any, x: Any) -> dict[str, Any]:
    """Ways to ask for a derivative that no tensor of the kernel's would have."""
    func, forward = torch.func, torch.autograd.forward_ad

    def total(x: Any) -> Any:
        return call(x).float().sum()

    def dual() -> Any:
        with forward.dual_level():
            return call(forward.make_dual(x, x))

    return {
        "grad": lambda: func.grad(total)(x),
        "vjp": lambda: func.vjp(call, x),
        "jacrev": lambda: func.jacrev(total)(x),
        "jvp": lambda: func.jvp(call, (x,), (x,)),
        "grad of an outer level": lambda: func.grad(lambda y: func.grad(lambda s: s * total(y))(torch.ones(())))(x),
        "make_dual": dual,
    }


OF_Q, OF_V = qkv(), qkv()
PAGED = [torch.zeros(shape, dtype=torch.float16) for shape in ((5, 2, 16, 64), (5, 2, 16, 64))]
PAGED += [torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, where it loads jvp
@pytest.mark.parametrize("way", _lost(None, None))
@pytest.mark.parametrize(
    ("call", "x"),
    [
        (lambda q: flashlab.attention(q, *OF_Q[1:], stage=STAGE), OF_Q[0]),
        (lambda q: flashlab.torch.attention(q, *OF_Q[1:], stage=STAGE), OF_Q[0]),
        (lambda v: flashlab.torch.attention(*OF_V[:2], v, stage=STAGE, return_lse=True)[0], OF_V[2]),
        (lambda q: torch.ops.flashlab.paged_attention(q, *PAGED), torch.zeros(2, 4, 1, 64).half()),
    ],
    ids=["attention", "operator", "of v", "paged"],
)
def test_derivatives_of_torch_func_are_refused(call: Any, x: Any, way: str) -> None:
    """The wrappers of torch.func are gone below autograd: what an operator computes there has no gradient at all."""
    with pytest.raises(errors.InputError, match=r"[qv]: wanted a tensor that needs no gradient"):
        _lost(call, x)[way]()


@needs_compiler
def test_what_wants_no_derivative_works_under_torch_func() -> None:
    q, k, v = qkv()
    out = flashlab.torch.attention(q, k, v, stage=STAGE)

    def scaled(x: Any) -> Any:
        return (x * flashlab.torch.attention(q, k, v, stage=STAGE).float()).sum()

    assert torch.equal(torch.func.grad(scaled)(torch.ones(())), out.float().sum())

    @torch.no_grad()
    def no_grad(x: Any) -> Any:
        return flashlab.torch.attention(x, k, v, stage=STAGE)

    assert torch.equal(torch.func.vjp(no_grad, q)[0], out)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_of_numpy_are_refused_while_tracing(name: str) -> None:
    factor = {name: numpy.float32(0.3)}
    call = torch.compile(partial(flashlab.torch.attention, stage=STAGE, **factor), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=rf"{name}: wanted a Python number .*`float\({name}\)` before works"):
        call(*qkv())


def test_what_tracing_sees() -> None:
    with torch.device("meta"):
        q, k, v = torch.empty(2, 40, 4, 64, dtype=torch.bfloat16).transpose(1, 2), *torch.empty(2, 2, 2, 50, 64)
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        arrays = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16) for x in (q, k, v)]
        out, lse = flashlab.torch.attention(*arrays, return_lse=True)
        assert (out.shape, out.dtype, out.stride()) == (q.shape, torch.bfloat16, q.stride())
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        with pytest.raises(errors.DTypeError, match=r"v: .* got torch.float32. `v.half\(\)` works"):
            flashlab.torch.attention(*arrays[:2], arrays[2].float())
        with pytest.raises(errors.ShapeError, match="q: wanted 4 dimensions"):
            flashlab.torch.attention(arrays[0][0], *arrays[1:])
        with pytest.raises(errors.DTypeError, match=r"k: wanted torch.bfloat16.*`k.to\(q.dtype\)` works"):
            flashlab.torch.attention(arrays[0], arrays[1].half(), arrays[2])
        with pytest.raises(errors.ShapeError, match="v: wanted the head dim of q, 64, got shape"):
            flashlab.torch.attention(*arrays[:2], arrays[2][..., :32])
    out = flashlab.torch.attention(*(x.bfloat16() for x in (q, k, v)))  # as of a model on meta
    assert (out.device.type, out.shape, out.dtype) == ("meta", q.shape, torch.bfloat16)


# --- transformers ---


@pytest.fixture(scope="module")
def llama() -> Any:
    model = shared.llama(torch, layers=2, heads=4, head_dim=64)
    flashlab.torch.register()  # once more changes nothing
    return model


IDS = torch.randint(1, 128, (2, 19), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")  # those of transformers
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_a_model_says_the_same_as_with_sdpa(llama: Any, dtype: Any, tolerance: float) -> None:
    model = llama.to(dtype)
    logits, tokens = {}, {}
    for name in ("sdpa", "flashlab"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        with torch.no_grad():
            logits[name] = model(IDS).logits
            options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
            tokens[name] = model.generate(IDS, **options)
    assert tokens["sdpa"].shape == (2, 19 + 6)
    torch.testing.assert_close(logits["flashlab"], logits["sdpa"], atol=tolerance, rtol=tolerance)
    if dtype is torch.float16:  # bfloat16's rounding is as large as the gap between two tokens of a random model
        assert torch.equal(tokens["flashlab"], tokens["sdpa"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", shared.WINDOWED_MODELS)
def test_a_model_with_windows_says_the_same_as_eager(kind: str) -> None:
    """Also with the first part of a prompt in the cache, and token after token."""
    model = shared.windowed(torch, kind, 8).to(torch.float16)
    logits, parts, tokens = {}, {}, {}
    with torch.no_grad():
        for name in ("eager", "flashlab"):
            model.set_attn_implementation(name)
            logits[name] = model(IDS).logits
            cache = model(IDS[:, :11]).past_key_values
            parts[name] = model(IDS[:, 11:], past_key_values=cache).logits
            tokens[name] = model.generate(IDS, max_new_tokens=6, do_sample=False)
    scale = float(logits["eager"].abs().max())
    for found in (logits, parts):
        assert float((found["flashlab"] - found["eager"]).abs().max()) <= 4e-3 * max(1.0, scale)
    assert torch.equal(tokens["flashlab"], tokens["eager"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["ModernBert", "T5Gemma"])
def test_an_encoder_with_windows_says_the_same_as_eager(kind: str) -> None:
    """Their layers hand on another number for the same window; that of the mask counts."""
    transformers = pytest.importorskip("transformers")
    flashlab.torch.register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "pad_token_id": 0}
    if kind == "ModernBert":
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, local_attention=8))
    else:
        sizes |= {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 4}
        config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=128)
        model = transformers.T5GemmaModel(config).encoder
    model, said = model.to(torch.float16).eval(), {}
    for name in ("eager", "flashlab"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            said[name] = model(IDS).last_hidden_state
    torch.testing.assert_close(said["flashlab"], said["eager"], atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Llama", *shared.WINDOWED_MODELS])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_are_apart_from_each_other(kind: str, use_cache: bool) -> None:
    """As one model after the other says of them, in windows and with soft caps too."""
    if kind == "Llama":
        model = shared.llama(torch, layers=2, heads=4, head_dim=64).to(torch.float16)
    else:
        model = shared.windowed(torch, kind, 8).to(torch.float16)
    transformers = pytest.importorskip("transformers")
    flashlab.torch.register()
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    lengths = (19, 1, 7, 12)
    batch = collate([{"input_ids": IDS[0, :length]} for length in lengths])
    model.set_attn_implementation("flashlab")
    with torch.no_grad():
        logits = model(**{**batch, "labels": None}, use_cache=use_cache).logits
        alone = torch.cat([model(IDS[:1, :length]).logits for length in lengths], 1)
        model.set_attn_implementation("eager")
        eager = torch.cat([model(IDS[:1, :length]).logits for length in lengths], 1)
    assert logits.shape == (1, sum(lengths), 128)
    scale = max(1.0, float(eager.abs().max()))
    for wanted in (alone, eager):
        assert float((logits - wanted).abs().max()) <= 4e-3 * scale


def padded(lengths: tuple[int, ...], side: str, length: int = 19) -> Any:
    """An attention mask of sequences of these lengths, with padding on one side."""
    columns, lasting = torch.arange(length)[None], torch.tensor(lengths)[:, None]
    return (columns < lasting if side == "right" else columns >= length - lasting).long()


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mistral"])
def test_a_padded_batch_says_the_same_as_with_sdpa(kind: str) -> None:
    """Prompts padded on either side, also with their first part in the cache, and generation token after token; in
    windows narrower than the padding, and with soft caps, which only eager has."""
    if kind == "Llama":
        model = shared.llama(torch, layers=2, heads=4, head_dim=64).to(torch.float16)
    else:
        model = shared.windowed(torch, kind, 6).to(torch.float16)
    ids = torch.randint(1, 128, (3, 19), generator=torch.Generator().manual_seed(2))
    left, right = (padded((9, 19, 1), side) for side in ("left", "right"))
    said, wanted = {}, "eager" if kind == "Gemma2" else "sdpa"
    with torch.no_grad():
        for name in (wanted, "flashlab"):
            model.set_attn_implementation(name)
            whole = [model(ids, attention_mask=mask).logits for mask in (left, right)]
            cache = model(ids[:, :7], attention_mask=left[:, :7]).past_key_values
            rest = model(ids[:, 7:], attention_mask=left, past_key_values=cache).logits
            tokens = model.generate(ids, attention_mask=left, max_new_tokens=5, do_sample=False)
            said[name] = (*(logits[mask.bool()] for logits, mask in zip(whole, (left, right), strict=True)),)
            said[name] += (rest[left[:, 7:].bool()], tokens)
    assert said["flashlab"][-1].shape == (3, 19 + 5)
    assert torch.equal(said["flashlab"][-1], said[wanted][-1])
    for logits, by_theirs in zip(said["flashlab"][:-1], said[wanted][:-1], strict=True):
        assert float((logits - by_theirs).abs().max()) <= 4e-3 * max(1.0, float(by_theirs.abs().max()))


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "T5Gemma"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_encoder_with_padding_says_the_same_as_eager(kind: str, side: str) -> None:
    """With windows and without, and a decoder whose every query attends to the encoder's tokens."""
    transformers = pytest.importorskip("transformers")
    flashlab.torch.register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "pad_token_id": 0}
    mask, more = padded((19, 7), side), {}
    if kind == "T5Gemma":
        sizes |= {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 4}
        config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=128)
        model, more = transformers.T5GemmaModel(config), {"decoder_input_ids": IDS[:, 3:10]}
    else:
        config = getattr(transformers, f"{kind}Config")(**sizes, **{"ModernBert": {"local_attention": 8}}.get(kind, {}))
        model = getattr(transformers, f"{kind}Model")(config)
    model, said = model.to(torch.float16).eval(), {}
    for name in ("eager", "flashlab"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            out = model(IDS, attention_mask=mask, **more)
        of_encoder = out.encoder_last_hidden_state if more else out.last_hidden_state
        said[name] = (of_encoder[mask.bool()], *((out.last_hidden_state,) if more else ()))
    torch.testing.assert_close(said["flashlab"], said["eager"], atol=2e-2, rtol=2e-2)


@needs_compiler
@pytest.mark.filterwarnings("default")
def test_padding_is_looked_for_once_a_forward_pass(llama: Any) -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    operators: list[str] = []
    model = llama.to(torch.float16)
    model.set_attn_implementation("flashlab")
    with torch.no_grad(), Seen():
        model(IDS, attention_mask=padded((5, 19), "left"))
    assert operators.count("flashlab.varlen_attention.default") == 2
    assert operators.count("aten.nonzero.default") == 1


@pytest.mark.parametrize(("sequences", "packed"), [([0, 0, 0], False), ([0, 1, 1], True)])
def test_a_mask_of_one_sequence_is_the_kernels_own(sequences: list[int], packed: bool) -> None:
    """While it traces, transformers takes every batch for a packed one."""
    masking = pytest.importorskip("transformers.masking_utils")
    positions, numbers = torch.arange(3)[None], torch.tensor([sequences])
    remapped = masking.remap_positions_for_packed_sequence(masking.causal_mask_function, positions)
    mask = masking.and_masks(remapped, masking.packed_sequence_mask_function(numbers))
    call = {"q_length": 3, "kv_length": 3, "allow_is_causal_skip": False, "mask_function": mask}
    made = flashlab.torch._transformers_mask(**call)
    assert made.shape == (0,) if packed else made is None


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_has_the_bits_of_each_sequence(causal: bool) -> None:
    q, k, v = (x[:1] for x in qkv(40, 40))
    ends = torch.tensor([0, 25, 25, 26, 40])
    options = {"sliding_window": 8, "softcap": 5.0, "scaling": 0.25}
    attend = partial(flashlab.torch._transformers_attention, SimpleNamespace(is_causal=causal))
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 25, "max_length_k": 25}
    out, _ = attend(q, k, v, None, **options, **packed)
    assert (out.shape, out.is_contiguous()) == ((1, 40, 4, 64), True)
    for first, end in ((0, 25), (25, 26), (26, 40)):
        alone, _ = attend(*(x[:, :, first:end] for x in (q, k, v)), None, **options)
        assert torch.equal(out[:, first:end], alone)


@needs_compiler
@pytest.mark.parametrize("queries", [40, 9, 1])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 8), (False, None), (False, 8)])
def test_padded_attention_is_that_of_the_other_tokens(queries: int, causal: bool, window: int | None) -> None:
    """With padding on either side, on both, nowhere, and everywhere; the mask's first columns left the window."""
    made = torch.Generator().manual_seed(3)
    q = torch.randn(5, queries, 4, 64, generator=made).half().transpose(1, 2)
    k, v = (torch.randn(5, 2, 40, 64, generator=made).half() for _ in "kv")
    first, end = torch.tensor([[25, 40], [0, 36], [2, 38], [0, 40], [0, 0]]).T[..., None]
    columns = torch.arange(40)[None]
    valid = (columns >= first) & (columns < end)
    call = {"q_length": queries, "kv_length": 40, "q_offset": 43 - queries, "kv_offset": 3, "local_size": window}
    call |= {"allow_is_bidirectional_skip": not causal, "allow_is_causal_skip": causal}
    call |= {"attention_mask": torch.nn.functional.pad(valid, (3, 0)), "config": SimpleNamespace(sliding_window=window)}
    mask, module = flashlab.torch._transformers_mask(**call), SimpleNamespace(is_causal=causal)
    options = {"sliding_window": window, "softcap": 5.0, "scaling": 0.25}
    out, _ = flashlab.torch._transformers_attention(module, q, k, v, mask, **options)
    assert (out.shape, out.is_contiguous()) == ((5, queries, 4, 64), True)
    apart = torch.arange(40 - queries, 40)[:, None] - columns
    seen = valid[:, None] & (apart >= 0) if causal else valid[:, None].expand(-1, queries, -1)
    if window is not None:  # of an encoder, the keys on each side
        seen = seen & (apart.abs() < window + (not causal))
    scores = (q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3)) * 0.25
    scores = (5 * torch.tanh(scores / 5)).masked_fill(~seen[:, None], -torch.inf)
    wanted = (scores.softmax(-1).nan_to_num() @ v.float().repeat_interleave(2, 1)).transpose(1, 2)
    if causal or window is not None:  # else the queries may be of another sequence, in cross-attention
        wanted[~valid[:, 40 - queries :]] = 0
        assert not out[~valid[:, 40 - queries :]].any()
    torch.testing.assert_close(out.float(), wanted, atol=4e-3, rtol=4e-3)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_a_layers_window_counts_the_querys_own_key(causal: bool) -> None:
    q, k, v = qkv(40, 40)
    options = {"sliding_window": 8, "softcap": 5.0, "scaling": 0.25}
    out, _ = flashlab.torch._transformers_attention(SimpleNamespace(is_causal=causal), q, k, v, None, **options)
    apart = torch.arange(40)[:, None] - torch.arange(40)[None]
    seen = (apart < 8) & (apart >= (0 if causal else -7))
    scores = (q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3)) * 0.25
    scores = (5 * torch.tanh(scores / 5)).masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ v.float().repeat_interleave(2, 1)
    torch.testing.assert_close(out.transpose(1, 2).float(), wanted, atol=4e-3, rtol=4e-3)


@needs_compiler
def test_a_models_attention_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 9, heads, 64).half().transpose(1, 2) for heads in (4, 2, 2))
    attend = flashlab.torch.attention
    outs: list[Any] = []
    monkeypatch.setattr(flashlab.torch, "attention", lambda *args, **how: outs.append(attend(*args, **how)) or outs[-1])
    found, _ = flashlab.torch._transformers_attention(SimpleNamespace(is_causal=True), q, k, v, None)
    assert (found.shape, found.is_contiguous(), found.data_ptr()) == ((2, 9, 4, 64), True, outs[0].data_ptr())
    assert torch.equal(outs[0], attend(*(x.contiguous() for x in (q, k, v)), causal=True))


@needs_compiler
def test_windows_and_soft_caps_pass_through_the_operator() -> None:
    q, k, v = qkv()
    call = (q, k, v, True, 0.2, "08_swizzle", [7, -1], 3.0)
    assert set(torch.library.opcheck(torch.ops.flashlab.attention.default, call).values()) == {"SUCCESS"}
    out = flashlab.torch.attention(q, k, v, causal=True, window=(7, None), softcap=3.0, scale=0.2, stage="08_swizzle")
    assert torch.equal(out, torch.ops.flashlab.attention(*call))
    assert not torch.equal(out, torch.ops.flashlab.attention(*call[:6]))
    torch._dynamo.reset()
    windowed = lambda *x: flashlab.torch.attention(*x, causal=True, window=(7, None), stage="08_swizzle")  # noqa: E731
    compiled = torch.compile(windowed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), windowed(q, k, v))


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        *(("scale", value, errors.ParameterError) for value in ("3", True, [0.5])),
        *(("softcap", value, errors.ParameterError) for value in ("3", None, True)),
        ("stage", 5, errors.UnknownStageError),
    ],
)
def test_options_that_are_none_such_are_refused_as_by_the_public_call(option: str, value: Any, error: Any) -> None:
    said = []
    for call in (flashlab.attention, flashlab.torch.attention):
        with pytest.raises(error, match=f"{option}: wanted") as refused:
            call(*qkv(), **{option: value})
        said.append(str(refused.value))
    assert said[0] == said[1]


@needs_compiler
def test_numbers_of_other_types_and_ones_that_change_are_options_too() -> None:
    q, k, v = qkv()
    by_numpy = flashlab.torch.attention(q, k, v, scale=numpy.float32(0.5), softcap=2, stage="08_swizzle")
    assert torch.equal(by_numpy, flashlab.attention(q, k, v, scale=0.5, softcap=2.0, stage="08_swizzle"))
    torch._dynamo.reset()
    scaled = lambda scale: flashlab.torch.attention(q, k, v, scale=scale, stage=STAGE)  # noqa: E731
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for scale in (0.25, 0.5, 1):
        assert torch.equal(compiled(scale), scaled(scale))


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("default")
def test_a_later_part_of_a_prompt_is_aligned_with_its_end(llama: Any) -> None:
    """The second half of a prompt, with the first in the cache, where torch's SDPA needs a mask."""
    model = llama.to(torch.float16)
    model.set_attn_implementation("flashlab")
    with torch.no_grad():
        whole = model(IDS).logits
        cache = model(IDS[:, :11]).past_key_values
        rest = model(IDS[:, 11:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 11:], atol=4e-3, rtol=4e-3)


@pytest.mark.filterwarnings("default")
def test_a_model_refuses_holes_static_caches_and_gradients(llama: Any) -> None:
    model = llama.to(torch.float16)
    model.set_attn_implementation("flashlab")
    holes = torch.ones_like(IDS)
    holes[0, 3:5] = 0
    with torch.no_grad():
        with pytest.raises(errors.UnsupportedError, match=r"zeros between ones.*='sdpa' or 'eager' may take it"):
            model(IDS, attention_mask=holes)
        with pytest.raises(errors.UnsupportedError, match=r"padding_side='left'.*zeros between ones"):
            model.generate(IDS, attention_mask=padded((5, 19), "right"), max_new_tokens=2)
        with pytest.raises(errors.UnsupportedError, match=r"mask of shape \(2, 1, 19, 19\)"):
            model(IDS, attention_mask=torch.ones(2, 1, 19, 19, dtype=torch.bool))
        with pytest.raises(errors.UnsupportedError, match="wanted a dynamic cache"):
            model.generate(IDS, max_new_tokens=2, cache_implementation="static")
        with pytest.raises(errors.UnsupportedError, match=r"return_flash_attn_kwargs=True.*with position_ids alone"):
            model(IDS, position_ids=torch.arange(19).remainder(10)[None], use_cache=False)
    with pytest.raises(errors.InputError, match="needs no gradient"):
        model(IDS)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Bloom", "Falcon"])
def test_a_model_with_attention_of_its_own_is_refused(kind: str) -> None:
    """It would take the mask, which is None for a causal one, and never call the kernel."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    flashlab.torch.register()
    config = getattr(transformers, f"{kind}Config")(hidden_size=64, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(errors.UnsupportedError, match=f"calls its AttentionInterface, got {kind}ForCausalLM"):
        getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="flashlab")


@pytest.mark.filterwarnings("default")
def test_a_model_in_another_type_is_advised_in_its_own_words(llama: Any) -> None:
    model = llama.to(torch.float32)
    model.set_attn_implementation("flashlab")
    with (
        torch.no_grad(),
        pytest.raises(errors.DTypeError, match=r"a model in .* got torch\.float32\. `model\.half\(\)`"),
    ):
        model(IDS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 0.1}, "wanted dropout 0, got dropout 0.1"),
        ({"position_bias": 1}, "position_bias=1"),
        ({"position_bias": torch.zeros(1, 4, 40, 50)}, "got position_bias"),
        ({"s_aux": torch.zeros(4)}, "got s_aux. attn_implementation='sdpa' or 'eager' may take it"),
        ({"sinks": torch.zeros(1)}, "got sinks"),  # equal to False
        ({"indices": torch.zeros(2, 40, 8)}, "got indices"),
        ({"block_indices": torch.zeros(2, 4, 40, 8)}, "got block_indices"),
        ({"cu_seq_lens_q": [0, 3]}, "wanted cu_seq_lens_q, .* got packed sequences with cu_seq_lens_q alone"),
        (
            {"cu_seq_lens_q": [0], "cu_seq_lens_k": [0], "max_length_q": 1},
            "wanted all of them in a batch of 1, got .* 2",
        ),
        ({"output_attentions": True}, "output_attentions"),
        ({"sliding_window": 0}, "wanted a sliding_window of 1 or more, or None, got 0"),
        ({"attention_mask": torch.ones(2, 40, dtype=torch.bool)}, r"mask of shape \(2, 40\)"),
        ({"attention_mask": torch.ones(2, 50)}, r"wanted a bool .*\(2, 50\).* got .*\(2, 50\) and torch.float32"),
        ({"attention_mask": torch.ones(1, 50, dtype=torch.bool)}, r"attention_mask \(2, 50\).* got .*\(1, 50\)"),
        ({"position_ids": torch.arange(40).remainder(25)[None]}, "got packed sequences with position_ids alone"),
        (
            {"attention_mask": torch.ones(2, 50, dtype=torch.bool), "cu_seq_lens_q": [0]},
            "got packed sequences with padding",
        ),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=words):
        flashlab.torch._transformers_attention(
            SimpleNamespace(is_causal=True), *qkv(), **{"attention_mask": None, **options}
        )


@pytest.mark.parametrize(("dim", "of_values"), [(32, 32), (64, 32)])
def test_a_model_with_other_head_dims_is_refused(dim: int, of_values: int) -> None:
    q, k, v = qkv()
    with pytest.raises(errors.UnsupportedError, match=f"64 or 96 .* got {dim}, and {of_values} of values.*='sdpa'"):
        flashlab.torch._transformers_attention(
            SimpleNamespace(is_causal=True), q[..., :dim], k[..., :dim], v[..., :of_values], None
        )


def test_positions_are_looked_at_once_and_again_once_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    diff = torch.Tensor.diff
    monkeypatch.setattr(torch.Tensor, "diff", lambda self: looks.append(self) or diff(self))
    positions = torch.arange(3, 22)[None]
    assert [flashlab.torch._restart(positions, 19) for _ in range(3)] == [False] * 3
    assert len(looks) == 1
    positions[0, 9:] -= 12
    assert flashlab.torch._restart(positions, 19)
    assert not flashlab.torch._restart(positions, 1), "a token that is generated"
    with torch.inference_mode():
        assert not flashlab.torch._restart(torch.arange(19)[None], 19)
    assert not flashlab.torch._restart(positions.to("meta"), 19), "nothing to look at"


@needs_compiler
@pytest.mark.filterwarnings("default")
def test_positions_that_start_again_are_refused_with_a_cache_too(llama: Any) -> None:
    model = llama.to(torch.float16)
    model.set_attn_implementation("flashlab")
    with torch.no_grad(), pytest.raises(errors.UnsupportedError, match="packed sequences with position_ids alone"):
        model(IDS, position_ids=torch.arange(19).remainder(10)[None])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"q_length": 5, "kv_length": 9, "q_offset": 4}, None),
        ({"q_length": 1, "kv_length": 8, "q_offset": 20, "kv_offset": 13, "local_size": 8}, None),
        ({"q_length": 9, "kv_length": 9, "local_size": 8, "config": SimpleNamespace(sliding_window=8)}, None),
        ({"q_length": 5, "kv_length": 9, "allow_is_bidirectional_skip": True}, None),
        ({"q_length": 9, "kv_length": 9, "allow_is_bidirectional_skip": True, "local_size": 9}, None),
        (
            {"q_length": 5, "kv_length": 9, "allow_is_bidirectional_skip": True, "local_size": 8},
            "wanted a window that ends at the last key, got 5 queries and 9 keys",
        ),
        ({"q_length": 5, "kv_length": 64}, "dynamic cache"),
        ({"q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}, "custom mask"),
        ({"q_length": 9, "kv_length": 9, "local_size": 8, "config": SimpleNamespace()}, "chunks of 8 over 9 keys"),
    ],
)
def test_only_the_kernels_own_masks_go_without_one(call: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert flashlab.torch._transformers_mask(**call) is None
    else:
        with pytest.raises(errors.UnsupportedError, match=words):
            flashlab.torch._transformers_mask(**call)


@pytest.mark.parametrize(
    ("rows", "call", "words"),
    [
        (["000111111", "111111111"], {}, None),
        (["111100000", "000000000"], {}, None),
        (["001111100", "111111111"], {}, None),
        (["000111111", "111111111"], {"kv_length": 5, "kv_offset": 4, "q_offset": 4}, ""),  # behind the window
        (["101111111", "111111111"], {"kv_length": 5, "kv_offset": 4, "q_offset": 4}, ""),
        (["101111111", "111111111"], {}, "wanted ones side by side in each row.* zeros between ones"),
        (["111101111", "111111111"], {"kv_length": 6, "kv_offset": 3, "q_offset": 4}, "zeros between ones"),
        (["0111", "1111"], {}, r"wanted an attention_mask \(batch, 9\), got one of shape \(2, 4\)"),
    ],
)
def test_a_mask_of_padding_is_handed_on(rows: list[str], call: dict[str, Any], words: str | None) -> None:
    mask = torch.tensor([[column == "1" for column in row] for row in rows])
    call = {"q_length": 5, "kv_length": 9, "q_offset": 4, "attention_mask": mask, **call}
    if words:
        with pytest.raises(errors.UnsupportedError, match=words):
            flashlab.torch._transformers_mask(**call)
    else:
        made = flashlab.torch._transformers_mask(**call)
        assert made is None if words == "" else torch.equal(made, mask)


def test_padding_is_refused_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"q_length": 19, "kv_length": 19, "attention_mask": padded((5, 19), "left").bool()}
    q, k, v = qkv(19, 19)
    mask = flashlab.torch._transformers_mask(**call)
    for module, name, value in ((torch.compiler, "is_compiling", True), (torch._C, "_get_tracing_state", object())):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            for given in (call["attention_mask"], torch.ones_like(IDS)):  # a trace would keep that there is none
                with pytest.raises(errors.UnsupportedError, match="cannot be looked for while tracing"):
                    flashlab.torch._transformers_mask(**{**call, "attention_mask": given})
            with pytest.raises(errors.UnsupportedError, match="cannot be looked for while tracing"):
                flashlab.torch._transformers_attention(SimpleNamespace(is_causal=True), q, k, v, mask)
