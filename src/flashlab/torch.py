"""PyTorch integration: operators for `torch.compile` and CUDA graphs, and an attention for Hugging Face transformers.

Importing this module registers four operators:

- `torch.ops.flashlab.attention(q, k, v, causal=False, scale=None, stage=None, window=None, softcap=0.0) -> out`
- `torch.ops.flashlab.attention_lse`, the same arguments `-> (out, lse)`
- `torch.ops.flashlab.paged_attention(q, k_cache, v_cache, page_table, lengths, causal=True, …) -> out`
- `torch.ops.flashlab.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, …) -> (out, lse)`

On CUDA tensors they call the functions of `flashlab` on torch's current stream; on CPU tensors the kernel is emulated,
for problems of test size. There is no backward pass: inputs that require gradients are refused, including those of
torch.func. `register()` adds `attn_implementation="flashlab"` to transformers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashlab.core.errors import (
    DeviceError,
    DTypeError,
    MissingPackageError,
    ParameterError,
    ShapeError,
    UnsupportedError,
)
from flashlab.kernels import registry
from flashlab.run import arrays, paged, varlen
from flashlab.run import attention as run
from flashlab.run.plan import check_flags, lse_shape, scale_of, softcap_of, window_of

try:
    import torch
except ImportError as error:
    raise MissingPackageError(
        f"wanted the Python package torch for flashlab.torch, got: {error}. `pip install 'flashlab[gpu]'` installs it; "
        "`flashlab.attention` works without."
    ) from error

__all__ = ["attention", "register"]

NAME = "flashlab"
"""Namespace of the operators, and name of the attention in transformers."""
_INSTEAD = "attn_implementation='sdpa' or 'eager' may take it"
_REFUSED = ("position_bias", "s_aux", "sinks", "indices", "block_indices", "cache", "output_attentions")
"""Attention options of transformers that change the result and are not supported."""
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")
"""Options that describe packed sequences."""
_HEAD_DIMS = sorted({dim for stage in registry.STAGES.values() for dim in stage.head_dims})
_PACK = f"{', '.join(_PACKED)}, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them"


def _plain(q: Any, k: Any, v: Any) -> bool:
    """Return whether the tensors hold data and nothing in the dispatcher (functorch, fake tensors, modes) is active."""
    plain = type(q) is type(k) is type(v) is torch.Tensor and not q.is_meta
    return plain and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None


def _out(q: Any) -> Any:
    """An empty output with the memory layout of q, because projections in models expect the heads of a token to be
    adjacent. None for a contiguous q, and for one whose last dimension is not, which is refused."""
    return None if q.is_contiguous() or q.stride(-1) != 1 else torch.empty_like(q)


def _define(name: str, forward: Callable[..., Any], inputs: str, *, causal: bool, dims: str, return_lse: bool) -> None:
    """Register an operator that calls `forward` with its `inputs`, given as a schema, and the options by position.

    torch leaves out options at the end that have their default. While tracing, the first three inputs are validated;
    `dims` names their dimensions.
    """
    names = [parameter.split()[-1] for parameter in inputs.split(", ")]

    def autograd(*args: Any) -> Any:
        # Only here do the wrappers of torch.func still require a gradient. Plain tensors skip the second pass through
        # the dispatcher: `forward` refuses their gradients.
        if _plain(*args[:3]):
            return forward(*args)
        arrays.refuse_gradients(**dict(zip(names, args, strict=False)))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.flashlab, name).default(*args)

    def fake(*args: Any, **_: Any) -> Any:
        tensors = dict(zip(names[:3], args, strict=False))
        arrays.refuse_gradients(**tensors)
        for argument, array in tensors.items():
            rank = dims.count(",") + 1
            if array.dim() != rank:
                raise ShapeError(f"{argument}: wanted {rank} dimensions {dims}, got shape {tuple(array.shape)}")
            if array.dtype not in (torch.float16, torch.bfloat16):
                hint = f"`{argument}.half()` works."
                raise DTypeError(f"{argument}: wanted float16 or bfloat16, got {array.dtype}. {hint}")
            if array.dtype != args[0].dtype:
                hint = f"`{argument}.to({names[0]}.dtype)` works."
                raise DTypeError(
                    f"{argument}: wanted {args[0].dtype}, the dtype of {names[0]}, got {array.dtype}. {hint}"
                )
            if array.shape[-1] != args[0].shape[-1]:
                wanted = f"{argument}: wanted the head dim of {names[0]}, {args[0].shape[-1]}"
                raise ShapeError(f"{wanted}, got shape {tuple(array.shape)}")
        q = args[0]
        out = torch.empty_like(q)
        return (out, q.new_empty(lse_shape(q), dtype=torch.float32)) if return_lse else out

    options = f"bool causal={causal}, float? scale=None, str? stage=None, SymInt[]? window=None, float softcap=0.0"
    returns = "(Tensor, Tensor)" if return_lse else "Tensor"
    _library.define(f"{name}({inputs}, {options}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, forward, key)
    _library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"{NAME}::{name}", fake, lib=_library)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    scale: float | None = None,
    stage: str | None = None,
    window: Any = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    return run.attention(  # every option by its name: a dict of them costs the host a microsecond
        q,
        k,
        v,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        stage=stage,
        out=_out(q),
        return_lse=return_lse,
    )


def _named(options: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("causal", "scale", "stage", "window", "softcap"), options, strict=False))


def _paged(q: Any, k_cache: Any, v_cache: Any, page_table: Any, lengths: Any, *options: Any) -> Any:
    return paged.paged_attention(q, k_cache, v_cache, page_table, lengths, **_named(options), out=_out(q))


def _varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, *options: Any) -> Any:
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q}
    return varlen.varlen_attention(q, k, v, **lengths, **_named(options), out=_out(q), return_lse=True)


# Not `torch.library.custom_op`, whose Python overhead exceeds the rest of a call.
_library = torch.library.Library(NAME, "DEF")
_PADDED, _INPUTS = "(batch, heads, length, head_dim)", "Tensor q, Tensor k, Tensor v"
_define("attention", _attention, _INPUTS, causal=False, dims=_PADDED, return_lse=False)
_define(
    "attention_lse",
    functools.partial(_attention, return_lse=True),
    _INPUTS,
    causal=False,
    dims=_PADDED,
    return_lse=True,
)
_define(
    "paged_attention",
    _paged,
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths",
    causal=True,
    dims="(batch or pages, heads, length, head_dim)",
    return_lse=False,
)
_define(
    "varlen_attention",
    _varlen,
    f"{_INPUTS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q",
    causal=False,
    dims="(total, heads, head_dim)",
    return_lse=True,
)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Call `flashlab.attention` as a torch operator, for `torch.compile(fullgraph=True)` and CUDA graph capture.

    Args:
        q: torch tensor (batch, q_heads, q_len, head_dim), float16 or bfloat16, the last dimension contiguous.
        k: (batch, kv_heads, kv_len, head_dim), of the dtype and on the device of q; kv_heads divides q_heads.
        v: like `k`.
        causal: whether to apply a causal mask, aligned bottom right, as in `flashlab.attention`.
        window: sliding window, as in `flashlab.attention`.
        softcap: soft cap on scores, softcap · tanh(score / softcap); 0 disables it.
        scale: factor on the scores; default: 1/sqrt(head_dim).
        stage: stage id; default: as in `flashlab.attention`.
        return_lse: whether to also return the log-sum-exp of the scores, float32 (batch, q_heads, q_len).

    Returns:
        The output, with the shape, dtype and memory layout of q, or (output, lse).

    Raises:
        InputError: a tensor requires gradients, or an argument is invalid. Under `torch.compile`, torch wraps errors
            that occur while tracing.
        FlashlabError: as `flashlab.attention` does.
    """
    # A call that nothing in torch observes skips the dispatcher, which costs the host microseconds.
    observed = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    observed = observed or torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack()
    if not observed and _plain(q, k, v):
        return _attention(q, k, v, causal, scale, stage, window, softcap, return_lse=return_lse)
    check_flags(causal=causal, return_lse=return_lse)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, torch.Tensor):
            got = type(array).__name__
            raise DeviceError(f"{name}: wanted a torch tensor, got {got}. `flashlab.attention` takes other arrays.")
    for name, factor in (("scale", scale), ("softcap", softcap)):
        if torch.compiler.is_compiling() and not isinstance(factor, float | int | None):  # NumPy's are arrays to it
            raise ParameterError(f"{name}: wanted a Python number while torch traces. `float({name})` before works.")
    # torch would accept True as 1.0, and raise its own errors for other types.
    if scale is not None and type(scale) is not float:
        scale = scale_of(scale, q.shape[-1])
    if type(softcap) is not float:
        softcap = softcap_of(softcap)
    if stage is not None and type(stage) is not str:
        registry.get(stage)
    call = (q, k, v, causal, scale, stage, None if window is None else window_of(window), softcap)
    operator = torch.ops.flashlab.attention_lse if return_lse else torch.ops.flashlab.attention
    return operator.default(*call)


# --- transformers -----------------------------------------------------------------------------------------------------


def register() -> None:
    """Register `attn_implementation="flashlab"` with Hugging Face transformers. Idempotent.

    Supports causal prefill, decoding with a dynamic cache, grouped-query attention, sliding windows, soft caps, and
    encoders with or without windows, in float16 and bfloat16; sequences packed in a batch of 1, described as for
    flash-attention by `cu_seq_lens_q`, `cu_seq_lens_k` and `max_length_q`; and batches with padding, given by an
    attention_mask (batch, tokens so far) whose ones are side by side in each row. Generation needs padding on the left.

    Padding is removed before the kernel, as for flash-attention; the output at padding means nothing. This copies keys
    and values in every layer, and the host waits for the GPU a few times in each forward pass, to read the mask. A mask
    without zeros costs one such wait and no copy.

    Anything else raises `UnsupportedError` when called: masks with zeros between ones, any attention_mask while
    `torch.compile` or `torch.jit` traces, packed sequences given by position_ids alone, which are not seen while torch
    traces or captures a CUDA graph, other head dims, custom masks, static caches,
    dropout, position biases, sinks, sparse indices, and attention weights. A model that computes attention itself,
    without transformers' AttentionInterface, raises it when it is made, such as Bloom, MPT, Falcon and GPT-Neo.

    Raises:
        MissingPackageError: transformers is not installed, or too old.
    """
    try:
        masking = importlib.import_module("transformers.masking_utils")
        modeling: Any = importlib.import_module("transformers.modeling_utils")
        if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
            raise ImportError(f"an incompatible mask interface in {masking.__file__}")
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package transformers, 5.23 or newer, got: {error}. `pip install -U transformers` "
            "installs it; `flashlab.torch.attention` works without."
        ) from error
    modeling.AttentionInterface.register(NAME, _transformers_attention)
    masking.AttentionMaskInterface.register(NAME, _transformers_mask)
    # transformers treats every name that contains "flash" as a package with the interface of flash-attn. It also
    # accepts a registered name for models that compute attention themselves, which then miss the causal mask.
    theirs = modeling.PreTrainedModel._check_and_adjust_attn_implementation
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def check(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> Any:
        if attn_implementation != NAME:
            return theirs(self, attn_implementation, *args, **options)
        if not (self._supports_attention_backend or self._can_set_attn_implementation()):
            raise UnsupportedError(
                "attention 'flashlab' of transformers: wanted a model that calls its AttentionInterface, got "
                f"{type(self).__name__}. attn_implementation='eager' works."
            )
        return NAME

    modeling.PreTrainedModel._check_and_adjust_attn_implementation = check


def _refuse(got: str, wanted: str = "what causal or full attention over all keys computes") -> UnsupportedError:
    return UnsupportedError(f"attention 'flashlab' of transformers: wanted {wanted}, got {got}. {_INSTEAD}.")


def _transformers_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    mask_function: Any = None,
    use_vmap: bool = False,
    device: Any = None,
    **_: Any,
) -> Any:
    """Return None if the kernel's own mask is the requested one, or a bool tensor that encodes a special case by its
    shape: (0,) for packed sequences, (0, keys per side) for the window of an encoder, (batch, kv_length) for padding,
    whose mask it is, and (batch, kv_length, 1 + keys per side), that mask repeated, for padding and a window.

    The window of a decoder layer, `local_size`, reaches the kernel as the layer's `sliding_window`. Encoder layers are
    inconsistent: some pass the keys per side of the mask, and some one more. Chunked attention has a `local_size` too,
    which no layer passes on.

    Raises:
        UnsupportedError: the kernel does not support the mask.
    """
    if attention_mask is not None:
        _refuse_tracing()
    at_end = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    windowed = local_size is not None and kv_length > local_size
    if allow_is_bidirectional_skip:
        if windowed and not at_end:
            raise _refuse(f"{q_length} queries and {kv_length} keys with another", "a window that ends at the last key")
        padding = _padding(attention_mask, kv_offset, kv_length, local_size if windowed else None)
        return torch.empty(0, local_size, dtype=torch.bool, device=device) if windowed and padding is None else padding
    if windowed and local_size != getattr(config, "sliding_window", None):
        raise _refuse(f"chunks of {local_size} over {kv_length} keys")
    if not allow_is_causal_skip:
        if torch.compiler.is_compiling():
            raise _refuse("a custom mask, or positions that cannot be looked at while tracing", "use_cache=True")
        sequences = None if use_vmap else _sequences(mask_function)
        if sequences is None:
            raise _refuse("a custom mask or a static cache")
        if sequences.any():
            return torch.empty(0, dtype=torch.bool)
    if not at_end:
        raise _refuse("more keys than tokens so far, as in a static cache", "a dynamic cache")
    return _padding(attention_mask, kv_offset, kv_length)


def _refuse_tracing() -> None:
    """Raise `UnsupportedError` while torch traces, as the trace would keep whether this mask has padding, and where."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        raise _refuse("an attention_mask whose padding cannot be looked for while tracing", "attention_mask=None")


def _padding(attention_mask: Any, offset: int, length: int, window: int | None = None) -> Any:
    """Return the columns of a mask that belong to keys, encoded as `_transformers_mask` says; None without zeros."""
    mask = None if attention_mask is None else attention_mask[..., offset : offset + length].bool()
    if mask is None or bool(mask.all()):
        return None
    if mask.shape[1:] != (length,):
        raise _refuse(f"one of shape {tuple(attention_mask.shape)}", f"an attention_mask (batch, {offset + length})")
    mask = mask if window is None else mask[..., None].expand(-1, -1, 1 + window)
    _tokens(mask, length)
    return mask


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a padded batch, as packed sequences."""

    where: tuple[Any, Any]
    """Sequence and position of each token, int64 (total,)."""
    ends: Any
    """Cumulative lengths of the sequences, int32 (batch + 1,)."""

    def pack(self, x: Any) -> Any:
        """Gather (total, heads, head_dim) from (batch, heads, length, head_dim); without padding nothing moves."""
        by_token = x.transpose(1, 2)
        return by_token.flatten(0, 1) if len(self.where[0]) == len(x) * x.shape[2] else by_token[self.where]

    def unpack(self, packed: Any, batch: int, length: int) -> Any:
        """Scatter (total, heads, head_dim) to (batch, length, heads, head_dim), with zeros where there is padding."""
        if len(packed) == batch * length:
            return packed.contiguous().unflatten(0, (batch, length))
        out = packed.new_zeros(batch, length, *packed.shape[1:])
        out[self.where] = packed
        return out


def _tokens(padding: Any, length: int, *, padded: bool = True) -> _Tokens:
    """Return the tokens in the last columns of a mask made by `_padding`, or everything in them unless `padded`.

    For this the host waits for the GPU. The layers of a forward pass share the mask, so the result is kept as an
    attribute of the tensor and lives as long; layers on another GPU get a copy of the mask each, and count again.

    Raises:
        UnsupportedError: torch is tracing, or the ones of a row are not side by side.
    """
    _refuse_tracing()
    mask = padding if padding.dim() == 2 else padding[..., 0]
    kept: dict[tuple[int, bool], _Tokens] | None = getattr(padding, "flashlab_tokens", None)
    if kept is None:
        # Windows count positions, which would change without the zeros between two tokens.
        starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
        if bool((starts > 1).any()):
            wanted = "ones side by side in each row, as with tokenizer.padding_side='left', which generation needs"
            raise _refuse("an attention_mask with zeros between ones", wanted)
        kept = padding.flashlab_tokens = {}
    if (length, padded) not in kept:
        mask = mask[:, -length:] if padded else torch.ones_like(mask[:, :1]).expand(-1, length)
        ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        kept[length, padded] = _Tokens(mask.nonzero(as_tuple=True), ends)
    return kept[length, padded]


def _sequences(mask_function: Any) -> Any:
    """Return the sequence index of each token, from 0, for a mask that only separates packed sequences by position_ids;
    None for any other mask. While tracing, transformers treats every batch as packed."""
    inside = inspect.getclosurevars(mask_function).nonlocals if callable(mask_function) else {}
    parts = sorted(inside.get("mask_functions", ()), key=lambda part: part.__qualname__)
    made_by = [part.__qualname__.partition(".")[0] for part in parts]
    if made_by != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return None
    return inspect.getclosurevars(parts[0]).nonlocals["packed_sequence_mask"]


def _restart(position_ids: Any, length: int) -> bool:
    """Return whether positions start again within a row, as those of packed sequences do.

    transformers looks for that only without a cache. The host waits for the GPU, once for all layers of a forward pass,
    since they share the tensor; while torch traces or captures it cannot look.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if length < 2 or not _plain(position_ids, position_ids, position_ids) or position_ids.shape[1:] != (length,):
        return False
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    version = 0 if position_ids.is_inference() else position_ids._version
    kept: tuple[int, bool] = getattr(position_ids, "flashlab_restart", (-1, False))
    if kept[0] != version:
        kept = position_ids.flashlab_restart = (version, bool((position_ids.diff() < 1).any()))
    return kept[1]


def _transformers_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Attention of transformers: (batch, heads, length, head_dim) to (batch, length, heads, head_dim), no weights."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise DTypeError(
            f"attention 'flashlab' of transformers: wanted a model in float16 or bfloat16, got {query.dtype}. "
            "`model.half()` works, and so does dtype='float16' in from_pretrained."
        )
    if query.shape[-1] not in _HEAD_DIMS or value.shape[-1] != query.shape[-1]:
        wanted = f"a head dim of {' or '.join(map(str, _HEAD_DIMS))}, of values too"
        raise _refuse(f"{query.shape[-1]}, and {value.shape[-1]} of values", wanted)
    packed: dict[str, Any] = {name: options[name] for name in _PACKED if options.get(name) is not None}
    # Their window counts the key on the diagonal. One of 0 hides every key in their masks, and none in flash-attention.
    if sliding_window is not None and sliding_window < 1:
        raise _refuse(f"{sliding_window}", "a sliding_window of 1 or more, or None")
    window = None if sliding_window is None else sliding_window - 1
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    padding = None
    if attention_mask is not None and attention_mask.numel():
        # A mask of padding: see `_transformers_mask`.
        of_keys = attention_mask.dim() in (2, 3) and attention_mask.shape[:2] == (key.shape[0], key.shape[2])
        if not of_keys or attention_mask.dtype != torch.bool:
            wanted = f"a bool attention_mask ({key.shape[0]}, {key.shape[2]}), or 0 and 1 where a model takes it"
            raise _refuse(f"a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype}", wanted)
        if packed:
            raise _refuse("packed sequences with padding", "one of the two")
        padding, attention_mask = attention_mask, None
        window = window if padding.dim() == 2 else padding.shape[2] - 1
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask, window = None, attention_mask.shape[1]
    if not packed and attention_mask is padding and _restart(options.get("position_ids"), query.shape[2]):
        raise _refuse("packed sequences with position_ids alone", _PACK)
    if len(packed) < len(_PACKED) and (packed or attention_mask is not None):
        raise _refuse(f"packed sequences with {' and '.join(packed) or 'position_ids'} alone", _PACK)
    if dropout:
        raise _refuse(f"dropout {dropout}", "dropout 0")
    for name in _REFUSED:
        option = options.get(name)
        if option is not None and option is not False:  # not `in`: a tensor compares its elements, and 0 equals False
            raise _refuse(name if isinstance(option, torch.Tensor) else f"{name}={option!r}")
    sides = None if window is None else (window, window)
    how = (causal, scaling, None, sides, softcap or 0.0)
    if packed:
        if len(query) != 1:
            raise _refuse(f"packed sequences in a batch of {len(query)}", "all of them in a batch of 1")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        *ends, longest = packed.values()
        ends = [of.to(torch.int32) for of in ends]
        out = torch.ops.flashlab.varlen_attention.default(q, k, v, *ends, int(longest), *how)[0]
        return out[None].contiguous(), None
    if padding is not None:
        return _without_padding(query, key, value, padding, *how, by_position=causal or window is not None), None
    out = attention(query, key, value, causal=causal, window=window, softcap=softcap or 0.0, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _without_padding(query: Any, key: Any, value: Any, padding: Any, *how: Any, by_position: bool) -> Any:
    """Attention of a padded batch: (batch, heads, length, head_dim) to (batch, length, heads, head_dim).

    Args:
        how: options of the operator.
        by_position: whether the mask's last columns are those of the queries. Otherwise all queries attend to all
            keys, and may be of another sequence, in cross-attention.
    """
    batch, _, q_len, _ = query.shape
    if by_position and q_len > key.shape[2]:
        raise _refuse(f"{q_len} queries and {key.shape[2]} keys", "at most as many queries as keys with padding")
    queries, keys = _tokens(padding, q_len, padded=by_position), _tokens(padding, key.shape[2])
    q, k, v = queries.pack(query), keys.pack(key), keys.pack(value)
    if not len(q) or not len(k):
        return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    out, _ = torch.ops.flashlab.varlen_attention.default(q, k, v, queries.ends, keys.ends, q_len, *how)
    return queries.unpack(out, batch, q_len)
