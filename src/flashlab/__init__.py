"""flashlab: a reproducible lab for one question, how an attention kernel gets fast and what each step buys.

The calls, each documented in full where it is defined (flashlab.run.attention):

- `attention(q, k, v)`: softmax(scale · Q Kᵀ) V where the arrays are, on a GPU enqueued on the caller's stream.
- `prepare(q, k, v)`: the same call on a GPU, compiled and loaded but not launched: a callable to repeat and to time.
- `emulate(q, k, v)`: the same kernel on the CPU, with what it did wrong: races, bounds, bank conflicts.
- `varlen_attention(q, k, v, cu_seqlens_q=…)`: of sequences of lengths of their own, packed in one tensor
  (flashlab.run.varlen); `prepare` and `emulate` take them as `sequences=Sequences(…)`.
- `paged_attention(q, k_cache, v_cache, page_table, lengths)`: over a cache in pages (flashlab.run.paged), which
  `append_kv` writes into.
- `fp8_attention(q, k, v)`: of inputs stored in FP8 (flashlab.run.fp8), which `quantize_e4m3` makes.

q is (batch, q_heads, q_len, head_dim), k and v are (batch, kv_heads, kv_len, head_dim), float16 or bfloat16, with any
strides whose last is 1: NumPy arrays, torch tensors, CuPy arrays, or anything with DLPack. Every error is a
`flashlab.core.errors.FlashlabError` that says what was wanted, what came, and what works.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlab._version import __version__ as __version__

if TYPE_CHECKING:
    from flashlab.run.attention import attention as attention
    from flashlab.run.attention import emulate as emulate
    from flashlab.run.attention import prepare as prepare
    from flashlab.run.fp8 import fp8_attention as fp8_attention
    from flashlab.run.fp8 import quantize_e4m3 as quantize_e4m3
    from flashlab.run.paged import append_kv as append_kv
    from flashlab.run.paged import paged_attention as paged_attention
    from flashlab.run.plan import Sequences as Sequences
    from flashlab.run.varlen import varlen_attention as varlen_attention

_PUBLIC = {
    **dict.fromkeys(("attention", "emulate", "prepare"), "flashlab.run.attention"),
    **dict.fromkeys(("append_kv", "paged_attention"), "flashlab.run.paged"),
    **dict.fromkeys(("fp8_attention", "quantize_e4m3"), "flashlab.run.fp8"),
    "Sequences": "flashlab.run.plan",
    "varlen_attention": "flashlab.run.varlen",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """The public functions, imported when asked for: whoever reads records imports no compiler."""
    if name in _PUBLIC:
        found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
        return found
    raise AttributeError(f"module 'flashlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
