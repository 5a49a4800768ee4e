"""Sequences of lengths of their own, packed in one tensor: each is right, and none is touched by its neighbours."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import random_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import needs_compiler

import flashlab
from flashlab import Sequences
from flashlab.build.compiler import Variant
from flashlab.core import errors
from flashlab.core.problem import DType, Problem
from flashlab.kernels import registry
from flashlab.run import arrays, emulator
from flashlab.run import attention as run
from flashlab.run.arguments import VarlenParams, params_for, tile_map
from flashlab.run.attention import emulate
from flashlab.run.plan import by_head, check_lengths, plan
from flashlab.verify import cases
from flashlab.verify.verdict import Guarded, check

STAGES = [stage.id for stage in registry.STAGES.values() if "varlen" in stage.features]
LENGTHS = ((1, 1), (65, 130), (0, 40), (7, 0), (193, 127), (64, 400), (400, 129), (3, 300), (0, 0), (200, 90))
"""Queries and keys of sequences: none, one, a tile and one more or less, several tiles, more of either."""
NARROW = np.dtype(np.float16)


class Packed:
    """Sequences with random numbers, and what a call gives of each."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 64,
        dtype: DType = "float16",
        spare: int = 0,
    ) -> None:
        """`spare`: rows of q, and keys, behind the last sequence."""
        rng = np.random.default_rng(len(lengths))
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        self.dtype, self.lengths = dtype, list(lengths)
        self.at_q, self.at_k = (np.cumsum([0, *of], dtype=np.int32) for of in zip(*lengths, strict=True))
        totals = [max(1, int(at[-1])) + spare for at in (self.at_q, self.at_k, self.at_k)]
        self.q, self.k, self.v = (
            rng.standard_normal((total, count, head_dim)).astype(kind)
            for total, count in zip(totals, (heads[0], heads[1], heads[1]), strict=True)
        )

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.at_q, self.at_k, max(1, *(q for q, _ in self.lengths)))

    def run(self, **how: Any) -> Any:
        return emulate(self.q, self.k, self.v, sequences=self.sequences, **how)

    def of(self, number: int, *tensors: Any) -> list[Any]:
        """Rows of a sequence of q and the output, or of k and v, as (1, heads, length, head_dim)."""
        found = []
        for tensor in tensors:
            at = self.at_k if any(tensor is of for of in (self.k, self.v)) else self.at_q
            found.append(tensor[at[number] : at[number + 1]].swapaxes(0, 1)[None])
        return found

    def wrong(self, out: Any, lse: Any, **how: Any) -> list[str]:
        """What is wrong with the output of a call, by the oracle, for each sequence."""
        reasons = []
        for number, (queries, keys) in enumerate(self.lengths):
            rows = slice(self.at_q[number], self.at_q[number + 1])
            if queries and not keys and (out[rows].astype(float).any() or not np.isneginf(lse[:, rows]).all()):
                reasons.append(f"{number}: wanted 0 and -inf of no keys")
            elif queries and keys:
                got, q, k, v = self.of(number, out, self.q, self.k, self.v)
                verdict = check(got, lse[None, :, rows], q, k, v, dtype=self.dtype, **{"causal": False, **how})
                if not verdict.passed:
                    reasons.append(f"{number} ({queries}, {keys}): {verdict.reason}")
        return reasons


# --- what a call asks for, and what is refused ---


def planned(packed: Packed | None = None, *, out: Any = None, **changed: Any) -> Any:
    packed = packed or Packed(LENGTHS)
    given_ = {"q": packed.q, "k": packed.k, "v": packed.v, "cu_seqlens_q": packed.at_q, "cu_seqlens_k": packed.at_k}
    views = [arrays.on_host(changed.pop(name, array), name) for name, array in given_.items()]
    options = {"max_seqlen_q": packed.sequences.max_seqlen_q, **changed}
    return plan(*views, arch="sm_90a", out=None if out is None else arrays.on_host(out, "out"), **options)


def test_the_problem_of_packed_sequences() -> None:
    found = planned(causal=True, window=(900, None))
    assert (found.problem.batch, found.problem.q_len, found.problem.kv_len) == (len(LENGTHS), 400, 1217)
    assert found.problem.features == ("window", "varlen")
    assert found.problem.label.endswith("window 900:-1 varlen")
    assert found.aligned
    assert found.stage.id == STAGES[-1]
    assert planned(causal=True, window=(1216, None)).problem.features == ("varlen",)  # no sequence has more keys
    assert planned(max_seqlen_q=10**9).problem.q_len == len(Packed(LENGTHS).q)


def test_only_packed_sequences_get_other_code() -> None:
    stage = registry.get(STAGES[-1])
    plain = Problem.parse("2x1x64x64")
    assert "VARLEN" not in Variant.of(stage, plain).macros
    assert Variant.of(stage, Problem(**{**vars(plain), "varlen": True})).macros["VARLEN"] == 1


def test_a_stage_that_takes_none_says_which_do() -> None:
    with pytest.raises(
        errors.UnsupportedError, match=rf"12_persistent takes no varlen\. Runnable on sm_90a: {', '.join(STAGES)}\."
    ):
        planned(stage="12_persistent")


SOUND = Packed(((3, 4), (5, 6)))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": SOUND.q[None]}, "ShapeError", r"q: wanted 3 dimensions \(total, heads, head_dim\), got shape \(1, 8"),
        ({"v": SOUND.v[:-1]}, "ShapeError", r"v: wanted the shape of k, \(10, 1, 64\), got \(9, 1, 64\)"),
        ({"k": SOUND.k[..., :32], "v": SOUND.v[..., :32]}, "ShapeError", "k: wanted the head dim of q, 64, got 32"),
        ({"q": SOUND.q.astype(np.float32)}, "DTypeError", "q: wanted float16 or bfloat16, got float32"),
        ({"q": SOUND.q[:, :0]}, "ShapeError", r"q: wanted at least one element in .* got shape \(8, 0, 64\)"),
        ({"k": SOUND.k[:0]}, "ShapeError", r"v: wanted the shape of k, \(0, 1, 64\), got \(10, 1, 64\)"),
        ({"q": np.zeros((8, 2, 128), NARROW)[..., ::2]}, "LayoutError", r"q: wanted .* got strides \(256, 128, 2\)"),
        (
            {"cu_seqlens_q": SOUND.at_q.astype(np.int64)},
            "DTypeError",
            r'cu_seqlens_q: wanted int32, got int64\. `cu_seqlens_q\.astype\("int32"\)` works',
        ),
        (
            {"cu_seqlens_k": SOUND.at_k[:-1]},
            "ShapeError",
            r"cu_seqlens_k: wanted the 2 sequences of cu_seqlens_q, \(3,\)",
        ),
        ({"cu_seqlens_q": SOUND.at_q[:1]}, "ShapeError", r"cu_seqlens_q: wanted \(batch \+ 1,\)"),
        ({"cu_seqlens_k": np.zeros(6, np.int32)[::2]}, "LayoutError", "cu_seqlens_k: wanted a contiguous array"),
        ({"max_seqlen_q": 0}, "ParameterError", "max_seqlen_q: wanted a positive integer, got 0"),
        ({"max_seqlen_q": True}, "ParameterError", "max_seqlen_q: wanted a positive integer, got True"),
        ({"max_seqlen_q": 5.0}, "ParameterError", "max_seqlen_q: wanted a positive integer, got 5.0"),
        ({"out": SOUND.q[None]}, "ShapeError", r"out: wanted the shape of q, \(8, 2, 64\), got \(1, 8, 2, 64\)"),
        ({"out": SOUND.q}, "LayoutError", "out: wanted memory apart from q"),
    ],
)
def test_what_is_off_is_refused_by_name(changed: dict[str, Any], error: str, message: str) -> None:
    with pytest.raises(getattr(errors, error), match=message):
        planned(SOUND, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"cu_seqlens_q": [1, 3, 8]},
            r"cu_seqlens_q: wanted non-decreasing numbers from 0 to at most 8, .* got 1, 3, 8",
        ),
        ({"cu_seqlens_q": [0, 9, 8]}, "cu_seqlens_q: wanted non-decreasing"),
        ({"cu_seqlens_k": [0, 4, 11]}, "cu_seqlens_k: wanted non-decreasing numbers from 0 to at most 10"),
        ({"cu_seqlens_k": [0, -1, 10]}, "cu_seqlens_k: wanted non-decreasing"),
        ({"max_seqlen_q": 4}, "max_seqlen_q: wanted at least the longest sequence of cu_seqlens_q, 5 rows, got 4"),
    ],
)
def test_wrong_numbers_are_refused_in_host_memory(changed: dict[str, Any], message: str) -> None:
    how = {"cu_seqlens_q": SOUND.at_q, "cu_seqlens_k": SOUND.at_k, "max_seqlen_q": 5}
    how |= {name: np.array(x, np.int32) if isinstance(x, list) else x for name, x in changed.items()}
    with pytest.raises(errors.InputError, match=message):
        flashlab.varlen_attention(SOUND.q, SOUND.k, SOUND.v, **how)


@pytest.mark.parametrize("value", [None, 5.0, True, 0])
def test_an_upper_bound_that_is_none_is_refused_before_the_lengths_are_compared(value: Any) -> None:
    """On a GPU `check` compares them before the call is planned."""
    with pytest.raises(errors.ParameterError, match=f"max_seqlen_q: wanted a positive integer, got {value}"):
        check_lengths(SOUND.at_q, SOUND.at_k, total_q=8, total_k=10, max_seqlen_q=value)


@pytest.mark.parametrize("check", [None, 1, "no"])
def test_a_check_that_is_neither_true_nor_false_is_refused(check: Any) -> None:
    how = {"cu_seqlens_q": SOUND.at_q, "cu_seqlens_k": SOUND.at_k, "max_seqlen_q": 5}
    with pytest.raises(errors.ParameterError, match=f"check: wanted True or False, got {check!r}"):
        flashlab.varlen_attention(SOUND.q, SOUND.k, SOUND.v, **how, check=check)


def test_a_log_sum_exp_of_another_shape_is_refused() -> None:
    with pytest.raises(errors.ShapeError, match=r"lse: wanted \(q_heads, total_q\), \(2, 8\), got \(8, 2\)"):
        SOUND.run(lse=np.zeros((8, 2), np.float32))


def test_every_row_of_a_map_is_the_sum_of_two_coordinates() -> None:
    """Row r of a sequence: total - length + r in the second dimension, and its end in the last."""
    view = arrays.on_host(np.zeros((1, 2, 40, 64), np.float16), "q")
    made = tile_map(view, "float16", 16, varlen=True)
    assert made.dims == (64, 40, 1, 2, 41)
    first, end = 8, 30
    for row in range(end - first):
        address = made.origin + (40 - (end - first) + row) * made.strides[0] + end * made.strides[3]
        assert address == (first + row) * 64 * 2
    assert made.dims[1] == 40 - (end - first) + (end - first)  # the first row past the sequence is past the map


def test_the_kernels_structure_has_the_totals() -> None:
    packed = Packed(LENGTHS)
    found = planned(packed)
    values = {"Q": packed.q, "K": packed.k, "V": packed.v, "O": packed.q}
    views = {name: by_head(arrays.on_host(x, name), name) for name, x in values.items()}
    params = params_for(found.problem, 1.0, views)
    assert isinstance(params, VarlenParams)
    assert (params.total_q, params.total_k, params.batch) == (len(packed.q), len(packed.k), len(LENGTHS))


# --- the kernels ---


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "how"),
    [
        (64, "float16", {"causal": True, "window": (40, -1), "softcap": 20.0}),
        (96, "float16", {"causal": True}),
        (128, "bfloat16", {}),
        (256, "bfloat16", {"window": (70, 20)}),
    ],
)
def test_every_sequence_is_right(stage: str, head_dim: int, dtype: DType, how: dict[str, Any]) -> None:
    packed = Packed(LENGTHS, heads=(2, 1), head_dim=head_dim, dtype=dtype)
    ran = packed.run(stage=stage, **how)
    assert not packed.wrong(ran.out, ran.lse, **how)
    assert ran.plan.problem.varlen


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("schedule", cases.SCHEDULES)
def test_there_are_no_races(stage: str, schedule: str) -> None:
    asked: list[tuple[int, dict[str, Any]]] = [
        (64, {"causal": True}),
        (128, {"window": (30, 50)}),
        (256, {"causal": True}),
    ]
    for head_dim, how in asked if schedule == cases.SCHEDULES[0] else asked[-1:]:
        packed = Packed(((65, 130), (0, 9), (193, 127), (7, 0), (40, 70)), head_dim=head_dim)
        ran = packed.run(stage=stage, races=True, schedule=schedule, timeout_s=600, **how)
        assert not ran.report.findings
        assert not packed.wrong(ran.out, ran.lse, **how)


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("layout", "causal"), [("aligned", False), ("unaligned", True), ("one_tensor", True)])
def test_each_sequence_has_the_bits_of_a_call_of_its_own(stage: str, causal: bool, layout: str) -> None:
    packed = Packed(LENGTHS, heads=(2, 2))
    if layout == "one_tensor":  # q, k and v beside each other, as a projection leaves them
        packed = Packed([(q, q) for q, _ in LENGTHS], heads=(2, 2))
        whole = np.stack([packed.q, packed.k, packed.v], 1)
        packed.q, packed.k, packed.v = (whole[:, i] for i in range(3))
    if layout == "unaligned":
        wide = [np.zeros((*x.shape[:2], 65), NARROW) for x in (packed.q, packed.k, packed.v)]
        for row, x in zip(wide, (packed.q, packed.k, packed.v), strict=True):
            row[..., :64] = x
        packed.q, packed.k, packed.v = (row[..., :64] for row in wide)
    ran = packed.run(stage=stage, causal=causal)
    assert ran.plan.aligned == (layout != "unaligned")
    for number, (queries, keys) in enumerate(packed.lengths):
        if queries and keys:
            alone = emulate(*packed.of(number, packed.q, packed.k, packed.v), stage=stage, causal=causal)
            assert np.array_equal(alone.out, packed.of(number, ran.out)[0])
            assert np.array_equal(alone.lse[0], ran.lse[:, packed.at_q[number] : packed.at_q[number + 1]])


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", np.nan), ("bfloat16", np.inf), ("float16", "largest"), ("bfloat16", "largest")]
)
def test_a_neighbours_numbers_do_not_matter(stage: str, dtype: DType, value: Any) -> None:
    """0 · NaN and 0 · inf are NaN: a masked key's V must not be read from the next sequence."""
    lengths = ((20, 30), (9, 9), (70, 141), (50, 60), (200, 3))
    packed = Packed(lengths, dtype=dtype, spare=5)
    wanted = packed.run(stage=stage, causal=True)
    for number in (1, 3, len(lengths)):  # and what lies behind the last
        for tensor, at in ((packed.q, packed.at_q), (packed.k, packed.at_k), (packed.v, packed.at_k)):
            tensor[at[number] : at[number + 1] if number < len(lengths) else None] = (
                ml_dtypes.finfo(tensor.dtype).max if value == "largest" else value
            )
    ran = packed.run(stage=stage, causal=True)
    for number in (0, 2, 4):
        assert np.array_equal(*packed.of(number, ran.out, wanted.out))
        rows = slice(packed.at_q[number], packed.at_q[number + 1])
        assert np.array_equal(ran.lse[:, rows], wanted.lse[:, rows])


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("head_dim", "aligned"), [(64, True), (64, False), (256, True)])
def test_nothing_is_written_outside_of_the_sequences(stage: str, aligned: bool, head_dim: int) -> None:
    packed = Packed(((5, 70), (130, 20), (0, 3), (9, 0)), head_dim=head_dim, spare=7)
    shape = packed.q.shape
    strides = None if aligned else (shape[1] * (head_dim + 1), head_dim + 1, 1)
    out = Guarded(shape, "float16", strides=strides)
    lse = Guarded(shape[1::-1], "float32")
    before = out.array.copy(), lse.array.copy()
    ran = packed.run(stage=stage, out=out.array, lse=lse.array, causal=True, races=True, timeout_s=600)
    assert ran.plan.aligned == aligned
    assert out.why_damaged() is None is lse.why_damaged()
    assert not packed.wrong(out.array, lse.array, causal=True)
    end = packed.at_q[-1]
    assert np.array_equal(out.array[end:].view(np.uint16), before[0][end:].view(np.uint16))
    assert np.array_equal(lse.array[:, end:].view(np.uint32), before[1][:, end:].view(np.uint32))


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("aligned", [True, False])
def test_wrong_numbers_on_a_gpu_touch_nothing_outside(
    stage: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not looked at there without `check`: here the kernel finds them too."""
    monkeypatch.setattr(run, "check_lengths", lambda *_, **__: None)
    packed = Packed(((30, 40), (20, 30), (10, 5)))
    far = 2**31 - 1
    for at_q, at_k in (([-9, 40, 10, far], [0, far, -far, 60]), ([70, 0, 60, 60], [far, 0, 75, 10])):
        cu = (np.array(at_q, np.int32), np.array(at_k, np.int32))
        width = 64 if aligned else 65
        out = Guarded(packed.q.shape, "float16", strides=(2 * width, width, 1))
        lse = Guarded(packed.q.shape[1::-1], "float32")
        sequences = Sequences(*cu, 60)
        values = (packed.q, packed.k, packed.v)
        ran = emulate(*values, sequences=sequences, stage=stage, out=out.array, lse=lse.array, races=True, causal=True)
        assert {finding.kind for finding in ran.report.findings} <= {"race"}  # two sequences may share rows then
        assert out.why_damaged() is None is lse.why_damaged()


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 260), st.integers(0, 260)), min_size=1, max_size=6).filter(
        lambda pairs: any(q for q, _ in pairs) and any(k for _, k in pairs)
    ),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
)
def test_any_lengths(stage: str, lengths: list[tuple[int, int]], causal: bool, kv_heads: int) -> None:
    packed = Packed(lengths, heads=(2, kv_heads))
    ran = packed.run(stage=stage, causal=causal)
    assert not packed.wrong(ran.out, ran.lse, causal=causal)


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (2, 3))])
def test_what_a_gpu_is_asked_at_random(stage: str, seed: int) -> None:
    drawn = random_calls.packed(seed, registry.get(stage).head_dims, most=70)
    packed = Packed(drawn.lengths, **drawn.sizes)
    ran = packed.run(stage=stage, **drawn.how)
    assert not packed.wrong(ran.out, ran.lse, **drawn.how)


@needs_compiler
def test_the_public_call_is_the_emulation() -> None:
    packed = Packed(((20, 30), (1, 9)))
    how = {"cu_seqlens_q": packed.at_q, "cu_seqlens_k": packed.at_k, "max_seqlen_q": 20, "causal": True}
    out, lse = flashlab.varlen_attention(packed.q, packed.k, packed.v, **how, return_lse=True)
    ran = packed.run(causal=True)
    assert np.array_equal(out, ran.out)
    assert np.array_equal(lse, ran.lse)
    assert lse.shape == (2, 21)
    mine = np.empty_like(packed.q)
    assert flashlab.varlen_attention(packed.q, packed.k, packed.v, **how, out=mine) is mine
    assert np.array_equal(mine, out)


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
def test_no_keys_at_all_give_0_and_no_queries_at_all_nothing(stage: str) -> None:
    packed = Packed(((20, 30), (1, 9)))
    none = np.zeros(3, np.int32)
    how: dict[str, Any] = {"max_seqlen_q": 20, "stage": stage, "return_lse": True}
    k, v = packed.k[:0], np.empty((0, 1, 64), NARROW)
    out, lse = flashlab.varlen_attention(packed.q, k, v, cu_seqlens_q=packed.at_q, cu_seqlens_k=none, **how)
    assert out.shape == packed.q.shape
    assert not out.any()
    assert np.isneginf(lse).all()
    for keys, ends in ((packed.k, packed.at_k), (k, none)):
        out, lse = flashlab.varlen_attention(packed.q[:0], keys, keys, cu_seqlens_q=none, cu_seqlens_k=ends, **how)
        assert (out.shape, lse.shape) == ((0, 2, 64), (2, 0))
    with pytest.raises(errors.InputError, match="cu_seqlens_k: wanted non-decreasing numbers from 0 to at most 0"):
        flashlab.varlen_attention(packed.q, k, v, cu_seqlens_q=packed.at_q, cu_seqlens_k=packed.at_k, **how)


@needs_compiler
def test_the_operator() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    importlib.import_module("flashlab.torch")
    packed = Packed(((20, 30), (1, 9)))
    tensors = [torch.from_numpy(x) for x in (packed.q, packed.k, packed.v, packed.at_q, packed.at_k)]
    operator = torch.ops.flashlab.varlen_attention.default
    call = (*tensors, 20, True, 0.2, None, [7, -1], 3.0)
    assert set(torch.library.opcheck(operator, call).values()) == {"SUCCESS"}
    how: Any = {"causal": True, "scale": 0.2, "window": (7, None), "softcap": 3.0}
    wanted = packed.run(**how)
    out, lse = operator(*call)
    assert np.array_equal(out.numpy(), wanted.out)
    assert np.array_equal(lse.numpy(), wanted.lse)
    torch._dynamo.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*call)[0], out)
    with pytest.raises(errors.InputError, match="q: wanted a tensor that needs no gradient"):
        operator(tensors[0].requires_grad_(), *call[1:])


def test_a_pointer_may_point_beside_its_array() -> None:
    memory = emulator.Memory()
    array = np.zeros(8, np.float16)
    assert memory.place(emulator.Pointer(array=array, displacement=-64), "x") == memory.place(
        emulator.Pointer(array=array), "x"
    )
