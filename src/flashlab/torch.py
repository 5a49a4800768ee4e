"""flashlab in PyTorch programs: operators that `torch.compile` keeps in its graph, and an attention of transformers.

Importing this registers `torch.ops.flashlab.attention(q, k, v, causal=False, scale=None, stage=None, window=None,
softcap=0.0) -> out` and `torch.ops.flashlab.attention_lse`, the same with `(out, lse)`. On CUDA tensors they are
`flashlab.attention` on torch's current stream; on CPU tensors the kernel is emulated, for problems of a test's size.
`torch.ops.flashlab.paged_attention(q, k_cache, v_cache, page_table, lengths, causal=True, scale=None, stage=None,
window=None, softcap=0.0) -> out` is `flashlab.paged_attention` likewise, and `torch.ops.flashlab.varlen_attention(q,
k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal=False, scale=None, stage=None, window=None, softcap=0.0) ->
(out, lse)` is `flashlab.varlen_attention`. There are no derivatives: inputs that want a gradient are refused, those of
torch.func too.
`register()` makes `attn_implementation="flashlab"` known to transformers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from flashlab.core.errors import DeviceError, DTypeError, MissingPackageError, ShapeError, UnsupportedError
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
"""Of the operators' namespace, and of the attention in transformers."""
_INSTEAD = "attn_implementation='sdpa' or 'eager' takes it"
_REFUSED = ("position_bias", "s_aux", "sinks", "indices", "block_indices", "cache", "output_attentions")
"""Options of attention in transformers that change its result, or ask for another one."""
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")
"""Those that say where the sequences of a packed batch begin."""
_PACK = f"{', '.join(_PACKED)}, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them"


_OPTIONS = ("causal", "scale", "stage", "window", "softcap")
"""Of every operator, in this order, behind its inputs."""


def _plain(q: Any, k: Any, v: Any) -> bool:
    """Whether tensors hold data and nothing in the dispatcher (functorch, fake tensors, a mode) is to see a call."""
    plain = type(q) is type(k) is type(v) is torch.Tensor and not q.is_meta
    return plain and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None


def _define(
    name: str, call: Callable[..., Any], inputs: str, *, causal: bool, dims: str, return_lse: bool
) -> Callable[..., Any]:
    """Register an operator: `call` of its `inputs`, as a schema names them, and the options. Returns its kernel.

    Its output lies in memory as q, the first input, does: a model's projection has a token's heads side by side, and
    wants them so. While it is traced, the first three inputs are looked at: `dims` says what their dimensions are.
    """
    names = [parameter.split()[-1] for parameter in inputs.split(", ")]

    def real(*args: Any) -> Any:
        how = dict(zip(_OPTIONS, args[len(names) :], strict=False))
        if how.get("window") is not None:
            how["window"] = tuple(how["window"])
        if not args[0].is_contiguous() and args[0].stride(-1) == 1:  # where it is not, `call` refuses it
            how["out"] = torch.empty_like(args[0])
        return call(*args[: len(names)], **how)

    def above(*args: Any) -> Any:
        # Here alone the wrappers of torch.func still say that they want a gradient. What is plain takes no second way
        # through the dispatcher: `call` refuses its gradients.
        if _plain(*args[:3]):
            return real(*args)
        arrays.refuse_gradients(**dict(zip(names, args, strict=False)))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.flashlab, name).default(*args)

    def traced(*args: Any, **_: Any) -> Any:
        tensors = dict(zip(names[:3], args, strict=False))
        arrays.refuse_gradients(**tensors)
        for of, array in tensors.items():
            wanted = dims.count(",") + 1
            if array.dim() != wanted:
                raise ShapeError(f"{of}: wanted {wanted} dimensions {dims}, got shape {tuple(array.shape)}")
            if array.dtype not in (torch.float16, torch.bfloat16):
                raise DTypeError(f"{of}: wanted float16 or bfloat16, got {array.dtype}. `{of}.half()` works.")
        q = args[0]
        out = torch.empty_like(q)
        return (out, q.new_empty(lse_shape(q), dtype=torch.float32)) if return_lse else out

    options = f"bool causal={causal}, float? scale=None, str? stage=None, SymInt[]? window=None, float softcap=0.0"
    returns = "(Tensor, Tensor)" if return_lse else "Tensor"
    _library.define(f"{name}({inputs}, {options}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, real, key)
    _library.impl(name, above, "Autograd")
    torch.library.register_fake(f"{NAME}::{name}", traced, lib=_library)
    return real


def _varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, **how: Any) -> Any:
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q}
    return varlen.varlen_attention(q, k, v, **lengths, **how, return_lse=True)


# Not `torch.library.custom_op`, whose Python costs the host more than the rest of a call.
_library = torch.library.Library(NAME, "DEF")
_PADDED, _INPUTS = "(batch, heads, length, head_dim)", "Tensor q, Tensor k, Tensor v"
_attention = _define("attention", run.attention, _INPUTS, causal=False, dims=_PADDED, return_lse=False)
_attention_lse = _define(
    "attention_lse",
    functools.partial(run.attention, return_lse=True),
    _INPUTS,
    causal=False,
    dims=_PADDED,
    return_lse=True,
)
_define(
    "paged_attention",
    paged.paged_attention,
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
    """`flashlab.attention` as an operator: `torch.compile(fullgraph=True)` keeps it whole, and CUDA graphs capture it.

    Args:
        q: torch tensor (batch, q_heads, q_len, head_dim), float16 or bfloat16, the last dimension contiguous.
        k: (batch, kv_heads, kv_len, head_dim), of the type and on the device of q; kv_heads divides q_heads.
        v: as `k`.
        causal: aligned bottom right, as in `flashlab.attention`.
        window: as `flashlab.attention` takes it.
        softcap: what scores are bounded by, as in `flashlab.attention`.
        scale: what scores are multiplied by; 1/sqrt(head_dim) where None.
        stage: a stage's id, or None for the one that suits.
        return_lse: also return the log-sum-exp of the scores, float32 (batch, q_heads, q_len).

    Returns:
        The output, which is like q and lies in memory as q does, or (output, lse).

    Raises:
        InputError: a tensor wants a gradient, or what `flashlab.attention` refuses. Under `torch.compile`, torch wraps
            what is known while it traces.
        FlashlabError: what else `flashlab.attention` raises.
    """
    check_flags(causal=causal, return_lse=return_lse)
    for name, of in (("q", q), ("k", k), ("v", v)):
        if not isinstance(of, torch.Tensor):
            got = type(of).__name__
            raise DeviceError(f"{name}: wanted a torch tensor, got {got}. `flashlab.attention` takes other arrays.")
    # torch takes True for 1.0, and refuses what is no number or text by an error of its own.
    if scale is not None and type(scale) is not float:
        scale = scale_of(scale, q.shape[-1])
    if type(softcap) is not float:
        softcap = softcap_of(softcap)
    if stage is not None and type(stage) is not str:
        registry.get(stage)
    call = (q, k, v, causal, scale, stage, None if window is None else window_of(window), softcap)
    # A call that nothing in torch observes skips the dispatcher, which costs the host microseconds.
    observed = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    observed = observed or torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack()
    if not observed and _plain(q, k, v):
        return (_attention_lse if return_lse else _attention)(*call)
    operator = torch.ops.flashlab.attention_lse if return_lse else torch.ops.flashlab.attention
    return operator.default(*call)


# --- transformers -----------------------------------------------------------------------------------------------------


def register() -> None:
    """Make `attn_implementation="flashlab"` known to Hugging Face transformers; a second time changes nothing.

    Takes causal prefill, decoding with a dynamic cache, grouped-query heads, sliding windows, soft caps, and encoders,
    with windows too, in float16 and bfloat16; and sequences packed in a batch of 1, whose places are said as to flash
    attention, by `cu_seq_lens_q`, `cu_seq_lens_k` and `max_length_q`. Refuses by `UnsupportedError` what the kernels do
    not compute: padding, packed sequences that position_ids alone tell apart, custom masks, static caches, dropout,
    position biases, sinks, sparse indices, and attention weights.

    Raises:
        MissingPackageError: transformers is not installed, or too old.
    """
    try:
        masking = importlib.import_module("transformers.masking_utils")
        modeling: Any = importlib.import_module("transformers.modeling_utils")
        if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
            raise ImportError(f"one that asks for masks otherwise, in {masking.__file__}")
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package transformers, 5.23 or newer, got: {error}. `pip install -U transformers` "
            "installs it; `flashlab.torch.attention` works without."
        ) from error
    modeling.AttentionInterface.register(NAME, _transformers_attention)
    masking.AttentionMaskInterface.register(NAME, _transformers_mask)
    # transformers 5 takes every name with "flash" in it for a package with the interface of flash-attn, to be imported.
    theirs = getattr(modeling, "is_flash_attention_requested", None)
    if theirs is not None and not hasattr(theirs, "__wrapped__"):

        @functools.wraps(theirs)
        def is_flash_attention_requested(*args: Any, **options: Any) -> Any:
            return options.get("requested_attention_implementation") != NAME and theirs(*args, **options)

        modeling.is_flash_attention_requested = is_flash_attention_requested


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
    """None, for no mask, which is what transformers wants where the kernel's own mask is the right one; one without
    elements where it is within each sequence of a packed batch, (0,), or an encoder's window, (0, keys to either side).

    The window of a decoder's layer, `local_size`, comes to the kernel with the layer's `sliding_window`. Of encoders,
    some layers hand on as many keys as the mask has to either side, and some one more. Chunks have a `local_size` too,
    which no layer hands on.

    Raises:
        UnsupportedError: it is not.
    """
    if attention_mask is not None:
        if torch.compiler.is_compiling():
            raise _refuse("an attention_mask whose padding cannot be looked for while tracing", "attention_mask=None")
        if not bool(attention_mask.all()):
            raise _refuse("an attention_mask with padding", "sequences without padding")
    at_end = not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
    windowed = local_size is not None and kv_length > local_size
    if allow_is_bidirectional_skip:
        if windowed and not at_end:
            raise _refuse(f"{q_length} queries and {kv_length} keys with another", "a window that ends at the last key")
        return torch.empty(0, local_size, dtype=torch.bool, device=device) if windowed else None
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
    return None


def _sequences(mask_function: Any) -> Any:
    """The sequence of each token, from 0, where a mask of transformers tells them apart by their position_ids, and does
    nothing else; None where it is another mask. While it traces, transformers takes every batch for a packed one."""
    inside = inspect.getclosurevars(mask_function).nonlocals if callable(mask_function) else {}
    parts = sorted(inside.get("mask_functions", ()), key=lambda part: part.__qualname__)
    made_by = [part.__qualname__.partition(".")[0] for part in parts]
    if made_by != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return None
    return inspect.getclosurevars(parts[0]).nonlocals["packed_sequence_mask"]


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
    """transformers' attention on (batch, heads, length, head_dim): (batch, length, heads, head_dim), and no weights."""
    packed: dict[str, Any] = {name: options[name] for name in _PACKED if options.get(name) is not None}
    # A query's own key counts in theirs.
    window = None if sliding_window is None else sliding_window - 1
    if attention_mask is not None and attention_mask.numel():
        raise _refuse("a mask of shape " + str(tuple(attention_mask.shape)))
    if attention_mask is not None and attention_mask.dim() == 2:  # see `_transformers_mask`
        attention_mask, window = None, attention_mask.shape[1]
    if len(packed) < len(_PACKED) and (packed or attention_mask is not None):
        raise _refuse(f"packed sequences with {' and '.join(packed) or 'position_ids'} alone", _PACK)
    if dropout:
        raise _refuse(f"dropout {dropout}", "dropout 0")
    for name in _REFUSED:
        option = options.get(name)
        if option is not None and option is not False:  # not `in`: a tensor compares its elements, and 0 equals False
            raise _refuse(name if isinstance(option, torch.Tensor) else f"{name}={option!r}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if packed:
        if len(query) != 1:
            raise _refuse(f"packed sequences in a batch of {len(query)}", "all of them in a batch of 1")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        *ends, longest = packed.values()
        ends = [of.to(torch.int32) for of in ends]
        sides = None if window is None else (window, window)
        call = (q, k, v, *ends, int(longest), bool(causal), scaling, None, sides, softcap or 0.0)
        return torch.ops.flashlab.varlen_attention.default(*call)[0][None].contiguous(), None
    out = attention(query, key, value, causal=bool(causal), window=window, softcap=softcap or 0.0, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
