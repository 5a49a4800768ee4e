"""The registry is sound, and refusals say what works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlab.core.errors import DataError, ParameterError, UnknownStageError, UnsupportedError
from flashlab.core.paths import KERNELS, ROOT
from flashlab.core.problem import DTYPES, FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import (
    ARCHS,
    CUDA_STAGES,
    DEAD_ENDS,
    STAGES,
    Param,
    Stage,
    arch_for,
    best,
    capability,
    faults,
    get,
    load,
    parse_entry,
)

TEXTS: dict[str, Any] = {"title": "T", "question": "Q?", "change": "C.", "prediction": "P."}
ENTRY = """
title = "T"
question = "Q?"
change = "C."
prediction = "P."
dtypes = ["float16", "bfloat16"]

[params]
WARPS = { default = 4, by_head_dim = { 128 = 2 }, choices = [2, 4, 8], meaning = "warps per CTA" }
"""
every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.id)


@pytest.mark.parametrize("stage", [*STAGES.values(), *DEAD_ENDS.values()], ids=lambda s: s.id)
def test_a_stage_is_whole(stage: Stage) -> None:
    assert faults(stage) == ()
    assert registry.get(stage.id) is stage
    assert stage.archs[0] == stage.min_arch
    assert stage.archs[-1] == (stage.max_arch or ARCHS[-1])


@every_stage
def test_a_stage_comes_after_its_parent(stage: Stage) -> None:
    ids = list(STAGES)
    if stage.parent is None:
        assert stage.id == ids[0]
    else:
        assert ids.index(stage.parent) < ids.index(stage.id)


@pytest.mark.parametrize(("folder", "stages"), [(KERNELS, STAGES), (KERNELS / "dead_ends", DEAD_ENDS)])
def test_every_kernel_is_a_stage(folder: Path, stages: Mapping[str, Stage]) -> None:
    files = {path.name for path in folder.iterdir() if path.suffix in (".cu", ".py")}
    assert files == {stage.source.name for stage in stages.values()}


def test_files_that_kernels_name_are_there() -> None:
    """A comment says where a structure is mirrored, or what makes a file: it should be found there."""
    path = re.compile(r"\b(?:kernels|notebooks|scripts|site|src|tests)/[\w./-]+\.(?:cpp|cuh?|h|md|patch|py|toml)\b")
    named = {
        (file.relative_to(ROOT).as_posix(), name)
        for file in KERNELS.rglob("*")
        if file.suffix in (".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".toml")
        for name in path.findall(file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [(file, name) for file, name in sorted(named) if not (ROOT / name).is_file()] == []


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


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "64"])
def test_a_parameter_is_a_positive_integer_or_0_where_that_is_a_choice(value: Any) -> None:
    """With TILE_KV=0 a loop over the keys would not end."""
    with pytest.raises(ParameterError, match="THREADS: wanted an integer from 1 to"):
        get("00_naive").parameters(64, {"THREADS": value})
    assert get("05_wmma").parameters(64, {"PADDING": 0})["PADDING"] == 0
    with pytest.raises(ParameterError, match="PADDING: wanted an integer from 0 to"):
        get("05_wmma").parameters(64, {"PADDING": -1})


def test_a_tunable_may_be_any_integer() -> None:
    (value,) = get("00_naive").parameters(64, {"THREADS": np.int64(64)}).values()
    assert (type(value), value) == (int, 64)


def test_an_unknown_stage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownStageError, match=rf"wanted one of {', '.join(STAGES)}, got '99_magic'"):
        get("99_magic")


@pytest.mark.parametrize(("name", "meant"), [("05", "05_wmma"), ("wmma", "05_wmma"), ("d3", "d3_equal_share")])
def test_an_id_that_is_nearly_right_is_refused_with_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(UnknownStageError, match=rf"Did you mean (\w+ or )*{meant}( or \w+)*\?$"):
        get(name)


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
    with pytest.raises(UnsupportedError, match="no stage runs B1 H1 S1 D64 full bfloat16 on sm_75") as caught:
        best(Problem.parse("1x1x1x64", dtype="bfloat16"), "sm_75")
    for stage_id in CUDA_STAGES:
        assert f"Stage {stage_id} " in str(caught.value)


def test_a_head_dim_that_no_stage_takes_is_refused_with_those_that_work() -> None:
    works = "Zeros appended to q, k and v up to 96 work, with scale=80"
    with pytest.raises(UnsupportedError, match=f"wanted one of 64, 96, 128, 256 in float16 on sm_90a, got 80. {works}"):
        best(Problem.parse("1x1x1x80"), "sm_90a")
    with pytest.raises(UnsupportedError, match=r"wanted one of 64, 128 in float16 on sm_75, got 256\.$"):
        best(Problem.parse("1x1x1x256"), "sm_75")


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
    old = Stage(id="00_old", parent=None, **TEXTS)
    some = Stage(id="01_some", parent="00_old", **TEXTS, min_arch="sm_90a")
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
    old = Stage(id="00_old", parent=None, **TEXTS, dtypes=DTYPES)
    new = Stage(id="01_new", parent="00_old", **TEXTS, min_arch="sm_90a")
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


# --- Entries ----------------------------------------------------------------------------------------------------------


def test_an_entry_is_a_stage() -> None:
    stage = parse_entry(ENTRY, "99_new")
    assert (stage.id, stage.order, stage.parent, stage.dtypes) == ("99_new", 99, None, ("float16", "bfloat16"))
    assert stage.parameters(64) == {"WARPS": 4}
    assert stage.parameters(128) == {"WARPS": 2}
    assert parse_entry(ENTRY, "tried", place="dead_ends").dead_end


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "T"', "title = T", "wanted TOML, got: "),
        ('title = "T"', 'title = ""', "title: wanted at least 1 character, got ''"),
        ('title = "T"', "", "title: wanted this field, got none"),
        ('title = "T"', 'titel = "T"', "titel: wanted a field that there is"),
        ('title = "T"', 'title = "T"\nid = "18_new"', "wanted no id, which the file's path gives"),
        ('"bfloat16"]', '"float32"]', "dtypes.1: wanted 'float16' or 'bfloat16', got 'float32'"),
        ("default = 4", "default = 5", "params.WARPS.default, by_head_dim: wanted values of [2, 4, 8], got [5]"),
        ("default = 4", "default = 4.5", "params.WARPS.default: wanted a valid integer, got 4.5"),
        ("default = 4", "default = true", "params.WARPS.default: wanted a valid integer, got True"),
        ("default = 4,", "", "params.WARPS.default: wanted this field, got none"),
        ("[2, 4, 8]", "[4, 2, 8]", "params.WARPS.choices: wanted ascending values, each once, got [4, 2, 8]"),
        ("128 = 2", "96 = 2", "params.WARPS.by_head_dim: wanted head dims of [64, 128], got [96]"),
        ("dtypes", 'min_arch = "sm_91"\ndtypes', "min_arch: wanted 'sm_75', 'sm_80'"),
        ("dtypes", 'min_arch = "sm_90a"\nmax_arch = "sm_80"\ndtypes', "max_arch: wanted sm_90a or newer"),
        ("[params]", '[spills]\n64 = ["sm_75"]\n96 = []\n[params]', "spills: wanted head dims of [64, 128]"),
        ("dtypes", "variants = [{ TILES = 3 }]\ndtypes", "Stage 99_new has no parameter 'TILES'"),
    ],
)
def test_an_entry_that_is_none_names_file_field_wanted_and_got(old: str, new: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        parse_entry(ENTRY.replace(old, new, 1), "99_new")
    assert str(raised.value).startswith("kernels/99_new.toml: ")


def test_entries_are_in_order_and_name_stages_before_them(tmp_path: Path) -> None:
    (tmp_path / "dead_ends").mkdir()

    def write(name: str, first: str = "") -> None:
        (tmp_path / f"{name}.toml").write_text(f"{first}\n{ENTRY}", encoding="utf-8")

    write("dead_ends/tried", 'parent = "02_b"')
    write("02_b", 'parent = "01_a"')
    write("t0_c", 'parent = "01_a"\norder = 1.5')
    write("01_a")
    assert list(load(tmp_path)) == ["01_a", "t0_c", "02_b", "tried"]
    write("01_a", 'parent = "02_b"')
    with pytest.raises(DataError, match=r"kernels/01_a.toml: parent: wanted a stage before it, of none, got '02_b'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stage_id", "said"),
    [("17_New", "id: wanted 17_words"), ("16_twice", "id: wanted a number, or `order`, of its own")],
)
def test_a_malformed_id_is_a_fault(stage_id: str, said: str) -> None:
    assert [fault for fault in faults(parse_entry(ENTRY, stage_id)) if fault.startswith(said)]


def test_without_a_checkout_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wanted entries of stages in .*/none, got no such folder"):
        load(tmp_path / "none")


def test_missing_files_are_faults() -> None:
    assert faults(parse_entry(ENTRY, "99_new")) == (
        "source: wanted kernels/99_new.cu, got no such file",
        "page: wanted site/stages/99_new.md, got no such file",
    )


def test_a_source_of_another_stage_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "KERNELS", tmp_path)
    (tmp_path / "99_new.cu").write_text(
        "// 16_old: copied\n#include <x>\nvoid attention_16_old() {}\n", encoding="utf-8"
    )
    stage = replace(parse_entry(ENTRY, "99_new"), parent="16_ones_column")
    assert [fault for fault in faults(stage) if fault.startswith("source")] == [
        "source: wanted a header of at most 8 lines that begins `// 99_new: `",
        "source: wanted `Parent: 16_ones_column` in its header",
        "source: wanted a kernel attention_99_new, got none",
        "source: wanted the tunable WARPS read, got no mention of it",
    ]
