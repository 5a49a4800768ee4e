"""Stages for decoding on a GPU: right at any split of the keys, in clusters of every size, on streams and in graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import flashlab
from flashlab.core.problem import Problem
from flashlab.kernels.registry import DECODE, Stage
from flashlab.measure.check import check_stages
from flashlab.run import gpu
from flashlab.verify.on_cpu import CheckRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LENGTHS = ((1, 1), (1, 8192), (5, 4097), (16, 300), (7, 3))
NAMES = [name for stage in DECODE.values() for name in (stage.id, *stage.variant_names)]
ASIDE = {"decode": lambda _: check_stages(NAMES, lengths=LENGTHS, record=False)}


@pytest.fixture(scope="module")
def decode(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("decode")


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_for_decoding_is_right(name: str, decode: CheckRun) -> None:
    stage = DECODE[name.partition("[")[0]]
    if gpu.info().arch not in stage.archs:
        pytest.skip(f"needs {stage.needs}")
    mine = [row for row in decode.rows if row.stage == name]
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in mine if row.status != "ok"] == []
    assert mine


# --- in what order calls come -----------------------------------------------------------------------------------------

SHAPES = ((4, 32, 8, 1, 4096, 128), (1, 32, 8, 1, 8192, 128), (3, 8, 1, 4, 777, 64), (33, 16, 4, 2, 513, 128))
"""Tiles in whole shares, over many blocks, with odd ends, and more tiles than blocks."""


every_stage = pytest.mark.parametrize("stage", DECODE.values(), ids=DECODE)


def _able(stage: Stage) -> Stage:
    if gpu.info().arch not in stage.archs or stage.by_name_only:
        pytest.skip(f"needs {stage.needs}, and arrays as flashlab.attention takes them")
    return stage


def _qkv(torch: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    of = Problem.parse("x".join(map(str, shape)))
    sizes = ((of.q_heads, of.q_len), (of.kv_heads, of.kv_len), (of.kv_heads, of.kv_len))
    q, k, v = (torch.randn(of.batch, heads, n, of.head_dim, device="cuda").half() for heads, n in sizes)
    return q, k, v


def _right(torch: Any, out: Any, q: Any, k: Any, v: Any) -> None:
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, wanted, atol=3e-3, rtol=3e-3)


@every_stage
def test_calls_back_to_back_give_the_same_bits(torch: Any, stage: Stage) -> None:
    _able(stage)
    for _ in range(3):
        for shape in SHAPES:  # each in the workspace that the one before has left
            call = _qkv(torch, shape)
            outs = [flashlab.attention(*call, stage=stage.id, return_lse=True) for _ in range(50)]
            _right(torch, outs[0][0], *call)
            assert all(torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1]) for out, lse in outs)


@every_stage
def test_keys_that_the_call_before_writes_are_read_as_it_leaves_them(torch: Any, stage: Stage) -> None:
    """A call that is launched early may ask for them, but not read them, before that."""
    _able(stage)
    q, k, v = _qkv(torch, (64, 32, 8, 1, 4096, 128))
    asked = _qkv(torch, (2, 32, 8, 1, 128, 128))[0]
    queries = [q.roll(shift, 0) for shift in range(1, 21)]
    keys = torch.empty_like(q)
    outs, written = [], []
    for query in queries:
        flashlab.attention(query, k, v, out=keys, stage=stage.id)
        of_keys = keys.view(2, 8, 128, 128)
        outs.append(flashlab.attention(asked, of_keys, of_keys, stage=stage.id))
        written.append(keys.clone())
    assert not torch.equal(written[0], written[1])
    for out, left in zip(outs, written, strict=True):
        _right(torch, out, asked, left.view(2, 8, 128, 128), left.view(2, 8, 128, 128))


@every_stage
def test_streams_at_once_and_a_graph_beside_them(torch: Any, stage: Stage) -> None:
    _able(stage)
    calls = [_qkv(torch, shape) for shape in SHAPES]
    wanted = [flashlab.attention(*call, stage=stage.id) for call in calls]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [flashlab.attention(*call, stage=stage.id) for call in calls * 2]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        for out in captured:
            out.zero_()
        torch.cuda.synchronize()
        outs = []
        for _ in range(10):
            with torch.cuda.stream(streams[0]):
                graph.replay()
            for stream in streams[1:]:
                with torch.cuda.stream(stream):
                    outs += [flashlab.attention(*call, stage=stage.id) for call in calls]
        torch.cuda.synchronize()
        for index, out in enumerate((*captured, *outs)):
            assert torch.equal(out, wanted[index % len(calls)])


@pytest.mark.parametrize("stage", ["16_ones_column", "d11_short_ends"])
def test_calls_in_a_graph_are_its_only_nodes_and_their_memory_goes_with_it(torch: Any, stage: str) -> None:
    calls = [_qkv(torch, SHAPES[1]), _qkv(torch, SHAPES[1])]
    wanted = [flashlab.attention(*call, stage=stage) for call in calls]
    kept = list(gpu._of_graphs)  # of other tests' graphs, which the driver may let go at any time

    def captured() -> tuple[Any, list[Any]]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            outs = [flashlab.attention(*call, stage=stage) for call in calls]
        return graph, outs

    graph, outs = captured()
    assert gpu.call("cuGraphGetNodes", graph.raw_cuda_graph(), 16)[1] == len(calls)
    assert len([one for one in gpu._of_graphs if one not in kept]) == 1
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for out, right in zip(outs, wanted, strict=True):
            assert torch.equal(out, right)
            out.zero_()
    for _ in range(20):  # the driver tells of a graph that is gone when it comes to it
        graph.reset()
        time.sleep(0.05)
        graph, outs = captured()
    assert len([one for one in gpu._of_graphs if one not in kept]) < 20


@every_stage
def test_a_prepared_call_is_captured_and_replayed(torch: Any, stage: Stage) -> None:
    _able(stage)
    q, k, v = _qkv(torch, SHAPES[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        prepared = flashlab.prepare(q, k, v, stage=stage.id)
        prepared()
    torch.cuda.synchronize()
    first = prepared.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        prepared()
        prepared()
    for _ in range(5):
        prepared.out.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(prepared.out, first)
