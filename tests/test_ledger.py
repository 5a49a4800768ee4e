"""The ledger: its claims, its rules, and that the committed verdicts follow from the committed records."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from markdown import markdown
from pydantic import ValidationError
from shared import cubin
from synthetic import COMMIT, RUN, measurement, write_synthetic

from flashlab.build import sass
from flashlab.core.arithmetic import calculated
from flashlab.core.errors import DamagedRecordError, FlashlabError, NoDataError, NoGpuError, ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem, suite
from flashlab.experiments import ablation, ledger, rules_log
from flashlab.experiments.evidence import (
    FASTEST,
    FIRST,
    QUANTITIES,
    Entry,
    PendingError,
    Records,
    entries,
    facts,
    find,
)
from flashlab.experiments.ledger import Kind, Range, judge
from flashlab.kernels import peers
from flashlab.kernels.registry import DEAD_ENDS, STAGES, get
from flashlab.measure import ceilings
from flashlab.measure.options import Options
from flashlab.query.statistics import Estimate
from flashlab.record import schema, store
from flashlab.run import gpu

SINGLE = Problem.parse("1x8x512x64")
HOME = "nvidia-h100-80gb-hbm3"
"""The GPU that most claims are about."""
exact = Estimate.exactly


def claimed(low: float, high: float | None = None) -> Range:
    return Range(low=low, high=low if high is None else high)


def test_every_claim_is_read_once_with_its_rule_and_numbers() -> None:
    found = {claim.id: claim for claim in ledger.read()}
    assert len(found) == len(ledger.read()) == 65
    assert {claim.rule for claim in found.values()} == set(ledger.RULES)
    assert found["A16"].numbers == (claimed(2e-3),)
    assert found["B07"].numbers == (claimed(15, 25),)
    assert [str(number) for number in found["E06"].numbers] == ["20", "10–15", "10", "5"]
    assert found["E06"].units == ("%",) * 4
    assert found["B11"].units == ("registers", "KB", "bytes spilled")
    assert [found[name].claimed for name in ("A15", "D08", "A16", "B07")] == ["×6000", "×6–8", "2e-3", "15–25 %"]
    assert found["B10"].numbers == (None,)
    assert len({claim.source.partition(" § ")[0] for claim in found.values()}) == 5


@pytest.mark.parametrize(
    ("rule", "ours", "theirs", "kind"),
    [
        ("near", exact(12), claimed(10), "confirmed"),
        ("near", exact(12.1), claimed(10), "inaccurate"),
        ("near", exact(7.9), claimed(10), "inaccurate"),
        ("near", Estimate(value=11.5, low=11.0, high=11.9), claimed(10), "confirmed"),
        ("near", Estimate(value=12.5, low=11.9, high=13), claimed(10), "undecided"),
        ("near", exact(0), claimed(0), "confirmed"),
        ("near", exact(1), claimed(0), "inaccurate"),
        ("gain", exact(1.6), claimed(1.5), "confirmed"),
        ("gain", exact(1.61), claimed(1.5), "inaccurate"),
        ("gain", exact(1.02), claimed(1.5), "inaccurate"),
        ("gain", exact(0.97), claimed(1.5), "refuted"),
        ("gain", Estimate(value=0.99, low=0.97, high=1.01), claimed(1.5), "inaccurate"),
        ("gain", exact(1.03), claimed(1.05), "confirmed"),
        ("beats", Estimate(value=1.1, low=1.01, high=1.2), None, "confirmed"),
        ("beats", Estimate(value=1.1, low=1.0, high=1.2), None, "undecided"),
        ("beats", Estimate(value=0.9, low=0.8, high=1.0), None, "refuted"),
        ("at_least", exact(150), claimed(150, 200), "confirmed"),
        ("at_least", exact(149), claimed(150, 200), "refuted"),
        ("at_least", Estimate(value=150, low=149, high=151), claimed(150, 200), "undecided"),
        ("at_most", exact(20), claimed(15, 20), "confirmed"),
        ("at_most", exact(20.1), claimed(15, 20), "refuted"),
        ("recomputes", exact(1633), claimed(1723), "refuted"),
        ("recomputes", exact(1720), claimed(1723), "confirmed"),
        ("share", exact(24), claimed(20), "confirmed"),
        ("share", exact(26), claimed(20), "inaccurate"),
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
        "not_comparable": "",
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
        "assumptions": {"shape": "B1 H8 S512 D64", "dtype": "float16"},
        "lines": [3, 7],
        "states": {"gpu": {"text": "H100", "lines": [4]}, "kernel": {"text": "WMMA, 8 warps", "lines": [7, 9]}},
        "why": "It states neither.",
    }


@pytest.mark.parametrize(
    "change", [{"lines": "3 seven"}, {"states": "gpu: H100"}, {"adds": "float16"}, {"adds": "sape: B1 H8 S512 D64"}]
)
def test_what_is_no_claim_is_refused(change: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lines|states|adds"):
        ledger.read(write_claims(tmp_path / "claims.csv", change))


@pytest.mark.parametrize("claim", ledger.read(), ids=lambda claim: claim.id)
def test_a_claim_says_what_is_the_documents_and_what_is_ours(claim: ledger.Claim) -> None:
    number = r"\d+(?:\.\d+)?(?:e-?\d+)?"
    assert claim.quote
    assert len(claim.lines) == len(claim.quote), "a line for each part of the quote"
    assert claim.why or not claim.adds, "a reason for what we add"
    assert claim.gpu, "the model that it is about, stated or added"
    assert claim.numbers
    said = re.findall(number, re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(claim.quote)))
    added = re.findall(number, claim.adds.get("number", ""))
    assert {*re.findall(number, claim.value)} <= {*said, *added}, "numbers of the quote, or called ours"


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
    "fields", [{"quantity": "machine_code", "counts": ["register"]}, {"quantity": "rate", "shap": "1x1x1x64"}]
)
def test_an_entry_that_names_what_does_not_exist_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"counts|shap"):
        Entry.model_validate(fields)


def test_entries_name_what_there_is() -> None:
    known = {*STAGES, *DEAD_ENDS, *peers.PEERS, *ceilings.CEILINGS, FASTEST}
    for entry in (one for claim in entries().values() for one in (claim, *claim.beside)):
        assert entry.quantity in QUANTITIES
        assert {*entry.names} <= known
        assert entry.axis in ("", *ablation.AXES)


def test_what_stands_beside_is_of_the_same_problem() -> None:
    entry = entries()["C07"]
    assert entry.beside[0].problem == entry.problem
    assert entries()["A03"].beside[0].problem.dtype == "bfloat16"


# --- From records to verdicts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up records of the whole ladder on the GPU that most claims are about."""
    folder = tmp_path_factory.mktemp("data")
    write_synthetic(folder, HOME, problems=dict.fromkeys((*suite("standard"), *suite("claims"))))
    return folder


def _add(data: Path, folder: str, *lines: schema.AnyRecord, slug: str = HOME, run: str = RUN) -> None:
    path = data / slug / folder / f"{run}.jsonl"
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


def _one(data: Path, name: str, slug: str = HOME) -> ledger.Verdict:
    claim = next(claim for claim in ledger.read() if claim.id == name)
    return ledger.evaluate(claim, _records(data, slug))


@cache
def _records(data: Path, slug: str) -> Records:
    return Records(slug, data)


def test_a_stages_row_with_the_log_sum_exp_on_is_no_evidence(tmp_path: Path) -> None:
    plain = measurement("00_naive", FIRST).model_copy(update={"lse": False})
    _add(tmp_path, "runs", plain, plain.model_copy(update={"lse": True}), slug="nvidia-h200")
    assert Records("nvidia-h200", tmp_path).measurements == [plain]


def test_every_claim_has_an_entry_and_a_verdict(data: Path) -> None:
    assert entries().keys() == {claim.id for claim in ledger.read()}
    used = {entry.quantity for claim in entries().values() for entry in (claim, *claim.beside)}
    assert used == QUANTITIES.keys()
    found = ledger.verdicts(HOME, data)
    assert [one.id for one in found] == [claim.id for claim in ledger.read()]
    for one in found:
        assert one.reason.endswith(".")
        assert (one.verdict == "pending") <= (not one.numbers)
        assert (one.verdict in ("pending", "needs_hardware")) == bool(one.command)
        for number in one.numbers:
            assert number.low <= number.value <= number.high
        for place in one.records:
            path, _, line = place.rpartition(":")
            assert (data / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_a_rate_comes_with_its_interval_record_and_reason(data: Path) -> None:
    one = _one(data, "B17")
    (number,) = one.numbers
    assert one.verdict == "refuted"
    assert number.low < number.value < number.high
    assert one.starts == 1
    assert "(one start) against 15–20" in one.reason
    assert one.records[0].startswith(f"{HOME}/runs/{RUN}.jsonl:")
    assert one.flat()["interval"] == [number.low, number.high]
    assert (one.measured_on, one.conclusion, one.command) == (HOME, "", "")


def test_nothing_on_record_is_pending_and_says_what_makes_it(tmp_path: Path) -> None:
    write_synthetic(tmp_path, HOME, problems=suite("smoke"))
    one = _one(tmp_path, "B08")
    assert (one.verdict, one.numbers, one.command) == ("pending", (), "flashlab ablate reduction")
    with pytest.raises(PendingError, match=r"^flashlab ablate feed && flashlab bench --shape 16x16x2048x64"):
        find(Records(HOME, tmp_path), entries()["B14"])


def test_a_time_is_judged_on_its_own_gpu_alone(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / HOME, tmp_path / "nvidia-h200")
    (tmp_path / "nvidia-h200" / "CHECKSUMS").unlink()
    for path in (tmp_path / "nvidia-h200").rglob("*.jsonl"):
        path.write_text(path.read_text(encoding="utf-8").replace(HOME, "nvidia-h200"), encoding="utf-8")
    one = _one(tmp_path, "B17", "nvidia-h200")
    assert (one.verdict, one.measured_on) == ("needs_hardware", "nvidia-h200")
    assert [number.verdict for number in one.numbers] == ["refuted"]
    command = "flashlab bench --shape 16x16x2048x64 --stages 06_cp_async --peers none"
    assert f"On an H100, `{command}` makes the record" in one.conclusion
    assert "it is refuted" in one.conclusion
    shutil.copytree(data / HOME, tmp_path / HOME)
    there = ledger.evaluate(
        next(claim for claim in ledger.read() if claim.id == "B17"), Records("nvidia-h200", tmp_path)
    )
    assert (there.verdict, there.measured_on) == ("refuted", HOME), "it appears by itself"


def test_what_hangs_on_what_is_ours_is_not_comparable_whatever_our_number_is(data: Path) -> None:
    for claim in ledger.read():
        if claim.not_comparable:
            one = _one(data, claim.id)
            assert one.verdict == "not_comparable"
            assert one.reason.startswith(claim.not_comparable)
            assert {number.verdict for number in one.numbers} <= {"not_comparable"}
    assert {claim.id for claim in ledger.read() if claim.not_comparable} >= {"A01", "B03", "B04", "C01", "C04", "D05"}


def test_no_verdict_hangs_on_which_of_our_kernels_is_taken() -> None:
    """A verdict does not hang on which kernel or baseline of ours the claim is compared with."""
    records = Records(HOME)
    for claim in ledger.read():
        entry = entries()[claim.id]
        others = [one for one in entry.beside if one.quantity == entry.quantity]
        if claim.id == "A12":  # The document has TMA on a line of its own, so that the rate with it is another target.
            others = []
        if others and not claim.not_comparable:
            kinds = [judge(claim.rule, find(records, one).numbers[0], claim.numbers[0]) for one in (entry, *others)]
            assert len({*kinds}) == 1, f"{claim.id}: {kinds}"


def test_no_verdict_hangs_on_how_many_rows_are_on_record() -> None:
    """A largest of all rows grows with every run, whatever the claim is."""
    growing = {claim.id for claim in ledger.read() if entries()[claim.id].quantity == "spread"}
    assert growing <= {claim.id for claim in ledger.read() if claim.not_comparable}


def test_what_is_said_to_need_hopper_is_held_against_a_kernel_without() -> None:
    (name,) = entries()["B17"].operands
    assert STAGES[name].max_arch is None
    assert "sm_80" in STAGES[name].archs


def test_intervals_are_over_starts_of_one_code(data: Path, tmp_path: Path) -> None:
    """A start of another code takes no part, and two runs of a start count once."""
    shutil.copytree(data, tmp_path / "data")
    for start, (scale, times) in enumerate([(1.0, 2), (1.01, 1), (1.03, 1)]):
        for again in range(times):
            for name, value, us in (("shuffles", 0, 1000.0), ("shared memory, block barriers", 2, 1150.0 * scale)):
                row = _ablation(name, us, REDUCTION=value)
                run = f"2026010{2 + start}T03040{again}Z-0123abc"
                at = schema.Start(boot=f"0000000{start}", at=f"2026-01-0{2 + start}T03:00:00+00:00")
                _add(tmp_path / "data", "ablations", row.model_copy(update={"run": run, "start": at}), run=run)
    one = _one(tmp_path / "data", "B08")
    assert one.starts == 3
    assert len(one.records) == 6
    assert one.numbers[0].value == pytest.approx(16.2, abs=0.5)
    assert one.numbers[0].low < 15.5 < 17.5 < one.numbers[0].high
    assert "start" not in one.reason


@pytest.mark.parametrize(
    ("formula", "value"), [("2 * a + 1", 7), ("(a - 1) / 4", 0.5), ("7 // a", 2), ("a * 0.5", 1.5)]
)
def test_formulas_are_calculated(formula: str, value: float) -> None:
    assert calculated(formula, {"a": 3}) == value


@pytest.mark.parametrize("formula", ["a ** 2", "b + 1", "__import__('os')", "a.real", "'a'"])
def test_a_formula_is_arithmetic_and_no_more(formula: str) -> None:
    with pytest.raises(ValueError, match="wanted numbers and a"):
        calculated(formula, {"a": 3})


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
    one = ledger.evaluate(next(claim for claim in ledger.read() if claim.id == "E05"), Records(HOME, tmp_path / "data"))
    assert [round(number.value) for number in one.numbers] == [20, 29, 31, 60]


def test_a_single_call_is_wall_time(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    row = measurement("sdpa", SINGLE).model_dump()
    fields = {name: row[name] for name in ("run", "time", "gpu", "source", "software", "problem", "name")}
    _add(tmp_path / "data", "calls", schema.Call.model_validate({**fields, "time_us": [24.0, 25.0, 26.0]}))
    one = _one(tmp_path / "data", "C06")
    assert one.numbers[0].value == 25.0
    assert "the kernel itself takes" in one.reason


def test_the_difference_to_a_library_is_bounded_by_both_errors(data: Path) -> None:
    one = _one(data, "A16")
    rows = [row for row in Records(HOME, data).measurements if row.problem == FIRST and row.verdict]
    errors = {row.name: row.verdict.overall_max_error for row in rows if row.status == "ok"}
    stages = max(errors[name] for name in STAGES if name in errors)
    assert one.numbers[0].value == pytest.approx(stages + errors["sdpa"])


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
    assert [round(number.value, 6) for number in used.numbers] == [75.0, pytest.approx(0.096 / 3.35 * 100, rel=1e-6)]
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


def test_a_claim_about_another_chip_shows_what_can_be_shown(data: Path, tmp_path: Path) -> None:
    here = _one(data, "E08")
    assert here.verdict == "needs_hardware"
    assert here.command == "flashlab bench --suite smoke"
    write_synthetic(tmp_path, "nvidia-l4", problems=suite("smoke"))
    there = _one(tmp_path, "E08", "nvidia-l4")
    assert there.verdict in ("confirmed", "refuted")
    assert there.conclusion == ""


def test_arithmetic_is_recomputed(data: Path) -> None:
    values = {name: _one(data, name).numbers[0].value for name in ("A06", "A14", "A15", "B16", "C05", "D07", "D08")}
    assert values == pytest.approx(
        {"A06": 5, "A14": 3.911, "A15": 281.25, "B16": 0.0522, "C05": 1632.7, "D07": 2.4, "D08": 1.5835}, rel=2e-3
    )
    assert all(_one(data, name).verdict == "refuted" for name in ("A14", "A15", "B16", "C05", "D07"))
    assert all(_one(data, name).verdict == "inaccurate" for name in ("A06", "D08"))
    assert all(_one(data, name).starts is None for name in values)


def test_the_machine_code_is_compiled_on_the_spot(data: Path) -> None:
    one = _one(data, "D04")
    assert (one.verdict, one.numbers[0].value) == ("refuted", 99)
    assert "`06_cp_async.cu` for sm_89" in one.reason
    assert _one(data, "B11").numbers[2].value == 0


@pytest.mark.parametrize(("claim", "stage_id"), [("C01", "00_naive"), ("C02", "branch_free"), ("C03", "wmma_no_smem")])
def test_branches_are_those_of_the_kernels_own_code(claim: str, stage_id: str, data: Path) -> None:
    built = cubin(get(stage_id), 64)
    every = sass.mix(built.code, built.entry)["branch_predicated"]
    one = _one(data, claim)
    assert one.numbers[0].value < every, "exits and slow paths are not counted"
    assert f"it has {every}" in one.reason, "and are told"


def test_written_verdicts_are_read_back_and_compared(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    found = ledger.verdicts(HOME, tmp_path / "data")
    path = ledger.write(found, HOME, tmp_path / "data")
    assert ledger.read_verdicts(path) == found
    assert store.verify(HOME, tmp_path / "data") == ()
    assert ledger.differences(found, found) == {}
    changed = (*found[1:], found[0].model_copy(update={"verdict": "confirmed"}))
    assert ledger.differences(found, changed) == {"A01": (found[0], changed[-1])}
    assert ledger.differences(found, found[1:]) == {"A01": (found[0], None)}
    with pytest.raises(NoDataError, match="flashlab claims --write"):
        ledger.read_verdicts(tmp_path / "none.json")
    path.write_text('{"id": 1}', encoding="utf-8")
    with pytest.raises(DamagedRecordError, match="flashlab claims --write"):
        ledger.read_verdicts(path)
    with pytest.raises(DamagedRecordError, match=r"wanted verdicts in .*directory.*; `flashlab claims --write`"):
        ledger.read_verdicts(tmp_path)


def test_tables_name_every_claim_and_contradiction(data: Path) -> None:
    found = ledger.verdicts(HOME, data)
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
        ledger.enqueue.measure([SINGLE], Options(data=tmp_path), library="sdpa")
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
        assert options["options"].resume
        at = {problem: [name for name in names if options["only"](problem, name)] for problem in problems}
        asked.setdefault("runs", []).append(at)
        return tmp_path / "run"

    monkeypatch.setattr(ledger.bench, "run", run)
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(slug="nvidia-h200"))
    monkeypatch.setattr(ledger.ablation, "measure", lambda axes, **_: asked.update(axes=axes) or tmp_path / "axes")
    monkeypatch.setattr(ledger.ablation, "split", lambda ids, **_: asked.update(split=ids) or tmp_path / "split")
    monkeypatch.setattr(ledger.enqueue, "measure", lambda *_, **__: (tmp_path / "calls", ()))
    return asked


def test_what_judges_the_claims_is_measured_in_turn(measuring: dict[str, Any], tmp_path: Path) -> None:
    made = ledger.measure(options=Options(data=tmp_path, resume=True))
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
    ledger.measure(options=Options(data=tmp_path, resume=True), stages=["16_ones_column"])
    ladder, dead = measuring["runs"]
    assert [name for name in ladder[FIRST] if name in STAGES] == ["16_ones_column"]
    assert "00_naive" in dead[FIRST]


# --- The rules' history -----------------------------------------------------------------------------------------------


def test_the_log_has_every_claim_and_marks_what_changed_after_its_result() -> None:
    log = rules_log.read()
    assert log.claims.keys() == {claim.id for claim in ledger.read()}
    spread = log.claims["A17"]
    first = spread.changes[0]
    assert first.subject.startswith("Judge a spread by what 19 of 20 rows keep")
    assert (first.before, first.after) == ("refuted", "confirmed")
    assert first.after_its_result
    branches = log.claims["C01"].changes[0]
    assert (branches.date[:10], branches.before, branches.after) == ("2026-11-21", "inaccurate", "confirmed")
    assert spread.changed_after_its_result
    early = first.model_copy(update={"before": "pending"})
    assert not rules_log.History(written=spread.written, changes=(early,)).changed_after_its_result


@pytest.mark.skipif(not rules_log.whole_history(), reason="needs git and a clone with every commit")
def test_the_log_is_what_git_says() -> None:
    """A commit that changes a rule is logged by a later one, since no commit knows its own date beforehand."""
    said = [json.loads(rules_log.as_json(rules_log.generate(at))) for at in ("HEAD", "HEAD~1")]
    assert json.loads(rules_log.LOG.read_text(encoding="utf-8")) in said, "`flashlab claims --write` writes it anew"


def test_a_damaged_log_says_what_makes_it(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("[]", encoding="utf-8")
    for name in ("log.json", "none.json"):
        with pytest.raises(DamagedRecordError, match="flashlab claims --write"):
            rules_log.read(tmp_path / name)


def test_the_page_says_what_changed(data: Path) -> None:
    table = html.unescape(ledger.table([_one(data, "A17")]))
    assert "Its rule was changed after a result was known, and its verdict with it." in table
    assert "known." in html.unescape(ledger.table([_one(data, "A15")]))
    assert "refuted before, confirmed after" in table
    (result,) = ledger.as_rows([_one(data, "A17")])
    wanted = {"quote", "lines", "assumptions", "rule", "history", "verdict", "value", "interval", "starts", "records"}
    assert result.keys() >= wanted | {"reason"}
