"""Attention over sequences of lengths of their own, packed one behind the other in one tensor: `varlen_attention`.

Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and of the output, and rows cu_seqlens_k[b] to
cu_seqlens_k[b + 1] of k and v. Both arrays are int32 and stay on the device: other lengths in a tensor of the same
shape need no new launch plan, and a CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashlab.run import arrays, gpu, recipes
from flashlab.run.attention import first_call
from flashlab.run.plan import Sequences, by_head, check_cu_seqlens, check_lengths


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
    check: bool = False,
) -> Any:
    """Attention of each sequence's queries over its own keys, where the arrays are.

    On a GPU: enqueued on the caller's stream, nothing copied, nothing awaited unless `check`. In host memory: the same
    kernel emulated on the CPU. `flashlab.prepare` and `flashlab.emulate` do the same with
    `sequences=flashlab.Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q)`.

    Args:
        q: (total_q, q_heads, head_dim), float16 or bfloat16, in the libraries and strides that `flashlab.attention`
            takes.
        k: (total_k, kv_heads, head_dim); kv_heads divides q_heads.
        v: as `k`.
        cu_seqlens_q: int32 (batch + 1,), contiguous, on the device of q: numbers from 0 to at most total_q, none below
            the one before. A sequence without queries is nothing; one without keys has output 0 and log-sum-exp -inf.
            Rows of the output beyond the last number are not written.
        cu_seqlens_k: likewise for k and v, numbers to at most total_k.
        max_seqlen_q: no sequence has more queries; rows beyond so many may stay unwritten.
        causal: query i of a sequence sees its key j when j - i ≤ keys - queries of that sequence (bottom right).
        window: as `flashlab.attention` takes it, within each sequence.
        softcap: as `flashlab.attention` takes it.
        scale: finite; 1/sqrt(head_dim) where None.
        stage: a stage's id, or None for the one that suits. Some stages take packed sequences (`Stage.features`).
        out: where to write, like `q`; a new contiguous array of the caller's library where None.
        return_lse: also return the log-sum-exp of the scores, float32 (q_heads, total_q).
        stream: as `flashlab.attention` takes it.
        params: the stage's tunables, by name.
        check: wait, and refuse numbers that are none such and a `max_seqlen_q` that is too small. Without, a sequence
            ends where its tensor does at the latest: nothing outside of q, k, v and the output is read or written. In
            host memory both are refused always.

    Returns:
        The output, or (output, lse).

    Raises:
        InputError: arguments are off (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, runs this here.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: as they say.
    """
    asked = (max_seqlen_q, causal, window, softcap, scale, stage, return_lse)
    key, addresses, again = recipes.kept((q, k, v, cu_seqlens_q, cu_seqlens_k), out, asked, params)
    if again is not None and not check:
        return again(q, addresses, out, return_lse, stream)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
    how |= {"out": out, "params": params, "sequences": sequences}
    if check and arrays.place_of(q, stream).stream is not None:
        _check(q, k, sequences)
    return first_call(q, k, v, how, key=key, device=None, stream=stream, return_lse=return_lse)


def _check(q: Any, k: Any, sequences: Sequences) -> None:
    """Read the numbers back from the GPU and raise what is wrong with them: InputError."""
    gpu.require()
    numbers = []
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        view = arrays.on_device(getattr(sequences, name), name)
        check_cu_seqlens(view, name)
        numbers.append(np.frombuffer(gpu.read(view.device, view.pointer, 4 * view.shape[0]), np.int32))
    totals = {f"total_{name}": by_head(arrays.on_device(of, name), name).shape[2] for name, of in (("q", q), ("k", k))}
    check_lengths(*numbers, **totals, max_seqlen_q=sequences.max_seqlen_q)
