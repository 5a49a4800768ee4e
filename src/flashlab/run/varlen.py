"""Attention over sequences of different lengths, packed in one tensor: `varlen_attention`.

Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and of the output, and rows cu_seqlens_k[b] to
cu_seqlens_k[b + 1] of k and v. Both arrays are int32 and stay on the device: different lengths in tensors of the same
shape reuse the launch plan, and a CUDA graph can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashlab.run import arrays, gpu, recipes
from flashlab.run.attention import first_call
from flashlab.run.plan import Sequences, by_head, check_cu_seqlens, check_flags, check_lengths


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
    """Compute attention within each of several packed sequences of different lengths.

    On a GPU, the kernel is enqueued on the caller's stream, without copies, and without synchronisation unless `check`.
    In host memory, the same kernel is emulated on the CPU. `flashlab.prepare` and `flashlab.emulate` do the same with
    `sequences=flashlab.Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q)`.

    Args:
        q: (total_q, q_heads, head_dim), float16 or bfloat16; libraries and strides as in `flashlab.attention`. total_q
            may be 0: nothing is launched then.
        k: (total_k, kv_heads, head_dim); kv_heads divides q_heads. total_k may be 0.
        v: like `k`.
        cu_seqlens_q: cumulative query lengths, int32 (batch + 1,), contiguous, on the device of q: non-decreasing from
            0 to at most total_q. Sequences without queries are skipped; without keys, the output is 0 and the
            log-sum-exp -inf. Output rows beyond the last value are not written.
        cu_seqlens_k: cumulative key lengths, likewise, to at most total_k.
        max_seqlen_q: upper bound on the query length of every sequence; rows beyond it may not be written.
        causal: whether query i of a sequence sees only keys j with j - i ≤ keys - queries (aligned bottom right).
        window: sliding window within each sequence, as in `flashlab.attention`.
        softcap: soft cap on scores, softcap · tanh(score / softcap); 0 disables it.
        scale: finite factor on the scores; default: 1/sqrt(head_dim).
        stage: id of a stage that supports packed sequences (`Stage.features`); default: as in `flashlab.attention`.
        out: output array, like `q`; default: a new contiguous array of the caller's library.
        return_lse: whether to also return the log-sum-exp of the scores, float32 (q_heads, total_q).
        stream: as in `flashlab.attention`.
        params: tunables of the stage, by name.
        check: whether to synchronise and refuse invalid cumulative lengths and a `max_seqlen_q` that is too small.
            Without it, sequences are clipped to their tensors: nothing outside q, k, v and the output is read or
            written. In host memory, this check is always made.

    Returns:
        The output (total_q, q_heads, head_dim), or (output, lse).

    Raises:
        InputError: invalid arguments (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, supports this call here.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: see there.
    """
    asked = (max_seqlen_q, causal, None if window is None else repr(window), softcap, scale, stage, return_lse)
    key, addresses, again = recipes.lookup((q, k, v, cu_seqlens_q, cu_seqlens_k), out, asked, params)
    if again is not None and check is False:
        return again(q, addresses, out, return_lse, stream)
    check_flags(check=check)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
    how |= {"out": out, "params": params, "sequences": sequences}
    if check and arrays.place_of(q, stream).stream is not None:
        _check(q, k, sequences)
    return first_call(q, k, v, how, key=key, device=None, stream=stream, return_lse=return_lse)


def _check(q: Any, k: Any, sequences: Sequences) -> None:
    """Copy the cumulative lengths from the GPU and raise `InputError` if they are invalid."""
    gpu.require()
    numbers = []
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        view = arrays.on_device(getattr(sequences, name), name)
        check_cu_seqlens(view, name)
        numbers.append(np.frombuffer(gpu.read(view.device, view.pointer, 4 * view.shape[0]), np.int32))
    totals = {f"total_{name}": by_head(arrays.on_device(of, name), name).shape[2] for name, of in (("q", q), ("k", k))}
    check_lengths(*numbers, **totals, max_seqlen_q=sequences.max_seqlen_q)
