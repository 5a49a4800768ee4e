"""Stages on a GPU: against the oracle, between guards, on every library's arrays and streams."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from emulation import hopper_sum
from shared import guarded_verdict
from wrong.cuda import PATCHES, Patch

import flashlab
from flashlab.build import compiler
from flashlab.core import errors
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.measure import check
from flashlab.run import choice, gpu
from flashlab.run.attention import prepare
from flashlab.verify import cases
from flashlab.verify.on_cpu import CheckRun
from flashlab.verify.oracle import make_inputs

# The libraries' own warnings are not under test here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


ASIDE = {"checked": lambda _: check.check_stages(record=False)}


@pytest.fixture(scope="module")
def checked(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("checked")


@pytest.mark.parametrize("stage", registry.STAGES)
def test_every_hostile_length_mask_type_and_layout(stage: str, checked: CheckRun) -> None:
    mine = [row for row in checked.rows if row.stage == stage]
    assert mine
    wrong = [row for row in mine if row.status not in ("ok", "unsupported")]
    assert not wrong, "\n".join(f"{row.problem.label} {row.layout}: {row.status} {row.reason}" for row in wrong[:20])
    if registry.get(stage).why_not(mine[0].problem, gpu.info().arch) is None:
        far = [row for row in mine if row.layout in cases.FAR_LAYOUTS and row.status == "unsupported"]
        assert all("emory" in row.reason for row in far)  # a smaller GPU has too little
        assert Counter(row.status for row in mine)["ok"] == len(mine) - len(far)


@pytest.fixture(scope="module")
def wrong_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wrong kernels' files by name, compiled, on all cores."""
    folder = tmp_path_factory.mktemp("wrong")
    sources = {patch.name: folder / f"{patch.name}.cu" for patch in PATCHES}

    def compile_one(patch: Patch) -> None:
        sources[patch.name].write_text(patch.source(), encoding="utf-8")
        compiler.compile_stage(
            compiler.Job.of(registry.get(patch.stage), patch.problem, arch=gpu.info().arch, source=sources[patch.name])
        )

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, PATCHES))
    return sources


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_wrong_kernels_are_rejected_for_the_right_reason(
    patch: Patch, cupy: Any, wrong_sources: dict[str, Path]
) -> None:
    q, k, v = make_inputs(patch.problem, xp=cupy)
    q, k = (x * cupy.float16(patch.amplitude) for x in (q, k))
    verdict = guarded_verdict(patch.stage, patch.problem, (q, k, v), source=wrong_sources[patch.name])
    assert not verdict.passed
    assert re.match(patch.reason, verdict.reason), verdict.reason


def test_the_kernels_those_were_made_from_pass(cupy: Any) -> None:
    for patch in PATCHES:
        values = make_inputs(patch.problem, xp=cupy)
        assert guarded_verdict(patch.stage, patch.problem, values).reason == ""


def _close(torch: Any, got: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
    torch.testing.assert_close(got.float(), wanted, atol=2e-2, rtol=2e-2)


def _random(torch: Any, *shape: int, dtype: str = "float16") -> Any:
    return torch.randn(*shape, device="cuda").to(getattr(torch, dtype))


def test_torch_tensors_and_log_sum_exp(torch: Any) -> None:
    q, k, v = (_random(torch, 2, 3, 77, 64) for _ in range(3))
    out, lse = flashlab.attention(q, k, v, causal=True, return_lse=True)
    _close(torch, out, q, k, v, is_causal=True)
    scores = (q.float() @ k.float().transpose(-2, -1)) * 64**-0.5
    scores.masked_fill_(~torch.ones(77, 77, dtype=torch.bool, device="cuda").tril(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=5e-3, rtol=1e-3)
    assert out.dtype == q.dtype
    assert out.is_contiguous()


def test_views_of_a_packed_projection_are_read_in_place(torch: Any) -> None:
    packed = _random(torch, 2, 50, 3, 4, 64)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.empty(2, 50, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    assert flashlab.attention(q, k, v, out=out) is out
    _close(torch, out, q, k, v)


def test_keys_shared_by_expanding(torch: Any) -> None:
    q = _random(torch, 2, 4, 33, 64)
    k, v = (_random(torch, 1, 1, 65, 64).expand(2, 4, 65, 64) for _ in range(2))
    _close(torch, flashlab.attention(q, k, v), q, k, v)


def test_bfloat16_by_a_stage_that_takes_it(torch: Any) -> None:
    problem = Problem.parse("1x2x65x64", dtype="bfloat16")
    try:
        registry.best(problem, gpu.info().arch)
    except errors.UnsupportedError as error:
        pytest.skip(str(error))
    q, k, v = (_random(torch, 1, 2, 65, 64, dtype="bfloat16") for _ in range(3))
    _close(torch, flashlab.attention(q, k, v), q, k, v)


def test_cupy_arrays_on_cupys_stream(torch: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v = (cupy.random.standard_normal((1, 2, 65, 64)).astype(cupy.float16) for _ in range(3))
        out = flashlab.attention(q, k, v)
    stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    _close(torch, *(torch.from_dlpack(x) for x in (out, q, k, v)))
    gc.collect()
    with stream:  # still alive: nothing of ours owned it
        assert bool((flashlab.attention(q, k, v) == out).all())


class _Dlpack:
    """Any library's array: it has DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class _Interface:
    """Any library's array: it has `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


@pytest.mark.parametrize("wrapper", [_Dlpack, _Interface])
def test_other_libraries_arrays(wrapper: Any, torch: Any, cupy: Any) -> None:
    q, k, v, out = (_random(torch, 1, 2, 65, 64) for _ in range(4))
    arrays = [cupy.from_dlpack(x) for x in (q, k, v, out)]
    wrapped = [wrapper(x) for x in arrays]
    with pytest.raises(errors.ParameterError, match="out"):
        flashlab.attention(*wrapped[:3])
    flashlab.attention(*wrapped[:3], out=wrapped[3])
    torch.cuda.synchronize()
    _close(torch, out, q, k, v)


def test_runs_on_the_current_and_on_the_named_stream(torch: Any) -> None:
    q, k, v = (_random(torch, 4, 8, 512, 64) for _ in range(3))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    out = torch.full_like(q, float("nan"))
    flashlab.attention(q, k, v)  # compiling may take longer than the sleep
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        flashlab.attention(q, k, v, out=out)
    # The default stream does not wait for `side`, where the kernel is queued behind the sleep.
    assert not side.query()
    side.synchronize()
    _close(torch, out, q, k, v)
    named = torch.full_like(q, float("nan"))
    torch.cuda.synchronize()
    for stream in (side, side.cuda_stream):
        flashlab.attention(q, k, v, out=named, stream=stream)
        side.synchronize()
        _close(torch, named, q, k, v)


def test_prepared_calls_can_be_repeated(torch: Any) -> None:
    q, k, v = (_random(torch, 1, 2, 130, 64) for _ in range(3))
    prepared = prepare(q, k, v)
    prepared()
    first = prepared.out.clone()
    prepared.out.fill_(float("nan"))
    prepared()
    assert torch.equal(first, prepared.out)
    assert prepared.blocks_per_sm() >= 1


def test_a_call_like_the_last_one_reads_and_writes_its_own_arrays(torch: Any) -> None:
    """What is kept of a layout must hold nothing of the call that it was made for."""
    for head_dim, length in ((64, 512), (128, 512), (64, 2048)):
        calls = [tuple(_random(torch, 2, 8, length, head_dim) for _ in range(3)) for _ in range(4)]
        outs = [flashlab.attention(*call, causal=True) for call in calls]
        for out, (q, k, v) in zip(outs, calls, strict=True):
            _close(torch, out, q, k, v, is_causal=True)
        assert len({out.data_ptr() for out in outs}) == len(outs)
    wide = _random(torch, 2, 8, 512, 72)[..., :64]  # rows that no tensor map describes
    _close(torch, flashlab.attention(wide, wide, wide), wide, wide, wide)
    q, k, v = calls[0]
    _close(torch, flashlab.attention(q, k, v, scale=0.5), q, k, v, scale=0.5)


def test_threads_and_streams_share_what_is_kept(torch: Any) -> None:
    calls = [tuple(_random(torch, 4, 8, 512, 64) for _ in range(3)) for _ in range(8)]
    torch.cuda.synchronize()

    def call(arrays: tuple[Any, ...]) -> list[Any]:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [flashlab.attention(*arrays) for _ in range(20)]
        torch.cuda.current_stream().synchronize()
        return outs

    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(call, calls))
    torch.cuda.synchronize()
    for arrays, outs in zip(calls, found, strict=True):
        _close(torch, outs[0], *arrays)
        assert all(torch.equal(outs[0], out) for out in outs)


def test_a_repeated_call_costs_the_host_little(torch: Any) -> None:
    q, k, v = (_random(torch, 1, 8, 512, 64) for _ in range(3))

    def host_us(call: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            best = min(best, (time.perf_counter() - start) / 50 * 1e6)
        return best

    ours = host_us(lambda: flashlab.attention(q, k, v))
    theirs = host_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert ours < 2 * theirs, f"flashlab.run.attention takes the host {ours:.0f} µs a call, SDPA {theirs:.0f}"


def test_without_a_stage_the_table_chooses_and_the_result_is_right(torch: Any) -> None:
    there = gpu.info()
    for shape in ((1, 8, 512, 64), (1, 32, 512, 128), (4, 8, 200, 64), (2, 4, 2048, 64)):
        q, k, v = (_random(torch, *shape) for _ in range(3))
        prepared = flashlab.prepare(q, k, v)
        prepared()
        _close(torch, prepared.out, q, k, v)
        choices = choice.rank(prepared.plan.problem, there.slug, there.arch, there.sm_count).choices
        assert prepared.plan.stage == choices[0].stage
        assert prepared.cubin.parameters == choices[0].parameters


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (q.cpu(), k, v), errors.DeviceError, "cpu"),
        (lambda q, k, v: (q.float(), k, v), errors.DTypeError, "float32"),
        (lambda q, k, v: (q, k.bfloat16(), v), errors.DTypeError, "one type"),
        (lambda q, k, v: (q[..., ::2], k[..., ::2], v[..., ::2]), errors.LayoutError, "contiguous"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), errors.ShapeError, "at least one"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), errors.ShapeError, "shape of k"),
        (lambda q, k, v: (q[..., :40].contiguous(), k[..., :40].contiguous(), v[..., :40].contiguous()),
         errors.UnsupportedError, "head dim"),
        (lambda q, k, v: (q.requires_grad_(), k, v), errors.InputError, "no_grad"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change: Any, error: type[Exception], words: str, torch: Any) -> None:
    q, k, v = change(*(_random(torch, 1, 2, 65, 64) for _ in range(3)))
    with pytest.raises(error, match=words):
        flashlab.attention(q, k, v)


def test_more_shared_memory_than_there_is_is_refused(torch: Any) -> None:
    q, k, v = (_random(torch, 1, 2, 65, 128) for _ in range(3))
    stage = next((s for s in registry.STAGES.values() if "TILE_KV" in s.params), None)
    assert stage is not None
    with pytest.raises((errors.UnsupportedError, errors.CompileError)):
        flashlab.attention(q, k, v, stage=stage.id, params={"TILE_KV": 4096})


def test_two_gpus_are_told_apart(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (_random(torch, 1, 2, 65, 64) for _ in range(3))
    with pytest.raises(errors.DeviceError, match="GPU 1"):
        flashlab.attention(q, k.to("cuda:1"), v)
    others = [x.to("cuda:1") for x in (q, k, v)]
    out = flashlab.attention(*others)
    assert torch.cuda.current_device() == 0
    _close(torch, out, *others)


def test_identity_of_the_gpu() -> None:
    info = gpu.info()
    assert info.sm_count > 0
    assert info.memory_bytes > 1 << 30
    assert info.l2_bytes > 0
    assert info.max_smem_bytes >= 48 << 10
    assert len(info.fingerprint) == 12
    assert registry.capability(info.arch) <= info.compute_capability
    with pytest.raises(errors.NoGpuError, match="GPU 99"):
        gpu.info(99)


class _Foreign:
    """An array of no library that flashlab knows."""

    def __init__(self, values: Any) -> None:
        self.__cuda_array_interface__ = {**values.__cuda_array_interface__, "version": 3}  # torch says 2


@pytest.mark.usefixtures("quiet")  # a run in the background would take the stage for one of the ladder
@pytest.mark.parametrize("library", ["torch", "cupy", "other"])
@pytest.mark.parametrize(("head_dim", "length"), [(64, 1), (64, 203), (128, 65), (128, 2048)])
def test_tensor_maps_and_counters(
    monkeypatch: pytest.MonkeyPatch, torch: Any, cupy: Any, library: str, head_dim: int, length: int
) -> None:
    stage = hopper_sum.STAGE
    if gpu.info().arch not in stage.archs:
        pytest.skip(f"needs {stage.needs}, this GPU is {gpu.info().arch}")
    monkeypatch.setitem(registry.STAGES, stage.id, stage)
    given = {"torch": lambda x: x, "cupy": cupy.asarray, "other": _Foreign}[library]
    heads, kv_heads = 8, 2
    q = torch.randint(-3, 4, (4, heads, length, head_dim), device="cuda").half()
    k, wide = (torch.randint(-3, 4, (4, kv_heads, length, head_dim + 1), device="cuda").half() for _ in range(2))
    k, odd = k[..., :head_dim].contiguous(), wide[..., :head_dim]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for v, aligned in ((k.neg() + 1, True), (odd, False)):  # no tensor map describes rows of an odd length
        outs = [torch.zeros_like(q) for _ in streams]
        torch.cuda.synchronize()
        prepared = [
            prepare(
                *(given(x) for x in (q, k, v)),
                stage=stage.id,
                source=hopper_sum.SOURCE,
                out=given(out),
                stream=stream.cuda_stream,
            )
            for out, stream in zip(outs, streams, strict=True)
        ]
        assert {each.plan.aligned for each in prepared} == {aligned}
        for _ in range(20):  # in both streams at once, each with counters of its own
            for each in prepared:
                each()
        torch.cuda.synchronize()
        for out in outs:  # a launch that found no work would leave zeros
            out.zero_()
        torch.cuda.synchronize()
        for each in prepared:
            each()
        torch.cuda.synchronize()
        wanted = q + (k + v).repeat_interleave(heads // kv_heads, dim=1)
        assert all(torch.equal(out, wanted) for out in outs)
