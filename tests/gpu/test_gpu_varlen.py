"""Packed sequences on a GPU: right against float64, apart from their neighbours, in graphs, compiled, and checked."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import random_calls
from shared import right

import flashlab
from flashlab.core.errors import InputError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.measure.bench import compile_ahead, implementations_of
from flashlab.run import gpu
from flashlab.run.plan import with_features

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
STAGES = [stage.id for stage in registry.STAGES.values() if "varlen" in stage.features]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> str:
    entry = registry.get(request.param)
    if gpu.info().arch not in entry.archs:
        pytest.skip(f"needs {entry.needs}")
    return entry.id


class Packed:
    """Sequences of given lengths with random numbers."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 128,
        dtype: str = "bfloat16",
        spare: int = 0,
    ) -> None:
        made = torch.Generator(device="cuda").manual_seed(len(lengths))
        self.at_q, self.at_k = (
            torch.tensor([0, *of], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
            for of in zip(*lengths, strict=True)
        )
        self.lengths, self.dtype = lengths, dtype
        self.longest = max(1, *(queries for queries, _ in lengths))
        totals = [max(1, int(at[-1])) + spare for at in (self.at_q, self.at_k, self.at_k)]
        self.q, self.k, self.v = (
            torch.randn(total, count, head_dim, generator=made, device="cuda").to(getattr(torch, dtype))
            for total, count in zip(totals, (heads[0], heads[1], heads[1]), strict=True)
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.at_q, "cu_seqlens_k": self.at_k, "max_seqlen_q": self.longest}

    def __call__(self, **how: Any) -> Any:
        return flashlab.varlen_attention(self.q, self.k, self.v, **{**self.arguments, **how})

    def rows(self, number: int) -> tuple[slice, slice]:
        at_q, at_k = (at[number : number + 2].tolist() for at in (self.at_q, self.at_k))
        return slice(*at_q), slice(*at_k)

    def agree(self, out: Any, lse: Any, **how: Any) -> None:
        """Each sequence against its own attention in float64."""
        for number, (queries, keys) in enumerate(self.lengths):
            rows, seen = self.rows(number)
            if queries and keys:
                wanted, wanted_lse = right(self.q[rows], self.k[seen], self.v[seen], **how)
                within = {"atol": TOLERANCE[self.dtype], "rtol": TOLERANCE[self.dtype]}
                torch.testing.assert_close(out[rows].double(), wanted, **within)
                torch.testing.assert_close(lse[:, rows].double(), wanted_lse, atol=5e-3, rtol=5e-3)
            else:
                assert not out[rows].any()
                assert lse[:, rows].isneginf().all()


DRAWN = 500


@pytest.fixture(scope="module")
def compiled() -> None:
    """What the drawn calls run, on all cores."""
    problems = []
    for seed in range(DRAWN):
        for entry in map(registry.get, STAGES):
            drawn = random_calls.packed(seed, entry.head_dims)
            heads, head_dim, dtype = drawn.sizes.values()
            lengths = [max(1, *of) for of in zip(*drawn.lengths, strict=True)]
            shape = (
                f"{len(drawn.lengths)}x{heads[0]}x{heads[1]}x{lengths[0]}x{sum(k for _, k in drawn.lengths)}x{head_dim}"
            )
            mask = "causal" if drawn.how["causal"] else "full"
            problem = Problem.parse(shape, dtype=dtype, mask=mask, varlen=True)
            window, softcap = drawn.how.get("window"), drawn.how.get("softcap", 0.0)
            problems.append((with_features(problem, window, softcap), [entry.id]))
    compile_ahead(implementations_of([], STAGES, ()), problems, 0)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(DRAWN))
def test_any_lengths(stage: str, seed: int) -> None:
    drawn = random_calls.packed(seed, registry.get(stage).head_dims)
    sequences = Packed(drawn.lengths, **drawn.sizes)
    out, lse = sequences(stage=stage, return_lse=True, check=True, **drawn.how)
    sequences.agree(out, lse, **drawn.how)


@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_has_the_bits_of_a_call_of_its_own(stage: str, causal: bool) -> None:
    """With the same tunables: a GPU's table of choices may name others for a call of its own."""
    packed = Packed([(700, 700), (1, 900), (193, 127), (64, 2000)])
    how: dict[str, Any] = {"stage": stage, "causal": causal, "params": registry.get(stage).parameters(128)}
    out, lse = packed(**how, return_lse=True)
    for number in range(len(packed.lengths)):
        rows, seen = packed.rows(number)
        alone = [x[None].transpose(1, 2) for x in (packed.q[rows], packed.k[seen], packed.v[seen])]
        one, one_lse = flashlab.attention(*alone, **how, return_lse=True)
        assert torch.equal(one[0].transpose(0, 1), out[rows])
        assert torch.equal(one_lse[0], lse[:, rows])


def test_no_rows_at_all(stage: str) -> None:
    packed, no_keys = Packed([(200, 300), (0, 90)]), Packed([(200, 0), (90, 0)])
    no_keys.k, no_keys.v = no_keys.k[:0], no_keys.v[:0]
    no_keys.agree(*no_keys(stage=stage, return_lse=True, check=True))
    ends = torch.zeros_like(packed.at_q)
    for of in (packed, no_keys):
        of.q = of.q[:0]
        out, lse = of(stage=stage, return_lse=True, check=True, cu_seqlens_q=ends)
        assert (out.shape, lse.shape) == ((0, 4, 128), (4, 0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_neighbours_numbers_do_not_matter(stage: str, value: float) -> None:
    packed = Packed([(200, 300), (90, 90), (700, 141), (50, 60)], spare=70)
    wanted = packed(stage=stage, causal=True)
    for number in (1, 3):
        rows, seen = packed.rows(number)
        packed.q[rows] = packed.k[seen] = packed.v[seen] = value
    packed.k[int(packed.at_k[-1]) :] = packed.v[int(packed.at_k[-1]) :] = value
    out = packed(stage=stage, causal=True)
    for number in (0, 2):
        rows, _ = packed.rows(number)
        assert torch.equal(out[rows], wanted[rows])


def test_rows_of_no_sequence_are_not_written(stage: str) -> None:
    packed = Packed([(200, 300), (90, 90)], spare=300)
    out = torch.full_like(packed.q, 7.0)
    packed(stage=stage, out=out)
    assert (out[290:] == 7).all()
    assert not (out[:290] == 7).all(-1).any()


def test_a_tensor_between_guards(stage: str) -> None:
    """The map of q and the output starts in front of them; neither is a row outside of them read, nor written."""
    packed = Packed([(200, 300), (90, 90), (1, 33)])
    rows = len(packed.q)
    for name in "qkv":
        tensor = getattr(packed, name)
        guarded = torch.full((3 * len(tensor), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype, device="cuda")
        guarded[len(tensor) : 2 * len(tensor)] = tensor
        setattr(packed, name, guarded[len(tensor) : 2 * len(tensor)])
    whole = torch.full((3 * rows, *packed.q.shape[1:]), 7.0, dtype=packed.q.dtype, device="cuda")
    out, lse = packed(stage=stage, out=whole[rows : 2 * rows], return_lse=True)
    packed.agree(out, lse)
    assert (whole[:rows] == 7).all()
    assert (whole[2 * rows :] == 7).all()


def test_wrong_numbers_touch_nothing_outside_and_are_refused_with_check(stage: str) -> None:
    packed = Packed([(300, 400), (200, 300), (100, 50)])
    far = 2**31 - 1
    for at_q, at_k in (([-9, 400, 100, far], [0, far, -far, 600]), ([700, 0, 600, 600], [far, 0, 750, 100])):
        packed.at_q, packed.at_k = (torch.tensor(at, dtype=torch.int32, device="cuda") for at in (at_q, at_k))
        whole = torch.full((3 * 600, *packed.q.shape[1:]), 7.0, dtype=packed.q.dtype, device="cuda")
        packed(stage=stage, out=whole[600:1200], max_seqlen_q=600)
        torch.cuda.synchronize()
        assert (whole[:600] == 7).all()
        assert (whole[1200:] == 7).all()
        with pytest.raises(InputError, match="cu_seqlens_q: wanted non-decreasing numbers from 0 to at most 600"):
            packed(stage=stage, check=True, max_seqlen_q=600)
    packed = Packed([(300, 400)])
    with pytest.raises(InputError, match="max_seqlen_q: wanted at least the longest sequence of cu_seqlens_q, 300"):
        packed(stage=stage, check=True, max_seqlen_q=299)


def test_a_graph_replays_with_other_lengths(stage: str) -> None:
    packed = Packed([(500, 500), (100, 600), (424, 100)])
    out, lse = packed(stage=stage, causal=True, return_lse=True, max_seqlen_q=1024)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = packed(stage=stage, causal=True, return_lse=True, max_seqlen_q=1024)
    for lengths in ([(1, 1000), (1023, 200), (0, 0)], [(24, 1), (0, 199), (1000, 1000)]):
        other = Packed(lengths)
        packed.lengths = lengths
        packed.at_q.copy_(other.at_q)
        packed.at_k.copy_(other.at_k)
        graph.replay()
        torch.cuda.synchronize()
        packed.agree(out, lse, causal=True)


def test_repeated_calls_keep_lengths_apart(stage: str) -> None:
    calls = [Packed([(700, 700), (300, 300)]), Packed([(300, 300), (700, 700)])]
    first = [call(stage=stage, causal=True) for call in calls]
    for _ in range(3):
        assert all(torch.equal(call(stage=stage, causal=True), one) for call, one in zip(calls, first, strict=True))


def test_thousands_of_short_sequences(stage: str) -> None:
    packed = Packed([(1 + number % 7, 1 + number % 11) for number in range(5000)], head_dim=64)
    out, lse = packed(stage=stage, return_lse=True)
    some = Packed(packed.lengths[:200], head_dim=64)
    some.q, some.k, some.v = packed.q, packed.k, packed.v
    some.agree(out, lse)
    assert not out.isnan().any()


def test_one_projections_tensor(stage: str) -> None:
    """q, k and v as views of (total, 3, heads, head_dim)."""
    packed = Packed([(500, 500), (77, 77)], heads=(4, 4))
    whole = torch.stack([packed.q, packed.k, packed.v], 1)
    packed.q, packed.k, packed.v = whole.unbind(1)
    out, lse = packed(stage=stage, causal=True, return_lse=True)
    packed.agree(out, lse, causal=True)


def test_the_operator_compiles(stage: str) -> None:
    importlib.import_module("flashlab.torch")
    packed = Packed([(500, 500), (77, 177)])

    def call(q: Any, k: Any, v: Any, at_q: Any, at_k: Any) -> Any:
        return torch.ops.flashlab.varlen_attention(q, k, v, at_q, at_k, 500, True, None, stage)

    torch._dynamo.reset()
    tensors = (packed.q, packed.k, packed.v, packed.at_q, packed.at_k)
    for compiled, eager in zip(torch.compile(call, fullgraph=True)(*tensors), call(*tensors), strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_before_the_tensors_may_be_unmapped(stage: str, head_dim: int, causal: bool) -> None:
    """Tensor maps start so many bytes before Q, K and V as these have; a copy beyond a sequence's end read there."""
    gc.collect()
    torch.cuda.empty_cache()
    lengths = [(length, length) for length in (2048, 1, 129, 700) for _ in range(16)]  # 2,048 is no multiple of a tile
    total = sum(length for length, _ in lengths)
    q, k, v = (torch.empty(total, 16, head_dim, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
    ends = torch.tensor([0, *(length for length, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    how = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 2048, "causal": causal, "stage": stage}
    out = flashlab.varlen_attention(q, k, v, **how)
    torch.cuda.synchronize()
    for number in (0, 20, 40, len(lengths) - 1):
        rows = slice(*ends[number : number + 2].tolist())
        wanted, _ = right(q[rows], k[rows], v[rows], causal=causal)
        torch.testing.assert_close(out[rows].double(), wanted, atol=3e-2, rtol=3e-2)
