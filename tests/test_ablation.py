"""Ablations and the time split: every level is right, the default code stays, parts left out are gone and no more."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import synthetic
from ahead import ahead, chosen
from shared import needs_compiler

from flashlab.build import compiler, sass
from flashlab.build.compiler import Cubin, Job
from flashlab.core.errors import CompileError, NoDataError, ParameterError
from flashlab.core.paths import NOTEBOOKS
from flashlab.core.problem import Problem
from flashlab.experiments import ablation as ablate
from flashlab.experiments import effects as analysis
from flashlab.experiments import levers
from flashlab.kernels import registry
from flashlab.measure.options import Options
from flashlab.query.statistics import interval, ratio_of_medians
from flashlab.record import schema, store
from flashlab.record.schema import Ablation, Part
from flashlab.run import choice, gpu
from flashlab.run.attention import Emulation, emulate
from flashlab.show import sweep
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

MACROS = [
    (stage, name, value)
    for stage in registry.STAGES.values()
    for name, param in stage.ablations.items()
    for value in param.choices
    if name not in ("LEAVE_OUT", "MAX_REGISTERS") and value != param.default
]
"""Every value of every macro that leaves the output right, but for the defaults and what a CPU has none of."""
NEEDED_BESIDE: Mapping[tuple[str, str], Mapping[str, int]] = {("08_swizzle", "PADDING"): {"SWIZZLE": 0}}
SPLIT = [registry.STAGES[stage_id] for stage_id in ablate.SPLIT_STAGES]
every_split_stage = pytest.mark.parametrize(
    "stage",
    [pytest.param(one, id=one.id, marks=() if one is SPLIT[-1] else pytest.mark.exhaustive) for one in SPLIT],
)
"""`make test` takes the last."""
PROBLEM = Problem.parse("16x16x2048x64")
ON_A_CPU = (Problem.parse("1x2x1x80x203x64"), Problem.parse("1x1x1x113x70x64", mask="causal"))


# --- axes and macros --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ablate.AXES.values(), ids=ablate.AXES)
def test_an_axis_is_whole(axis: ablate.Axis) -> None:
    stage = registry.get(axis.stage)
    assert re.fullmatch(r"[a-z0-9-]+", axis.name)
    assert axis.question.strip()
    assert axis.prediction.endswith((".", ")"))
    names = [level.name for level in axis.levels]
    assert len(set(names)) == len(names) >= 2
    variants = [tuple(stage.parameters(64, level.params).items()) for level in axis.levels]
    assert len({tuple(sorted(dict(variant).items())) for variant in variants}) == len(variants)
    for level in axis.levels:
        for name, value in level.params.items():
            param = {**stage.params, **stage.ablations}[name]
            assert value in param.choices, f"{axis.name}: {level.name}"


@pytest.mark.exhaustive
def test_every_level_compiles_for_the_sources_shape() -> None:
    work = [
        Job(
            stage=registry.get(axis.stage),
            head_dim=64,
            dtype="float16",
            causal=False,
            arch="sm_90a",
            overrides=level.params,
            may_spill=True,
        )
        for axis in ablate.AXES.values()
        for level in axis.levels
    ]
    found = compiler.compile_many(work)
    assert not [f"{job.label}: {one}" for job, one in zip(work, found, strict=True) if not isinstance(one, Cubin)]


def test_the_claims_that_ask_for_an_ablation_have_an_axis() -> None:
    answered = {claim for axis in ablate.AXES.values() for claim in axis.claims}
    assert answered >= {"A05", "B07", "B08", "B09", "B10", "B12", "B15"}


def test_an_unknown_axis_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match=r"axis: wanted one of tile, .*, got 'colour'"):
        ablate.choose(["colour"])
    assert [axis.name for axis in ablate.choose(["exp", "exp", "tile"])] == ["exp", "tile"]


WITH_MACROS = [stage for stage in registry.STAGES.values() if stage.ablations]


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(one, id=one.id, marks=pytest.mark.exhaustive if number % 2 else ())
        for number, one in enumerate(WITH_MACROS)
    ],
)
def test_a_macros_default_is_what_the_kernel_does_without_it(stage: registry.Stage) -> None:
    for name, param in stage.ablations.items():
        assert param.default in param.choices
        assert re.search(rf"\b{name}\b", stage.source.read_text(encoding="utf-8")) or name == "LEAVE_OUT"
    named = {name: param.default for name, param in stage.ablations.items()}
    what: dict[str, Any] = {"stage": stage, "head_dim": 64, "dtype": "float16", "causal": True, "arch": "sm_90a"}
    plain, explicit = compiler.compile_many([Job(**what, overrides=one) for one in ({}, named)])
    assert isinstance(plain, Cubin)
    assert isinstance(explicit, Cubin)
    assert sass.disassemble(plain.code, plain.entry) == sass.disassemble(explicit.code, explicit.entry)


def test_no_macro_of_an_ablation_is_tuned_or_compiled_by_default() -> None:
    for stage in registry.STAGES.values():
        assert not stage.params.keys() & stage.ablations.keys()
        assert stage.parameters(64).keys() == stage.params.keys()
        for name, param in stage.ablations.items():
            assert stage.parameters(64, {name: param.default}) == {**stage.parameters(64), name: param.default}


def test_a_spill_is_refused_where_it_is_not_asked_for() -> None:
    what: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "causal": False, "arch": "sm_90a"}
    what["overrides"] = {"MAX_REGISTERS": 64}
    capped = compiler.compile_stage(compiler.Job(stage=registry.STAGES["00_naive"], **what, may_spill=True))
    assert capped.resources.registers <= 64
    assert capped.resources.spill_store_bytes > 0
    with pytest.raises(compiler.PerformanceWarningError, match="spills"):
        compiler.compile_stage(compiler.Job(stage=registry.STAGES["00_naive"], **what))


def _ran(stage: registry.Stage, name: str, value: int, problem: Problem) -> Emulation:
    """With that value of a macro, and what it needs beside it."""
    params = {**NEEDED_BESIDE.get((stage.id, name), {}), name: value}
    races = problem.mask == "full"
    return emulate(*make_inputs(problem), causal=problem.causal, stage=stage.id, params=params, races=races)


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, str, int, Problem], Future[Emulation]]]:
    """What comes of each macro on the CPU."""
    mine = [
        (given["stage"], given["name"], given["value"], problem)
        for given in chosen(request, "test_every_macro_leaves_the_output_right")
        for problem in ON_A_CPU
    ]
    with ahead({(stage.id, *rest): partial(_ran, stage, *rest) for stage, *rest in mine}) as found:
        yield found


@needs_compiler
@pytest.mark.parametrize(("stage", "name", "value"), MACROS, ids=lambda x: getattr(x, "id", str(x)))
def test_every_macro_leaves_the_output_right(
    stage: registry.Stage, name: str, value: int, ran: Mapping[tuple[str, str, int, Problem], Future[Emulation]]
) -> None:
    for problem in ON_A_CPU:
        found = ran[stage.id, name, value, problem].result()
        verdict = check(found.out, found.lse, *make_inputs(problem), causal=problem.causal, dtype=problem.dtype)
        assert verdict.passed, f"{problem.label}: {verdict.reason}"
        assert not found.report.findings


# --- parts ------------------------------------------------------------------------------------------------------------


def loop_counts(cubin: Cubin | CompileError) -> Counter[str]:
    """Instructions by opcode in the longest loop of the machine code."""
    assert isinstance(cubin, Cubin)
    instructions = sass.disassemble(cubin.code, cubin.entry)
    start, end = 0, -1
    for one in instructions:
        target = re.search(r"\b0x([0-9a-f]+)\b", one.text) if one.opcode.startswith("BRA") else None
        if target and one.address - int(target[1], 16) > end - start:
            start, end = int(target[1], 16), one.address
    return Counter(one.opcode.split(".")[0] for one in instructions if start <= one.address <= end)


@every_split_stage
def test_what_is_left_out_is_gone_and_the_rest_is_there(stage: registry.Stage) -> None:
    what: dict[str, Any] = {"stage": stage, "head_dim": 64, "dtype": "float16", "causal": False, "arch": "sm_90a"}
    work = [Job(**what, overrides={"LEAVE_OUT": part}, may_spill=True) for part in ablate.PARTS.values()]
    whole, qk, softmax, pv, memory = map(loop_counts, compiler.compile_many(work))
    products = "HGMMA" if stage.tensor_maps else "HMMA"
    # Exponentials of the softmax; the reciprocal at the end of a row is in a persistent stage's loop too.
    divisions = softmax["MUFU"]
    assert divisions <= 4 < whole["MUFU"]
    for left in (qk, pv, memory):
        assert left["MUFU"] == whole["MUFU"]
        assert left["FMNMX"] == whole["FMNMX"]
        assert left["F2FP"] == whole["F2FP"]  # probabilities are rounded, whoever reads them
    assert softmax["FMNMX"] == 0
    assert softmax["F2FP"] == whole["F2FP"]
    assert qk[products] < whole[products]
    assert memory[products] == whole[products]
    by_tensor_cores = (whole[products] - qk[products]) + (whole[products] - pv[products])
    sums = whole[products] - softmax[products]  # 08 sums probabilities on the tensor cores
    assert by_tensor_cores + sums == whole[products]
    if pv[products] == whole[products]:  # the parent's scalar products
        assert pv["HFMA2"] < whole["HFMA2"] / 4
    for copies in ("LDG", "LDGSTS"):
        assert memory[copies] == 0
        for left in (qk, softmax, pv):
            assert left[copies] == whole[copies]
    if not stage.tensor_maps:
        assert whole["LDG"] + whole["LDGSTS"] > 0


@needs_compiler
@every_split_stage
def test_a_part_that_is_left_out_does_not_read_its_operands(stage: registry.Stage) -> None:
    problem = Problem.parse("1x1x1x64x512x64")
    q, k, v = make_inputs(problem)

    def out(left_out: str, q: Any, k: Any, v: Any) -> Any:
        ran = emulate(q, k, v, stage=stage.id, params={"LEAVE_OUT": ablate.PARTS[left_out]})
        return np.asarray(ran.out, dtype=np.float32)

    assert check(out("nothing", q, k, v).astype(np.float16), None, q, k, v, causal=False, dtype="float16").passed
    assert np.array_equal(out("qk", q, k, v), out("qk", -q, k + 1, v))
    assert np.array_equal(out("pv", q, k, v), out("pv", q, k, v * 2))
    late = slice(384, None)  # behind every ring of buffers
    unread = [x.copy() for x in (k, v)]
    for x in unread:
        x[:, :, late] = np.nan
    assert np.array_equal(out("memory", q, k, v), out("memory", q, *unread))
    scores = np.float32(q) @ np.float32(k).transpose(0, 1, 3, 2)
    without_softmax = scores @ np.float32(v)
    assert np.abs(out("softmax", q, k, v) - without_softmax).max() < 0.01 * np.abs(without_softmax).max()


def test_only_a_stage_that_can_be_split_is() -> None:
    with pytest.raises(ParameterError, match=r"stage: wanted one of 04_wmma_qk.*, got '05_wmma'"):
        ablate.split(["05_wmma"])


# --- effects ----------------------------------------------------------------------------------------------------------


def test_a_paired_interval_holds_the_ratio_and_shrinks_with_rounds() -> None:
    generator = np.random.default_rng(1)
    drift = generator.normal(1.0, 0.05, size=100)  # what both of a round meet
    slow = list(1.2 * drift * generator.normal(1.0, 0.005, size=100))
    fast = list(drift * generator.normal(1.0, 0.005, size=100))
    whole = interval(ratio_of_medians, slow, fast, paired=True)
    assert whole.low < 1.2 < whole.high
    assert whole.high - whole.low < 0.03
    few = interval(ratio_of_medians, slow[:8], fast[:8], paired=True)
    assert few.high - few.low > whole.high - whole.low
    assert interval(ratio_of_medians, [*slow, 99.0], fast, paired=True) == whole


def _samples(time_us: float, count: int = 20) -> schema.Samples:
    noise = np.random.default_rng(int(time_us)).normal(1.0, 0.002, size=count)
    return schema.Samples(
        regime="burst", cache="hot", calls=1, time_us=tuple(time_us * noise), sm_clock_mhz=(1980.0,) * count
    )


def ablation(axis: str, level: str, time_us: float | None, *, run: str = synthetic.RUN) -> Ablation:
    row = synthetic.measurement(ablate.AXES[axis].stage, PROBLEM, run=run)
    fields = {name: getattr(row, name) for name in Ablation.model_fields if hasattr(row, name) and name != "kind"}
    fields |= {"axis": axis, "level": level, "stage": ablate.AXES[axis].stage, "parameters": {}}
    if time_us is None:
        fields |= {"status": "error", "reason": "static_assert", "verdict": None, "samples": (), "cubin": None}
    else:
        fields["samples"] = (_samples(time_us),)
    return Ablation(**fields)


def lever_level(level: str, time_us: float | None, *, run: str = synthetic.RUN) -> Ablation:
    fields = {"axis": levers.AXIS, "level": level, "stage": "13_overlap"}
    return ablation("exp", level, time_us, run=run).model_copy(update=fields)


def part(stage: str, left_out: str, time_us: float) -> Part:
    row = synthetic.measurement(stage, PROBLEM)
    fields = {name: getattr(row, name) for name in Part.model_fields if hasattr(row, name) and name != "kind"}
    fields |= {"stage": stage, "left_out": left_out, "parameters": {}, "samples": _samples(time_us)}
    return Part(**fields)


EXP = ("exp", ("2^x", 1000.0), ("__expf", 1200.0), ("expf", None))


def exp_axis(run: str = synthetic.RUN, factor: float = 1.0) -> list[Ablation]:
    name, *levels = EXP
    return [ablation(name, level, time and factor * time, run=run) for level, time in levels]


def test_effects_are_beside_the_first_level_of_the_newest_run() -> None:
    found = analysis.effects([*exp_axis("20270102T030405Z-0123abc", 2.0), *exp_axis(), ablation("exp", "gone", 1.0)])
    assert [one.name for one in found] == ["2^x", "__expf", "expf"]
    first, slower, refused = found
    assert {one.record.run for one in found} == {"20270102T030405Z-0123abc"}
    assert first.median_us == pytest.approx(2000, rel=0.01)
    assert (first.ratio, first.interval, first.verdict) == (1.0, None, "")
    assert slower.ratio == pytest.approx(1.2, rel=0.01)
    assert slower.interval is not None
    assert slower.interval[0] < slower.ratio < slower.interval[1]
    assert slower.verdict == "slower"
    assert (refused.ratio, refused.median_us, refused.reason) == (None, None, "static_assert")


def test_a_level_that_is_refused_now_has_no_ratio_of_before() -> None:
    now = [
        ablation("exp", "2^x", 1000.0, run="20270102T030405Z-0123abc"),
        ablation("exp", "expf", None, run="20270102T030405Z-0123abc"),
    ]
    _, refused = analysis.effects([ablation("exp", "2^x", 1000.0), ablation("exp", "expf", 1200.0), *now])
    assert (refused.ratio, refused.reason) == (None, "static_assert")


def _started(run: str, boot: str, times: Mapping[str, float]) -> list[Ablation]:
    at = schema.Start(boot=boot, at="2026-01-02T03:00:00+00:00")
    rows = [ablation("exp", level, time_us, run=run) for level, time_us in times.items()]
    return [row.model_copy(update={"start": at}) for row in rows]


def test_an_effect_is_over_starts_of_one_code() -> None:
    starts = [
        _started(f"2027010{day}T030405Z-0123abc", f"0000000{day}", {"2^x": 1000.0, "__expf": 1000.0 * ratio})
        for day, ratio in enumerate((1.01, 1.02, 1.04), start=1)
    ]
    of_other_code = _started("20270109T030405Z-0123abc", "00000009", {"2^x": 1000.0, "__expf": 5000.0})
    cubin = of_other_code[1].cubin
    assert cubin is not None
    older = [
        of_other_code[0].model_copy(update={"run": "20260109T030405Z-0123abc"}),
        of_other_code[1].model_copy(
            update={"run": "20260109T030405Z-0123abc", "cubin": cubin.model_copy(update={"sha256": "f" * 64})}
        ),
    ]
    _, one = analysis.effects([record for start in [older, *starts] for record in start])
    assert len(one.starts) == 3
    assert one.ratio == pytest.approx(1.02, abs=0.003)
    assert one.interval is not None
    assert one.interval[0] < 1.012 < 1.036 < one.interval[1]
    assert one.flat()["starts"] == 3
    assert "| 3 |" in analysis.levels_table([one])
    assert "one start" in analysis.levels_table(analysis.effects(starts[0]))


def test_comparisons_that_are_told_together_err_together() -> None:
    """What one comparison alone shows may be chance among many."""
    near, far = analysis.effects(exp_axis())[1:], analysis.effects(exp_axis())
    one = near[0]
    assert one.verdict == "slower"
    assert one.p_value is not None
    many = [*far, *(replace_p(one, 0.9) for _ in range(200))]
    alone = replace_p(one, 0.01)
    object.__setattr__(alone, "family", [alone, *many])
    assert alone.verdict == "no difference shown"


def test_a_clear_difference_is_told_in_a_family_of_any_size() -> None:
    """As many resamples as the family needs: else the least p-value that they can tell, raised, is no longer small."""
    one = analysis.effects(exp_axis())[1]
    family = [dataclasses.replace(one) for _ in range(400)]
    for effect in family:
        object.__setattr__(effect, "family", family)
    for effect in family[1:]:
        effect.__dict__["p_value"] = family[0].p_value
    assert family[0].verdict == "slower"


def replace_p(one: analysis.Effect, p: float) -> analysis.Effect:
    copy = dataclasses.replace(one, family=())
    copy.__dict__["p_value"] = p
    return copy


def test_effects_measured_again_are_held_against_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "ablations"
    folder.mkdir(parents=True)
    assert "No effect has been measured" in analysis.agreement("nvidia-h200", tmp_path)
    for day, ratio in enumerate((1.2, 1.2, 1.5), start=1):
        run = f"2027010{day}T030405Z-0123abc"
        for row in _started(run, f"0000000{day}", {"2^x": 1000.0, "__expf": 1000.0 * ratio}):
            store.append(folder / f"{run}.jsonl", row)
    table = analysis.agreement("nvidia-h200", tmp_path)
    assert "| levels of axes | 1 | 3 | 2 of 6 (33 %) | 2 of 3 (67 %) | 0 of 1 (0 %) |" in table


def test_shares_are_of_the_whole_stage() -> None:
    times = {"nothing": 1000.0, "qk": 800.0, "softmax": 700.0, "pv": 700.0, "memory": 1010.0}
    found = analysis.shares([part("06_cp_async", *one) for one in reversed(times.items())])
    assert [one.name for one in found] == list(ablate.PARTS)
    assert [one.ratio for one in found] == pytest.approx([1.0, 0.8, 0.7, 0.7, 1.01], rel=0.01)
    table = analysis.split_table(found)
    assert "sum of the shares" in table
    assert len(table.splitlines()) == 2 + 5 + 1


def test_charts_and_tables_show_what_was_expected_and_what_came() -> None:
    found = analysis.effects(exp_axis())
    drawn = analysis.chart(found)
    assert "__expf: 1.2" in drawn.alt
    assert drawn.data_files == (f"nvidia-h200/ablations/{synthetic.RUN}.jsonl",)
    text = analysis.levels_table(found)
    assert ablate.AXES["exp"].prediction in text
    assert "static_assert" in text
    assert "slower" in text
    split = analysis.split_chart(
        analysis.shares([part("06_cp_async", "nothing", 900.0), part("06_cp_async", "pv", 600.0)])
    )
    assert "P·V: 33" in split.alt


def test_without_records_pages_say_so() -> None:
    draws = {analysis.chart: "ablate", analysis.lever_chart: "ablate", analysis.split_chart: "split"}
    for draw, command in draws.items():
        with pytest.raises(NoDataError, match=f"flashlab {command}"):
            draw([])


# --- measuring, with a worker that makes its numbers up ---------------------------------------------------------------


def fake_worker(tmp_path: Path, refused: Sequence[str] = ()) -> list[str]:
    cubin = synthetic.measurement("07_mma_registers", PROBLEM).model_dump(mode="json")["cubin"]
    plan = {"log": str(tmp_path / "jobs"), "cubin": cubin, "time_us": [1000.0, 1001.0]}
    plan |= {"refused": dict.fromkeys(refused, ("error", "made up"))}
    script = Path(__file__).with_name("fake_worker.py")
    return [sys.executable, str(script), json.dumps(synthetic.own_gpu(tmp_path)), json.dumps(plan)]


def jobs_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "jobs").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(arch="sm_90a", slug="nvidia-h200"))


@pytest.mark.usefixtures("_hopper")
def test_levels_of_an_axis_take_turns_and_are_recorded_in_one_file(tmp_path: Path) -> None:
    path = ablate.measure(
        ["exp", "feed"],
        options=Options(data=tmp_path / "data", worker=fake_worker(tmp_path, refused=["exp: expf"])),
    )
    found, damage = store.read(path, schema.Ablation)
    assert not damage
    assert not store.verify(path.parent.parent.name, tmp_path / "data")
    assert [(one.axis, one.level, one.status) for one in found] == [
        *(("exp", level, "error" if level == "expf" else "ok") for level in ("2^x", "__expf", "expf")),
        *(("feed", level, "ok") for level in ("cp.async", "tensor copies")),
    ]
    (job,) = jobs_of(tmp_path)
    assert [len(cell["pending"]) for cell in job["cells"]] == [3, 2]
    stage = registry.STAGES["07_mma_registers"]
    assert found[1].parameters == {**stage.parameters(64), "EXPONENTIAL": 1}
    assert job["implementations"]["exp: __expf"]["params"] == found[1].parameters, "nothing is left to what won here"
    assert all(one["judged"] and one["may_spill"] for one in job["implementations"].values())


@pytest.mark.usefixtures("_hopper")
def test_parts_are_recorded_without_a_verdict_and_never_as_measurements(tmp_path: Path) -> None:
    notes: list[str] = []
    path = ablate.split(
        ["06_cp_async"],
        problems=[PROBLEM],
        options=Options(
            data=tmp_path / "data",
            note=notes.append,
            worker=fake_worker(tmp_path, refused=["06_cp_async without pv"]),
        ),
    )
    found, damage = store.read(path, schema.Part)
    assert not damage
    assert [one.left_out for one in found] == ["nothing", "qk", "softmax", "memory"]
    assert path.parent.name == "parts"
    assert not (path.parent.parent / "runs").exists()
    (said,) = notes
    assert "06_cp_async without pv" in said
    assert "made up" in said
    (job,) = jobs_of(tmp_path)
    judged = {name: one["judged"] for name, one in job["implementations"].items()}
    assert [name for name, one in judged.items() if one] == ["06_cp_async without nothing"]


@pytest.mark.usefixtures("_hopper")
def test_levers_take_turns_with_their_stage_as_it_is(tmp_path: Path) -> None:
    first, second = [one.name for one in levers.choose() if one.stage == "13_overlap"][:2]
    steps: list[tuple[int, int, str]] = []
    path = ablate.measure_levers(
        [first, second],
        instead={"shapes": ["16x16x2048x64"]},
        options=Options(
            data=tmp_path / "data", worker=fake_worker(tmp_path), progress=lambda *step: steps.append(step)
        ),
    )
    found, damage = store.read(path, schema.Ablation)
    assert not damage
    assert not store.verify(path.parent.parent.name, tmp_path / "data")
    assert [(one.axis, one.level, one.problem.mask) for one in found] == [
        *(("levers", level, mask) for mask in ("full", "causal") for level in ("as it is", first, second)),
    ]
    stage = registry.get("13_overlap")
    problem = found[-1].problem
    assert found[-1].parameters == stage.parameters(64, choice.parameters(stage, "nvidia-h200", problem))
    (job,) = jobs_of(tmp_path)
    assert [len(cell["pending"]) for cell in job["cells"]] == [3, 3]
    sources = [one["source"] and Path(one["source"]) for one in job["implementations"].values()]
    assert [one and one.stem for one in sources] == [None, first, second] * 2
    assert sources[1].read_text(encoding="utf-8") == levers.choose([first])[0].text()
    compiled = [text for *_, text in steps if text.startswith("compiled")]
    assert len(compiled) == 6
    assert sum(f"{first}.cu" in line for line in compiled) == 2
    shown = analysis.lever_effects(found)
    assert [(one.name, one.is_first) for one in shown[:3]] == [("as it is", True), (first, False), (second, False)]
    assert analysis.effects(found) == []
    assert analysis.lever_effects(found)[-1].ratio == pytest.approx(1.0, abs=0.01)


def test_a_lever_is_shown_beside_what_it_was_measured_with() -> None:
    first, second = levers.names()[:2]
    later = "20270102T030405Z-0123abc"
    found = [
        *(lever_level(level, time) for level, time in (("as it is", 1000.0), (first, 1100.0), (second, None))),
        *(lever_level(level, time, run=later) for level, time in ((first, 1900.0), ("as it is", 2000.0))),
        lever_level("gone", 1.0),
    ]
    shown = analysis.lever_effects(found)
    assert [(one.record.run, one.name) for one in shown] == [
        *((synthetic.RUN, name) for name in ("as it is", second)),
        *((later, name) for name in ("as it is", first)),
    ]
    assert shown[1].reason == "static_assert"
    assert shown[-1].ratio == pytest.approx(0.95, rel=0.01)
    assert shown[-1].verdict == "faster"
    drawn = analysis.lever_chart(shown)
    assert f"{first}, B16 H16 S2048 D64 full float16: 0.9" in drawn.alt
    assert drawn.data_files == (f"nvidia-h200/ablations/{later}.jsonl",)
    table = analysis.lever_table(shown, first)
    assert re.search(r"faster \| [12]\d{3}\.\d \| 1\d{3}\.\d \| 0\.9\d\d \(0\.9\d\d to 0\.9\d\d\)", table)
    assert "commit" in table
    assert "static_assert" in analysis.lever_table(shown, second)
    assert analysis.lever_table(analysis.lever_effects(found[:1]), first) == analysis.LEVER_NOT_MEASURED


def test_the_notebook_shows_what_is_recorded(tmp_path: Path) -> None:
    data = tmp_path / "data"
    synthetic.write_synthetic(data, problems=[PROBLEM])
    times = {"nothing": 1000.0, "qk": 800.0, "softmax": 700.0, "pv": 700.0, "memory": 1010.0}
    for folder, lines in (
        ("ablations", [*exp_axis(), ablation("warps", "4 warps", 900.0), ablation("warps", "8 warps", 800.0)]),
        ("parts", [part("06_cp_async", *one) for one in times.items()]),
    ):
        path = data / "nvidia-h200" / folder / f"{synthetic.RUN}.jsonl"
        path.parent.mkdir()
        path.write_text("".join(map(schema.to_line, lines)), encoding="utf-8")
    out = tmp_path / "out"
    parameters = {"source": "replay", "data": str(data), "axis": "exp"}
    outcome = sweep.execute(NOTEBOOKS / "05_ablations.ipynb", out, parameters)
    assert [(one["group"], one["name"]) for one in outcome.numbers["effects"]] == [("exp", name) for name, _ in EXP[1:]]
    assert [one["name"] for one in outcome.numbers["parts"]] == list(ablate.PARTS)
    text = (out / "05_ablations.ipynb").read_text(encoding="utf-8")
    assert "Nothing has been measured" not in text
    assert "time-split" in text


def test_every_claim_that_an_axis_names_exists() -> None:
    path = store.DATA / "claims.csv"
    if not path.is_file():
        pytest.skip("data/claims.csv is not there yet")
    with path.open(encoding="utf-8", newline="") as file:
        known = {row["id"] for row in csv.DictReader(file)}
    assert {claim for axis in ablate.AXES.values() for claim in axis.claims} <= known
