"""The registry is sound, and refusals say what works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from flashlab.core.errors import ParameterError, UnknownStageError, UnsupportedError
from flashlab.core.paths import KERNELS
from flashlab.core.problem import DTYPES, FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import ARCHS, CUDA_STAGES, STAGES, Param, Stage, arch_for, best, capability, get

every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.id)


@every_stage
def test_a_stage_is_whole(stage: Stage) -> None:
    assert re.fullmatch(r"([0-9]{2}|t[0-9])_[a-z0-9_]+", stage.id)
    assert STAGES[stage.id] is stage
    assert stage.source.is_file()
    for text in (stage.title, stage.question, stage.change, stage.prediction):
        assert text.strip() == text != ""
    assert stage.dtypes
    assert set(stage.dtypes) <= set(DTYPES)
    assert stage.head_dims
    assert set(stage.spills) <= set(stage.head_dims)
    assert {arch for archs in stage.spills.values() for arch in archs} <= set(stage.archs)
    assert stage.archs[0] == stage.min_arch
    assert stage.archs[-1] == (stage.max_arch or ARCHS[-1])


@every_stage
def test_a_stage_comes_after_its_parent(stage: Stage) -> None:
    ids = list(STAGES)
    if stage.parent is None:
        assert stage.id == ids[0]
    else:
        assert ids.index(stage.parent) < ids.index(stage.id)


@every_stage
def test_a_source_opens_with_its_id_and_names_its_parent(stage: Stage) -> None:
    mark, code = {"cuda": ("// ", "#include"), "triton": ('"""', "import triton")}[stage.language]
    header = stage.source.read_text(encoding="utf-8").split(code)[0]
    assert header.startswith(f"{mark}{stage.id}: ")
    assert header.count("\n") <= 8
    assert stage.parent is None or f"Parent: {stage.parent}" in header


@every_stage
def test_a_source_reads_every_tunable_and_defines_its_entry(stage: Stage) -> None:
    text = stage.source.read_text(encoding="utf-8")
    assert re.search(rf"\s{stage.entry}\(", text)
    if '"late_fetch.cuh"' in text:  # the producer that stages share, in which some tunables are
        text += (KERNELS / "common" / "late_fetch.cuh").read_text(encoding="utf-8")
    # Triton reads some itself.
    options = {"WARPS", "PIPELINE_STAGES", "MAX_REGISTERS"} if stage.language == "triton" else set()
    for name in stage.params.keys() - options:
        assert re.search(rf"\b{name}\b", text), name


@every_stage
def test_defaults_are_among_the_choices(stage: Stage) -> None:
    for param in stage.params.values():
        assert {param.default, *param.by_head_dim.values()} <= set(param.choices)
        assert param.choices == tuple(sorted(set(param.choices)))
        assert set(param.by_head_dim) <= set(stage.head_dims)


def test_every_kernel_is_a_stage() -> None:
    folder = next(iter(STAGES.values())).source.parent
    files = {path.name for path in folder.iterdir() if path.suffix in (".cu", ".py")}
    assert files == {stage.source.name for stage in STAGES.values()}


@every_stage
def test_parameters_are_defaults_with_overrides(stage: Stage) -> None:
    for head_dim in stage.head_dims:
        defaults = stage.parameters(head_dim)
        assert defaults == {name: p.default_for(head_dim) for name, p in stage.params.items()}
        for name, param in stage.params.items():
            assert stage.parameters(head_dim, {name: param.choices[-1]}) == {**defaults, name: param.choices[-1]}


def test_a_default_may_depend_on_the_head_dim() -> None:
    param = Param(default=64, choices=(32, 64), meaning="keys", by_head_dim={128: 32})
    assert (param.default_for(64), param.default_for(128)) == (64, 32)


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    stage = get("00_naive")
    with pytest.raises(ParameterError, match=r"Stage 00_naive has no parameter 'TILES'; it has THREADS"):
        stage.parameters(64, {"TILES": 3})


@pytest.mark.parametrize("value", [-1, 1.5, True, "64"])
def test_a_parameter_is_a_non_negative_integer(value: Any) -> None:
    with pytest.raises(ParameterError, match="THREADS: wanted a non-negative integer"):
        get("00_naive").parameters(64, {"THREADS": value})


def test_an_unknown_stage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownStageError, match=rf"wanted one of {', '.join(STAGES)}, got '99_magic'"):
        get("99_magic")


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("sm_75", (7, 5)), ("sm_89", (8, 9)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0)), ("sm_120", (12, 0))],
)
def test_capability_of_an_architecture(arch: str, expected: tuple[int, int]) -> None:
    assert capability(arch) == expected


def test_architectures_are_listed_oldest_first() -> None:
    assert sorted(ARCHS, key=capability) == list(ARCHS)


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"),
     ((10, 0), "sm_100a"), ((12, 0), "sm_120"), ((12, 1), "sm_120")],
)  # fmt: skip
def test_a_gpu_gets_the_newest_code_it_runs(gpu: tuple[int, int], arch: str) -> None:
    assert arch_for(gpu) == arch


@pytest.mark.parametrize("gpu", [(6, 1), (7, 0), (10, 3), (11, 0), (13, 0)])
def test_a_gpu_that_runs_none_is_refused(gpu: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=rf"wanted a GPU that runs code for one of sm_75, .* {gpu[0]}\.{gpu[1]}"):
        arch_for(gpu)


def test_the_best_stage_is_the_last_that_can() -> None:
    for dtype in DTYPES:
        for arch in ARCHS:
            problem = Problem.parse(FIRST_SHAPE, dtype=dtype)
            able = [stage for stage in CUDA_STAGES.values() if stage.why_not(problem, arch) is None]
            if able:
                assert best(problem, arch) is able[-1]
            else:
                with pytest.raises(UnsupportedError, match="no stage runs"):
                    best(problem, arch)


def test_where_no_stage_can_each_says_why() -> None:
    with pytest.raises(UnsupportedError, match="no stage runs B1 H1 S1 D80 full float16 on sm_90a") as caught:
        best(Problem.parse("1x1x1x80"), "sm_90a")
    for stage_id in CUDA_STAGES:
        assert f"Stage {stage_id} takes head dim" in str(caught.value)


@pytest.mark.parametrize(
    ("newest", "archs", "needs"),
    [
        ("sm_90a", ("sm_90a",), "sm_90a"),
        ("sm_100a", ("sm_90a", "sm_100a"), "sm_90a to sm_100a"),
        (None, ("sm_90a", "sm_100a", "sm_120"), "sm_90a or newer"),
    ],
)
def test_a_stage_may_end_with_an_architecture(
    monkeypatch: pytest.MonkeyPatch, newest: str | None, archs: tuple[str, ...], needs: str
) -> None:
    old = Stage(id="00_old", title="", parent=None, question="", change="", prediction="")
    some = Stage(id="01_some", title="", parent="00_old", question="", change="", prediction="", min_arch="sm_90a")
    some = replace(some, max_arch=newest)
    monkeypatch.setattr(registry, "STAGES", {stage.id: stage for stage in (old, some)})
    problem = Problem.parse("1x1x8x64")
    assert some.archs == archs
    assert some.needs == needs
    for arch in ARCHS:
        assert best(problem, arch) is (some if arch in archs else old)
    reason = some.why_not(problem, "sm_120")
    assert (reason is None) is ("sm_120" in archs)
    if reason:
        assert reason == f"Stage 01_some needs {needs}, got sm_120. Runnable on sm_120: 00_old."


def test_a_refusal_names_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Stage(id="00_old", title="", parent=None, question="", change="", prediction="", dtypes=DTYPES)
    new = Stage(id="01_new", title="", parent="00_old", question="", change="", prediction="", min_arch="sm_90a")
    monkeypatch.setattr(registry, "STAGES", {stage.id: stage for stage in (old, new)})
    half, brain = Problem.parse("1x1x8x64"), Problem.parse("1x1x8x64", dtype="bfloat16")
    assert new.why_not(half, "sm_80") == "Stage 01_new needs sm_90a or newer, got sm_80. Runnable on sm_80: 00_old."
    assert new.why_not(brain) == "Stage 01_new takes float16, got bfloat16. Runnable: 00_old."
    assert new.why_not(half) is None
    assert best(half, "sm_80") is old
    assert best(half, "sm_90a") is new
    with pytest.raises(UnsupportedError, match="needs sm_90a"):
        new.require(half, "sm_80")
    old.require(half, "sm_75")
