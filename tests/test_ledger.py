"""The ledger: its claims, its rules, and that the committed verdicts follow from the committed records."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from markdown import markdown
from pydantic import ValidationError
from synthetic import COMMIT, RUN, measurement, write_synthetic

from flashlab.build import compiler, sass
from flashlab.core.errors import DamagedRecordError, FlashlabError, NoDataError, NoGpuError, ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem, suite
from flashlab.experiments import ablation, ledger
from flashlab.experiments.evidence import FIRST, QUANTITIES, Entry, Records, concludes, entries, facts, find
from flashlab.experiments.ledger import Kind, Range, judge
from flashlab.kernels.registry import DEAD_ENDS, STAGES, get
from flashlab.measure.options import Options
from flashlab.query.statistics import Estimate
from flashlab.record import checks, schema, store
from flashlab.record.checks import CheckRow
from flashlab.run import gpu

SINGLE = Problem.parse("1x8x512x64")
exact = Estimate.exactly


def claimed(low: float, high: float | None = None) -> Range:
    return Range(low=low, high=low if high is None else high)


def test_every_claim_is_read_once_with_its_rule_and_numbers() -> None:
    found = {claim.id: claim for claim in ledger.read()}
    assert len(found) == 65
    assert {claim.rule for claim in found.values()} == set(ledger.RULES)
    assert found["A16"].numbers == (claimed(2e-3),)
    assert found["B07"].numbers == (claimed(15, 25),)
    assert [str(number) for number in found["E06"].numbers] == ["20", "10–15", "10", "5"]
    assert found["E06"].units == ("%",) * 4
    assert found["B11"].units == ("registers", "KB", "bytes spilled")
    assert found["B10"].numbers == (None,)
    assert len({claim.source.partition(" § ")[0] for claim in found.values()}) == 5


@pytest.mark.parametrize(
    ("rule", "ours", "theirs", "kind"),
    [
        ("near", exact(12), claimed(10), "confirmed"),
        ("near", exact(12.1), claimed(10), "off"),
        ("near", exact(7.9), claimed(10), "off"),
        ("near", Estimate(value=12.5, low=11.9, high=13), claimed(10), "confirmed"),
        ("near", exact(0), claimed(0), "confirmed"),
        ("near", exact(1), claimed(0), "off"),
        ("gain", exact(1.6), claimed(1.5), "confirmed"),
        ("gain", exact(1.61), claimed(1.5), "off"),
        ("gain", exact(1.02), claimed(1.5), "off"),
        ("gain", exact(0.97), claimed(1.5), "refuted"),
        ("gain", Estimate(value=0.99, low=0.97, high=1.01), claimed(1.5), "off"),
        ("gain", exact(1.03), claimed(1.05), "confirmed"),
        ("beats", Estimate(value=1.1, low=1.01, high=1.2), None, "confirmed"),
        ("beats", Estimate(value=1.1, low=1.0, high=1.2), None, "refuted"),
        ("at_least", exact(150), claimed(150, 200), "confirmed"),
        ("at_least", exact(149), claimed(150, 200), "refuted"),
        ("at_most", exact(20), claimed(15, 20), "confirmed"),
        ("at_most", exact(20.1), claimed(15, 20), "refuted"),
        ("recomputes", exact(1633), claimed(1723), "refuted"),
        ("recomputes", exact(1720), claimed(1723), "confirmed"),
        ("share", exact(24), claimed(20), "confirmed"),
        ("share", exact(26), claimed(20), "off"),
    ],
)
def test_rules(rule: str, ours: Estimate, theirs: Range | None, kind: Kind) -> None:
    assert judge(rule, ours, theirs) == kind


@pytest.mark.parametrize("rule", [name for name in ledger.RULES if name != "beats"])
def test_a_rule_that_needs_a_number_says_so(rule: str) -> None:
    with pytest.raises(ParameterError, match="wanted a claimed number"):
        judge(rule, exact(1), None)


def write_claims(path: Path, *changes: Mapping[str, str]) -> Path:
    """A file of claims, each the same but for its changes."""
    sound = {
        "id": "X1",
        "source": "S § T",
        "lines": "3 7",
        "quote": "Phase 1 … 40,541 us at 5 TFLOPS",
        "claim": "rate",
        "value": "5",
        "unit": "TFLOP/s",
        "states": "gpu: H100 @4; kernel: WMMA, 8 warps @7,9",
        "adds": "shape: B1 H8 S512 D64; dtype: float16",
        "why": "It states neither.",
        "how_to_test": "measure",
        "rule": "near",
    }
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, sound)
        lines.writeheader()
        lines.writerows({**sound, **change} for change in changes)
    return path


def test_a_claim_keeps_the_documents_words_apart_from_ours(tmp_path: Path) -> None:
    (claim,) = ledger.read(write_claims(tmp_path / "claims.csv", {}))
    assert claim.gpu == "H100"
    assert claim.attribution == {
        "quote": "Phase 1 … 40,541 us at 5 TFLOPS",
        "lines": [3, 7],
        "states": {"gpu": {"text": "H100", "lines": [4]}, "kernel": {"text": "WMMA, 8 warps", "lines": [7, 9]}},
        "adds": {"shape": "B1 H8 S512 D64", "dtype": "float16"},
        "why": "It states neither.",
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ([{"value": "about 5"}], "wanted a number"),
        ([{"rule": "nearly"}], "wanted one of near"),
        ([{}, {}], "wanted every id once"),
        ([{"quote": ""}], "X1: quote: wanted the document's words, got none"),
        ([{"lines": "3"}], "X1: lines: wanted one for each of the 2 parts of the quote, got 1"),
        ([{"lines": "3 seven"}], "lines"),
        ([{"why": ""}], "X1: why: wanted a reason for what we add, shape, dtype, got none"),
        ([{"value": "33"}], "X1: value: wanted numbers of the quote, or of what we add under `number`, got 33"),
        ([{"value": "541"}], "got 541"),
        ([{"states": "gpu: H100"}], "wanted `gpu: text @line,line`, the lines that state it"),
        ([{"states": "dtype: float16 @7"}], "X1: gpu: wanted the model that the claim is about"),
        ([{"adds": "float16"}], "wanted `name: text`, each name once"),
        ([{"adds": "dtype: float16; dtype: float32"}], "got 'dtype: float32'"),
        ([{"adds": "sape: B1 H8 S512 D64"}], "sape"),
    ],
)
def test_what_is_no_claim_is_refused(changes: Sequence[Mapping[str, str]], fault: str, tmp_path: Path) -> None:
    path = write_claims(tmp_path / "claims.csv", *changes)
    with pytest.raises(ParameterError, match=fault):
        ledger.read(path)


@pytest.mark.parametrize("change", [{"value": "40541"}, {"value": "33", "adds": "number: 33, a quotient of ours"}])
def test_a_claimed_number_is_the_documents_or_called_ours(change: Mapping[str, str], tmp_path: Path) -> None:
    assert ledger.read(write_claims(tmp_path / "claims.csv", change))


def test_shapes_that_no_document_states_are_ours() -> None:
    """Two documents benchmark at the first shape; every other complete shape is an assumption."""
    complete = re.compile(r"B\d+ H\d+ S\d+ D\d+")
    claims = ledger.read()
    stated = {
        shape for claim in claims if "shape" in claim.states for shape in complete.findall(claim.states["shape"].text)
    }
    added = {shape for claim in claims for shape in complete.findall(claim.adds.get("shape", ""))}
    assert stated == {"B16 H16 S2048 D64"}
    assert added == {"B16 H16 S2048 D64", "B1 H8 S512 D64", "B2 H8 S512 D64", "B32 H8 S128 D64"}
    assert {claim.id for claim in claims if "number" in claim.adds} == {"C09", "E03", "E08"}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"quantity": "rates"}, "quantity: wanted .*rate, .*got rates"),
        ({"quantity": "rate", "of": ["00_naiv"]}, "of: wanted 00_naive.*got 00_naiv"),
        ({"quantity": "speedup", "axis": "tiles"}, "axis: wanted tile, .*got tiles"),
        ({"quantity": "machine_code", "counts": ["register"]}, "counts"),
        ({"quantity": "rate", "beside": [{"quantity": "rates"}]}, "got rates"),
        ({"quantity": "rate", "shap": "1x1x1x64"}, "shap"),
    ],
)
def test_an_entry_that_names_what_does_not_exist_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Entry.model_validate(fields)


def test_what_stands_beside_is_of_the_same_problem() -> None:
    entry = entries()["C07"]
    assert entry.beside[0].problem == entry.problem
    assert entries()["A03"].beside[0].problem.dtype == "bfloat16"


# --- From records to verdicts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up records of the whole ladder, with an ablation, parts, single calls and a dead end that is wrong."""
    folder = tmp_path_factory.mktemp("data")
    write_synthetic(folder, problems=(*suite("standard"), *suite("claims")))
    return folder


def _add(data: Path, folder: str, *lines: schema.AnyRecord, slug: str = "nvidia-h200") -> None:
    path = data / slug / folder / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(schema.to_line, lines))


def _timed(name: str, problem: Problem, time_us: float) -> dict[str, Any]:
    """The fields of a record of `name` whose bursts take about `time_us`."""
    row = measurement(name, problem).model_dump()
    for samples in row["samples"]:
        middle = float(np.median(samples["time_us"]))
        samples["time_us"] = [time_us * one / middle for one in samples["time_us"]]
    return row


def _ablation(level: str, time_us: float, **choice: int) -> schema.Ablation:
    row = _timed("06_cp_async", FIRST, time_us)
    for name in ("kind", "name", "choice", "layout", "lse"):
        del row[name]
    parameters = {**STAGES["06_cp_async"].parameters(64), **choice}
    return schema.Ablation.model_validate(
        {**row, "axis": "reduction", "level": level, "stage": "06_cp_async", "parameters": parameters}
    )


def _part(left_out: str, time_us: float) -> schema.Part:
    row = _timed("04_wmma_qk", SINGLE, time_us)
    fields = {name: row[name] for name in ("run", "time", "gpu", "source", "software", "problem", "cubin")}
    fields |= {"stage": "04_wmma_qk", "left_out": left_out, "parameters": {}, "samples": row["samples"][0]}
    return schema.Part.model_validate(fields)


def _one(data: Path, name: str, slug: str = "nvidia-h200") -> ledger.Verdict:
    claim = next(claim for claim in ledger.read() if claim.id == name)
    return ledger.evaluate(claim, _records(data, slug))


@cache
def _records(data: Path, slug: str) -> Records:
    return Records(slug, data)


def test_a_stages_row_with_the_log_sum_exp_on_is_no_evidence(tmp_path: Path) -> None:
    plain = measurement("00_naive", FIRST).model_copy(update={"lse": False})
    _add(tmp_path, "runs", plain, plain.model_copy(update={"lse": True}), slug="nvidia-h200")
    assert [row.record for row in Records("nvidia-h200", tmp_path).measurements] == [plain]


def test_every_claim_has_an_entry_and_a_verdict(data: Path) -> None:
    assert entries().keys() == {claim.id for claim in ledger.read()}
    used = {entry.quantity for claim in entries().values() for entry in (claim, *claim.beside)}
    assert used == QUANTITIES.keys()
    found = ledger.verdicts("nvidia-h200", data)
    assert [one.id for one in found] == [claim.id for claim in ledger.read()]
    for one in found:
        assert one.reason.endswith(".")
        assert (one.verdict == "pending") <= (not one.numbers)
        for number in one.numbers:
            assert number.low <= number.value <= number.high
        for place in one.records:
            path, _, line = place.rpartition(":")
            assert (data / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_a_rate_comes_with_its_interval_record_and_reason(data: Path) -> None:
    one = _one(data, "A01")
    row = measurement("00_naive", FIRST).samples_of()
    assert row is not None
    (number,) = one.numbers
    assert number.value == pytest.approx(FIRST.tflops(row.median_us))
    assert FIRST.tflops(max(row.time_us)) < number.low < number.value < number.high < FIRST.tflops(min(row.time_us))
    assert one.records == (f"nvidia-h200/runs/{RUN}.jsonl:1",)
    assert one.flat()["interval"] == [number.low, number.high]
    assert "a factor of" in one.reason
    assert "H100" in one.conclusion


def test_nothing_on_record_is_pending_and_says_what_makes_it(tmp_path: Path) -> None:
    write_synthetic(tmp_path, problems=suite("smoke"))
    one = _one(tmp_path, "B08")
    assert (one.verdict, one.numbers) == ("pending", ())
    assert "`flashlab ablate reduction`" in one.reason
    assert _one(tmp_path, "E05").reason.count("flashlab split") == 1
    assert _one(tmp_path, "C06").reason.count("flashlab claims --measure") == 1


def test_an_ablation_is_judged_within_its_axis(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    _add(
        tmp_path / "data",
        "ablations",
        _ablation("shuffles", 1000.0, REDUCTION=0),
        _ablation("shared memory, warp barriers", 1400.0, REDUCTION=1),
        _ablation("shared memory, block barriers", 1150.0, REDUCTION=2),
    )
    one = _one(tmp_path / "data", "B08")
    assert one.verdict == "confirmed"
    assert one.numbers[0].value == pytest.approx(15, abs=0.5)
    assert one.numbers[0].unit == "%"
    assert [place.rpartition(":")[2] for place in one.records] == ["3", "1"]


def test_a_lever_and_a_level_of_another_axis_speak_for_no_claim(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    levels = {"shuffles": 1000.0, "shared memory, block barriers": 1150.0}
    for axis in ("levers", "tile"):
        rows = [_ablation(level, us, REDUCTION=2 * index) for index, (level, us) in enumerate(levels.items())]
        _add(tmp_path / "data", "ablations", *(row.model_copy(update={"axis": axis}) for row in rows))
    assert _one(tmp_path / "data", "B08").verdict == "pending"


def test_parts_are_shares_of_the_whole(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    parts = {"nothing": 100.0, "qk": 80.0, "softmax": 71.0, "pv": 69.0, "memory": 40.0}
    _add(tmp_path / "data", "parts", *(_part(name, time_us) for name, time_us in parts.items()))
    one = _one(tmp_path / "data", "E05")
    assert [round(number.value) for number in one.numbers] == [20, 29, 31, 60]
    assert [number.verdict for number in one.numbers] == ["confirmed", "confirmed", "confirmed", "off"]
    assert one.verdict == "off"
    assert one.decisive is one.numbers[3]


def test_a_single_call_is_wall_time(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    row = measurement("sdpa", SINGLE).model_dump()
    fields = {name: row[name] for name in ("run", "time", "gpu", "source", "software", "problem", "name")}
    _add(tmp_path / "data", "calls", schema.Call.model_validate({**fields, "time_us": [24.0, 25.0, 26.0]}))
    one = _one(tmp_path / "data", "C06")
    assert one.verdict == "confirmed"
    assert one.numbers[0].value == 25.0
    assert "the kernel itself takes" in one.reason


@pytest.mark.parametrize(
    ("errors", "reason", "value", "told"),
    [
        ({"max_abs_error": 1.5, "max_abs_limit": 0.01}, "max abs error 1.5 over its limit", 150, "largest error 1.5"),
        ({}, "NaN in output: 56 of 524288 elements, row 239, first at batch 0", 56, "56 of 524288 elements are NaN"),
    ],
    ids=["error", "NaN"],
)
def test_a_wrong_partition_may_leave_no_number(
    errors: dict[str, float], reason: str, value: float, told: str, tmp_path: Path
) -> None:
    problem = Problem.parse("2x8x512x64")
    sound = measurement("06_cp_async", problem)
    none = dict.fromkeys(("max_abs_error", "max_abs_limit", "rms_error", "rms_limit", "lse_error", "lse_limit"))
    verdict = schema.Verdict(**{**none, **errors, "passed": False, "reason": reason})
    wrong = sound.model_copy(update={"name": "tile48", "status": "wrong", "reason": reason, "verdict": verdict})
    write_synthetic(tmp_path)
    path = next((tmp_path / "nvidia-h200" / "runs").glob("*.jsonl"))
    path.write_text(wrong.model_copy(update={"samples": ()}).model_dump_json() + "\n", encoding="utf-8")
    finding = find(Records("nvidia-h200", tmp_path), entries()["D05"])
    assert finding.numbers == (exact(value),)
    assert told in finding.text


def test_the_largest_error_links_the_line_that_its_case_is_in(tmp_path: Path) -> None:
    """A line of comparisons is a case, with every stage compared there; the first is what holds for all."""
    rounded = Problem.parse("1x1x64x64")
    worst = Problem.parse("1x1x65x64")
    verdict = schema.Verdict(
        passed=True, reason="", max_abs_error=1e-4, max_abs_limit=1.0, rms_error=0.0, rms_limit=1.0
    )
    rows = [
        CheckRow(stage=name, problem=problem, layout="bhsd", status="ok", reason="", verdict=verdict)
        for problem in (rounded, worst)
        for name in STAGES
    ]
    rows[-1] = replace(rows[-1], verdict=verdict.model_copy(update={"max_abs_error": 0.5}))
    header = checks.header_line(run=RUN, time="2026-01-02T03:04:05Z", gpu={}, source={}, software={})
    lines = [header, *(checks.case_line([row for row in rows if row.problem == one]) for one in (rounded, worst))]
    path = tmp_path / "nvidia-h200" / "checks" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    one = _one(tmp_path, "A16")
    assert one.numbers[0].value == 0.5
    assert one.records == (f"nvidia-h200/checks/{RUN}.jsonl:3",)


def test_profiles_speak_to_utilisation_and_sectors(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    fastest = min(
        (row for name in STAGES if (row := measurement(name, FIRST)).samples),
        key=lambda row: row.samples[0].median_us,
    ).name
    sectors = {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 10.0}
    time_ns = 500_000.0
    unit = {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 75.0,
        "dram__bytes_read.sum": 0.048 * time_ns * 1e3,
        "dram__bytes_write.sum": 0.048 * time_ns * 1e3,
        "gpu__time_duration.sum": time_ns,
    }
    wanted = {
        "00_naive": sectors | {"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 20.0},
        "01_coalesced": sectors | {"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 160.0},
    }
    wanted[fastest] = wanted.get(fastest, {}) | unit
    _add(tmp_path / "data", "profiles", *(_profile(name, metrics) for name, metrics in wanted.items()))
    used = _one(tmp_path / "data", "B20")
    assert [round(number.value, 6) for number in used.numbers] == [75.0, 2.0]
    assert [number.verdict for number in used.numbers] == ["confirmed", "refuted"]
    reason = _one(tmp_path / "data", "A07").reason
    assert "2.00 sectors in `00_naive`" in reason
    assert "16.0 in `01_coalesced`" in reason


def _profile(stage: str, metrics: Mapping[str, float]) -> schema.StageProfile:
    return schema.StageProfile(
        run=RUN,
        tile_q=64,
        gpu="NVIDIA H200",
        commit=COMMIT,
        dirty=False,
        metrics=dict(metrics),
        stage=stage,
        problem=FIRST,
        parameters={},
        cubin_sha256="0" * 64,
        ncu="made up",
        samples={},
        lines=(),
        time="2026-01-02T03:04:05Z",
    )


def test_a_time_on_another_chip_needs_that_chip_and_shows_what_can_be_shown(data: Path, tmp_path: Path) -> None:
    here = _one(data, "D02")
    assert here.verdict == "needs_hardware"
    assert here.numbers
    assert "`05_wmma` compiles for sm_89" in here.conclusion
    write_synthetic(tmp_path, "nvidia-l4", problems=suite("standard"))
    there = _one(tmp_path, "D02", "nvidia-l4")
    assert there.verdict in ("confirmed", "off")
    assert there.conclusion == ""
    ratio = _one(data, "D08")
    assert ratio.verdict in ("confirmed", "off")
    assert "nvidia-h200" in ratio.conclusion


def test_a_time_that_memory_bounds_is_said_to_carry_over_with_care() -> None:
    assert concludes("H100", "nvidia-h200", "time", 0.2) == (True, concludes("H100", "nvidia-h200", "time", 0.2)[1])
    assert "carries over" in concludes("H100", "nvidia-h200", "time", 0.2)[1]
    assert "may be slower" in concludes("H100", "nvidia-h200", "time", 3.0)[1]
    assert not concludes("H100", "tesla-t4", "time", 0.2)[0]
    assert concludes("L4", "nvidia-l4", "time", 0.2) == (True, "")


def test_a_verdict_says_where_its_record_is_older_than_the_rules(data: Path, tmp_path: Path) -> None:
    assert RUN < ledger.RULES_WRITTEN
    old = _one(data, "A01")
    assert old.older
    assert not _one(data, "D07").older
    path = tmp_path / "nvidia-h200" / "runs" / "20990101T000000Z-0123abc.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(schema.to_line(measurement("00_naive", FIRST)), encoding="utf-8")
    new = _one(tmp_path, "A01")
    assert not new.older
    assert "older than the rules" in ledger.table([old])
    assert "older than the rules" not in ledger.table([new])
    assert ledger.standing([old, new]).startswith("1 of the 2 verdicts")


def test_arithmetic_is_recomputed(data: Path) -> None:
    values = {name: _one(data, name).numbers[0].value for name in ("A06", "A14", "A15", "C05", "D07")}
    assert values == pytest.approx({"A06": 5, "A14": 4.886, "A15": 281.25, "C05": 1632.7, "D07": 1.2121}, rel=1e-3)
    assert all(_one(data, name).verdict == "refuted" for name in ("A14", "A15", "C05", "D06", "D07"))


def test_batched_work_is_not_compared_with_a_single_call(data: Path) -> None:
    one = _one(data, "C09")
    assert one.verdict == "not_comparable"
    assert "B32 H8 S128 D64, a sequence with B1 H8 S512 D64" in one.reason


def test_the_machine_code_is_compiled_on_the_spot(data: Path) -> None:
    one = _one(data, "D04")
    assert (one.verdict, one.numbers[0].value) == ("refuted", 99)
    assert "`06_cp_async.cu` for sm_89" in one.reason
    assert _one(data, "B11").numbers[2].value == 0


@pytest.mark.parametrize(("claim", "stage_id"), [("C01", "00_naive"), ("C02", "branch_free"), ("C03", "wmma_no_smem")])
def test_branches_are_those_of_the_kernels_own_code(claim: str, stage_id: str, data: Path) -> None:
    cubin = compiler.compile_stage(
        compiler.Job(stage=get(stage_id), head_dim=64, dtype="float16", causal=False, arch="sm_90a")
    )
    every = sass.mix(cubin.code, cubin.entry)["branch_predicated"]
    one = _one(data, claim)
    assert one.numbers[0].value < every, "exits and slow paths are not counted"
    assert f"it has {every}" in one.reason, "and are told"


def test_written_verdicts_are_read_back_and_compared(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    found = ledger.verdicts("nvidia-h200", tmp_path / "data")
    path = ledger.write(found, "nvidia-h200", tmp_path / "data")
    assert ledger.read_verdicts(path) == found
    assert store.verify("nvidia-h200", tmp_path / "data") == ()
    assert ledger.differences(found, found) == {}
    changed = (*found[1:], found[0].model_copy(update={"verdict": "confirmed"}))
    assert ledger.differences(found, changed) == {"A01": (found[0], changed[-1])}
    assert ledger.differences(found, found[1:]) == {"A01": (found[0], None)}
    with pytest.raises(NoDataError, match="flashlab claims --write"):
        ledger.read_verdicts(tmp_path / "none.json")
    path.write_text('{"id": 1}', encoding="utf-8")
    with pytest.raises(DamagedRecordError, match="flashlab claims --write"):
        ledger.read_verdicts(path)


def test_tables_name_every_claim_and_contradiction(data: Path) -> None:
    found = ledger.verdicts("nvidia-h200", data)
    table = ledger.table(found)
    assert all(f"| {one.id} |" in table for one in found)
    assert ledger.summary(found).splitlines()[-1].split("|")[-2].strip() == "65"
    contradictions = ledger.contradictions(found)
    assert "1.6 TFLOP/s" in contradictions
    assert "0.65 TFLOP/s" in contradictions
    assert {name for one in facts()["contradictions"] for name in one["ids"]} <= {one.id for one in found}


def test_the_table_shows_whose_a_condition_is(data: Path) -> None:
    table = html.unescape(ledger.table([_one(data, "C04"), _one(data, "E08")]))
    assert "40,541 μs" in table
    assert "(line 75)" in table
    assert "We add:</b> shape: B1 H8 S512 D64; " in table
    assert "Ours: 90 % of peak" in table


def test_a_quote_is_text_on_the_page(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = '5 <script>alert(1)</script> <img onerror=x> [a](javascript:b) | **c** `d` ~e~ "f" &amp; g_h_'
    path = write_claims(tmp_path / "claims.csv", {"id": "A01", "quote": f"{hostile} … 5", "why": hostile})
    (claim,) = ledger.read(path)
    one = _one(data, "A01")
    monkeypatch.setattr(ledger, "read", lambda: (claim,))
    table = ledger.table([one])
    assert len(table.splitlines()) == 3
    assert table.splitlines()[2].count("|") == table.splitlines()[0].count("|")
    shown = markdown(table, extensions=["tables", "attr_list", "md_in_html"])
    assert not re.search(r"<(script|img|a|strong|em|del)\b", shown)
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)).count(hostile) == 2


@pytest.mark.parametrize("slug", sorted(path.parent.name for path in DATA.glob(f"*/{ledger.VERDICTS}")))
def test_the_committed_verdicts_follow_from_the_committed_records(slug: str) -> None:
    committed = (DATA / slug / ledger.VERDICTS).read_bytes()
    found = ledger.verdicts(slug)
    assert [(one.id, one.verdict) for one in ledger.read_verdicts(DATA / slug / ledger.VERDICTS)] == [
        (one.id, one.verdict) for one in found
    ]
    assert ledger.as_json(found).encode() == committed, "`flashlab claims --write` writes them anew"


@pytest.mark.skipif(gpu.available() is None, reason="this machine has a GPU, where measuring is possible")
def test_measuring_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(NoGpuError):
        ledger.time_calls("sdpa", SINGLE, data=tmp_path)
    with pytest.raises(FlashlabError, match=r"GPU|torch|package"):
        ledger.measure(options=Options(data=tmp_path))
    assert not list(tmp_path.rglob("*.jsonl"))


AXES = {"tile", "warps", "padding-wmma", "reduction", "buffers-wmma", "registers", "feed", "order-wgmma"}


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Nothing is measured; what would be is kept."""
    asked: dict[str, Any] = {}

    def run(problems: Any, **options: Any) -> Path:
        names = (*options["stages"], *options["peers"])
        at = {problem: [name for name in names if options["only"](problem, name)] for problem in problems}
        asked.setdefault("runs", []).append(at)
        return tmp_path / "run"

    monkeypatch.setattr(ledger.bench, "run", run)
    monkeypatch.setattr(ledger.gpus, "info", lambda _: SimpleNamespace(slug="nvidia-h200"))
    monkeypatch.setattr(ledger.ablation, "measure", lambda axes, **_: asked.update(axes=axes) or tmp_path / "axes")
    monkeypatch.setattr(ledger.ablation, "split", lambda ids, **_: asked.update(split=ids) or tmp_path / "split")
    monkeypatch.setattr(ledger, "time_calls", lambda *_, **__: tmp_path / "calls")
    return asked


def test_what_judges_the_claims_is_measured_in_turn(measuring: dict[str, Any], tmp_path: Path) -> None:
    made = ledger.measure(options=Options(data=tmp_path))
    assert [path.name for path in made] == ["run", "run", "axes", "split", "calls"]
    ladder, dead = measuring["runs"]
    assert {problem: set(names) for problem, names in dead.items()} == {
        FIRST: {"00_naive", "branch_free", "cublaslt_unfused", "cublaslt_batched", "split_k", "sdpa"},
        SINGLE: {"wmma_no_smem", "fp8_simulated", "sdpa"},
        Problem.parse("2x8x512x64"): {"tile48", "sdpa"},
    }
    # A run with a dead end is shown among the dead ends alone.
    assert not any(name in DEAD_ENDS for names in ladder.values() for name in names)
    assert list(ladder[Problem.parse("16x16x2048x64", dtype="bfloat16")]) == ["fa3"]
    for mask in ("full", "causal"):
        assert set(ladder[Problem.parse("16x16x2048x64", mask=mask)]) == {*STAGES, "sdpa", "sdpa_efficient"}
    assert set(ladder) >= {problem for problem in suite("claims") if not problem.causal}
    assert set(measuring["axes"]) == AXES
    assert measuring["split"] == ["04_wmma_qk"]


def test_named_stages_alone_leave_dead_ends_their_parent(measuring: dict[str, Any], tmp_path: Path) -> None:
    ledger.measure(options=Options(data=tmp_path), stages=["16_ones_column"])
    ladder, dead = measuring["runs"]
    assert [name for name in ladder[FIRST] if name in STAGES] == ["16_ones_column"]
    assert "00_naive" in dead[FIRST]


@pytest.mark.parametrize(
    ("commit", "dirty", "again"), [(COMMIT, False, False), (COMMIT, True, True), ("0", False, True)]
)
def test_what_this_code_just_measured_is_not_measured_again(
    commit: str, dirty: bool, again: bool, measuring: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = {"boot": "01234567", "at": "2026-01-02T03:00:00+00:00"}
    monkeypatch.setattr(ledger.provenance, "source", lambda: schema.Source(commit=commit, dirty=dirty))
    monkeypatch.setattr(ledger.provenance, "start", lambda: start)
    row = measurement("04_wmma_qk", FIRST)
    base = row.model_dump(include={"run", "time", "gpu", "software", "verdict"})
    base |= {"source": {"commit": COMMIT, "dirty": dirty}, "start": start, "parameters": {}, "stage": "04_wmma_qk"}
    folder = tmp_path / "nvidia-h200"
    for name in ("ablations", "parts"):
        (folder / name).mkdir(parents=True)
    for axis in AXES:
        for level in ablation.AXES[axis].levels:
            fields = {**base, "axis": axis, "level": level.name, "problem": FIRST}
            fields |= {"status": "ok", "reason": "", "samples": row.samples, "cubin": row.cubin}
            store.append(folder / "ablations" / f"{RUN}.jsonl", schema.Ablation.model_validate(fields))
    small = {**base, "problem": SINGLE, "samples": row.samples[0], "cubin": row.cubin}
    del small["verdict"]
    for part in ablation.PARTS:
        fields = {**small, "left_out": part}
        store.append(folder / "parts" / f"{RUN}.jsonl", schema.Part.model_validate(fields))
    ledger.measure(options=Options(data=tmp_path))
    assert ("axes" in measuring, "split" in measuring) == (again, again)


def test_no_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="calls: wanted a positive number, got 0"):
        ledger.time_calls("sdpa", SINGLE, data=tmp_path, calls=0)
