"""flashlab: a reproducible lab on how a CUDA attention kernel gets fast, and what each optimisation contributes.

Public functions, documented in full where they are defined (flashlab.run):

- `attention(q, k, v)`: compute softmax(scale · Q Kᵀ) V on the device of the arrays, on the caller's stream on a GPU.
- `prepare(q, k, v)`: compile and load the same call on a GPU; returns a callable for repeated launches and timing.
- `emulate(q, k, v)`: run the same kernel on the CPU and report races, invalid accesses and bank conflicts.
- `varlen_attention(q, k, v, cu_seqlens_q=…)`: attention over packed sequences of different lengths; `prepare` and
  `emulate` accept these as `sequences=Sequences(…)`.
- `paged_attention(q, k_cache, v_cache, page_table, lengths)`: attention over a paged KV cache, which `append_kv`
  extends.
- `fp8_attention(q, k, v)`: attention on FP8 inputs, which `quantize_e4m3` makes.

q is (batch, q_heads, q_len, head_dim), k and v are (batch, kv_heads, kv_len, head_dim), float16 or bfloat16, with a
contiguous last dimension and otherwise any strides: NumPy arrays, torch tensors, CuPy arrays, or any object with
DLPack. Every exception is a `flashlab.core.errors.FlashlabError` that states what was wanted, what was got, and what
works.
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
    """Import public functions lazily, so that reading records imports no compiler."""
    if name in _PUBLIC:
        value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
        return value
    raise AttributeError(f"module 'flashlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
