"""Tables: how numbers read, that Markdown survives its cells, and that CSV lines say what the records say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from shared import read_run
from synthetic import RUN, checks_header, measurement, profile, write_synthetic

from flashlab.build.symbols import Frame
from flashlab.core.errors import NoDataError
from flashlab.core.inputs import KINDS
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.measure import timer
from flashlab.query import contests, predictions, roofline, select
from flashlab.query.contests import Accuracy, AgainstPeers, Contest, percent_of_peak
from flashlab.record import store
from flashlab.record.checks import CheckRow, Compared, EmulatorVerdict
from flashlab.record.schema import Measurement, StageCounters, Start, Status, Verdict, cycles_per_score
from flashlab.run.emulator import Actor, Counter, Finding, Place, Report
from flashlab.show import tables, trial
from flashlab.show.tables import table as table_of

FIRST = Problem.parse(FIRST_SHAPE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (6.2164, "6.22"),
        (39.24, "39.2"),
        (133.97, "134"),
        (99.97, "100"),
        (44220.0, "44,220"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str) -> None:
    assert tables.number(value) == text


def test_what_held_a_clock_back_is_named_in_words() -> None:
    every = timer.throttle_reasons(0x4 | 0x8 | 0x20 | 0x40 | 0x80)
    assert tables.held_back(every) == "power limit, hardware slowdown, temperature, power brake"
    assert tables.held_back(()) == "nothing"


def test_a_table_has_a_cell_for_every_column() -> None:
    table = tables.markdown(("name", "a | b"), [("x|y", 1.5), ("z", None)])
    lines = table.strip().splitlines()
    assert len(lines) == 4
    assert all(line.replace(r"\|", "").count("|") == 3 for line in lines)
    assert lines[-1].endswith("| – |")


def test_rows_without_a_time_say_why() -> None:
    wrong_type = measurement("00_naive", Problem.parse(FIRST_SHAPE, dtype="bfloat16"))
    result = tables.untimed([wrong_type, measurement("00_naive", FIRST)])
    assert wrong_type.reason in result
    assert tables.untimed([measurement("00_naive", FIRST)]) == ""


def test_rates_give_each_stage_its_gain_over_its_parent() -> None:
    rows = [measurement(stage_id, FIRST) for stage_id in registry.STAGES]
    table = tables.rates(rows)
    assert all(stage_id in table for stage_id in registry.STAGES)


def test_every_gpu_that_runs_were_made_on_is_listed(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path, problems=[FIRST])
    one = read_run(path).measurements[0]
    other = one.model_copy(
        update={"gpu": one.gpu.model_copy(update={"fingerprint": "0ther0ther00"}), "run": "20260109T030405Z-0123abc"}
    )
    store.append(path.with_name(f"{other.run}.jsonl"), other)
    store.write_checksums(one.gpu.slug, tmp_path)
    table = tables.chips(select.load(one.gpu.slug, tmp_path), tmp_path)
    first, second = table.strip().splitlines()[2:]
    num_rows = len(read_run(path).records)
    assert first.startswith(f"| `{one.gpu.fingerprint}` | {select.date(one.run)} | ")
    assert "**the ladder**" in first
    assert first.endswith(f" | 1 | {num_rows} |")
    assert second == "| `0ther0ther00` | 2026-01-09 | – | 1 | 1 |"


def test_what_was_rented_and_its_cost_stand_beside_the_gpu(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path, problems=[FIRST])
    before = tables.chips(select.load(path.parents[1].name, tmp_path), tmp_path)
    assert "rented" not in before
    assert "US$" not in before
    run = "20260109T030405Z-0123abc"
    start = Start(boot="0123abcd", at="2026-01-09T03:00:00Z", instance="p5.48xlarge", usd_per_gpu_hour=3.0)
    one = read_run(path).measurements[0].model_copy(update={"run": run, "start": start})
    for time in ("2026-01-09T03:14:05Z", "2026-01-09T03:34:05Z"):  # 10 and 30 minutes after the run began
        store.append(path.with_name(f"{run}.jsonl"), one.model_copy(update={"time": time}))
    store.write_checksums(path.parents[1].name, tmp_path)
    (line,) = tables.chips(select.load(path.parents[1].name, tmp_path), tmp_path).strip().splitlines()[2:]
    assert " | p5.48xlarge at 3.00 US$/GPU-hour | " in line
    assert line.endswith(" | 1.50 |")


def test_costs_are_the_records(tmp_path: Path) -> None:
    row = measurement("00_naive", FIRST)
    burst, sustained = row.samples_of(), row.samples_of("sustained")
    assert burst is not None
    assert sustained is not None
    assert sustained.conditions is not None
    table = tables.costs([row])
    for samples in (burst, sustained):
        cycles = cycles_per_score(samples, FIRST, row.gpu.sm_count)
        assert cycles is not None
        assert f" {tables.number(cycles)} " in table
        assert f" {tables.number(median(samples.call_clock_mhz), 4)} " in table
    energy = sustained.conditions.energy_j_per_call
    assert energy is not None
    assert f" {tables.number(energy * 1e3)} |" in table
    # An older record has no clock of the calls, and so no cycles: hollow, not nought.
    old = [samples.model_copy(update={"call_clock_mhz": ()}) for samples in row.samples[:1]]
    line = tables.costs([row.model_copy(update={"samples": tuple(old)})]).splitlines()[-1]
    assert line.count("| –") == 6


def _took(name: str, time_us: float, **changes: Any) -> Measurement:
    """A row whose bursts and sustained calls took so long each, at no known clock."""
    row = measurement(name, FIRST)
    taken = {"time_us": (time_us,), "sm_clock_mhz": (), "call_clock_mhz": ()}
    return row.model_copy(update={"samples": tuple(one.model_copy(update=taken) for one in row.samples), **changes})


def test_ratios_are_those_of_the_contests() -> None:
    ours, theirs = _took("05_wmma", 100.0), _took("sdpa_cudnn", 130.0)
    contest = Contest(regime="burst", stage=ours, peer=theirs)
    none = AgainstPeers(
        problem=FIRST, run="r", dirty=False, burst=None, reason="no library has a time in that run",
    )  # fmt: skip
    clocked = (
        row.model_copy(
            update={"samples": tuple(one.model_copy(update={"call_clock_mhz": (1700.0,)}) for one in row.samples)}
        )
        for row in (ours, theirs.model_copy(update={"lse": True}))
    )
    stage, peer = clocked
    known = Contest(regime="burst", stage=stage, peer=peer, with_lse=_took("05_wmma", 104.0))
    shares = [tables.percent(percent_of_peak(row) or 0.0) for row in (stage, peer)]
    won, result, lost = table_of(
        tables.AGAINST, [replace(none, burst=contest, reason=""), replace(none, burst=known, reason=""), none]
    ).splitlines()[-3:]
    rates = [tables.number(FIRST.tflops(time_us)) for time_us in (100.0, 130.0)]
    sides = "`05_wmma` {} | {} | cuDNN {} | {} |".format
    assert won.endswith(f"| ×1.30 | {sides(rates[0], '–', rates[1], '–')} – | – | – | – | – |")
    assert result.endswith(f"| ×1.30 | {sides(rates[0], shares[0], rates[1], shares[1])} ×1.25 | – | – | – | – |")
    assert "no library has a time" in lost
    assert lost.count("| –") == 9


def _on(kind: str, shape: str = FIRST_SHAPE, **what: str) -> Problem:
    return Problem.parse(shape, inputs=kind, **what)


def _lines(table: str) -> dict[str, list[str]]:
    """Cells of a table's rows, by the first."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def _faced(problem: Problem, ratio: float, sustained: float | None = None) -> AgainstPeers:
    def contest(times: float) -> Contest:
        return Contest(regime="burst", stage=_took("05_wmma", 100.0), peer=_took("fa3", 100.0 * times))

    return AgainstPeers(
        problem=problem, run=RUN, dirty=False, burst=contest(ratio),
        sustained=contest(sustained) if sustained else None,
    )  # fmt: skip


def test_ratios_over_the_libraries_begin_with_how_many_are_above_one() -> None:
    causal = replace(FIRST, mask="causal")
    text = tables.against([_faced(FIRST, 1.2, sustained=1.1), _faced(causal, 0.9)])
    first, second = text.splitlines()
    assert first == (
        "In bursts the best stage is faster than the best library at 1 of 2 problems: ratios lie between "
        f"×0.900 ({causal.label}, over FlashAttention-3) and ×1.20 ({FIRST.label}, over FlashAttention-3)."
    )
    assert second.startswith("Under sustained load the best stage is faster than the best library at 1 of 1 problems")
    assert tables.against([]) == ""


def test_of_two_sessions_the_one_with_fewer_rows_is_named() -> None:
    earlier, later = "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    rows = [measurement(name, FIRST, run=earlier) for name in ("00_naive", "01_coalesced")]
    last = measurement("16_ones_column", FIRST, run=later)
    assert tables.elsewhere_note([*rows, last]) == (
        "In other sessions than the last stage, perhaps on another GPU: all but `16_ones_column`."
    )
    assert tables.elsewhere_note([rows[0], last]) == (
        "In another session than the last stage, perhaps on another GPU: `00_naive`."
    )
    assert tables.elsewhere_note([last]) == ""


def test_ratios_by_kind_begin_with_the_worst_and_have_trained_beside_normal() -> None:
    causal = {"mask": "causal", "dtype": "bfloat16"}
    layers = _faced(FIRST, 1.02).burst
    assert layers is not None
    found = [
        _faced(_on("normal"), 1.2),
        _faced(_on("normal", **causal), 1.1, sustained=1.05),
        _faced(_on("zeros"), 1.15),
        _faced(_on("scale10"), 0.18),
        replace(_faced(_on("trained"), 1.02), burst=replace(layers, worst_ratio=0.96, worst_layer=3)),
        _faced(_on("rising", **causal), 1.3, sustained=1.2),
        _faced(_on("sink_first", "4x16x8192x64"), 0.1),  # of no column
    ]
    table = tables.against_inputs(found)
    assert list(_lines(table)) == ["`scale10`", "`trained`", "`normal`", "`zeros`", "`rising`"]
    header = [cell.strip() for cell in table.splitlines()[0].strip("| ").split(" | ")]
    assert header[0] == "B16 H16 S2048, burst"
    assert header[1:5] == ["D64 full float16", "D64 causal float16", "D64 full bfloat16", "D64 causal bfloat16"]
    assert _lines(table)["`normal`"] == ["×1.20", "–", "–", "×1.10", *["–"] * 4]
    assert _lines(table)["`scale10`"][0] == "**×0.180**"
    assert _lines(table)["`trained`"][0] == "**×1.02,<br>×0.960 on<br>layer 3**"
    assert _lines(tables.against_inputs(found, "sustained")) == {
        "`normal`": [*["–"] * 3, "×1.05", *["–"] * 4],
        "`rising`": [*["–"] * 3, "×1.20", *["–"] * 4],
    }
    longer = tables.against_inputs(found, problems=contests.LONGER)
    assert longer.startswith("| B4 H16 S8192, burst | D64 full float16 |")
    assert _lines(longer) == {"`sink_first`": ["**×0.100**", *["–"] * 7]}
    assert table.endswith(f"\nEvery ratio is for `{layers.stage.name}`.\n")
    newer = replace(layers, stage=layers.stage.model_copy(update={"name": "17_around_the_loop"}))
    idle = [replace(one, sustained=one.sustained and replace(one.sustained, left_out=("fa4",))) for one in found]
    assert "†" not in tables.against_inputs(idle)
    assert "† The run left out FlashAttention-4" in tables.against_inputs(idle, "sustained")
    assert tables.against_inputs([*found, replace(_faced(_on("steps"), 1.0), burst=newer)]).endswith(
        f"\n6 ratios are for `{layers.stage.name}`, and 1 is for `17_around_the_loop`, on `steps`: two kinds may "
        "differ because their stages do.\n"
    )
    with pytest.raises(NoDataError, match="flashlab bench --suite inputs"):
        tables.against_inputs(found[:2])


def test_errors_by_kind_are_multiples_of_the_references() -> None:
    def of(kind: str, **errors: tuple[float, float]) -> Accuracy:
        named = {{"stage": "05_wmma", "other": "06_cp_async"}.get(name, name): pair for name, pair in errors.items()}
        return Accuracy(problem=_on(kind), run=RUN, reference="fa4", errors=named)

    found = [
        of("normal", stage=(1.1e-4, 2e-3), other=(1e-4, 1e-3), fa4=(1e-4, 2e-3)),
        of("one_hot", stage=(1e-6, 1e-5), fa4=(0.0, 0.0)),
        of("zeros", stage=(0.0, 0.0), fa4=(0.0, 0.0)),
        replace(of("zeros", stage=(3e-5, 1e-4), fa4=(2e-5, 2e-4)), problem=_on("zeros", mask="causal")),
    ]
    missed, _, rest = tables.accuracy(found).partition("\n\n")
    assert missed == (
        "The target of `05_wmma` is at most 1.1 times the reference's RMS error and 1.25 times its largest, on each "
        f"kind of inputs; 3 of {len(KINDS)} kinds are on record. Missed in float16 on `one_hot` (RMS and largest) and "
        "`zeros` (RMS)."
    )
    assert "met on these" in tables.accuracy([found[0], of("zeros", stage=(0.0, 0.0), fa4=(0.0, 0.0))])
    table, _, whole = rest.partition("<details")
    assert table.splitlines()[0] == (
        "| float16: error over that of FlashAttention-4, RMS · largest | `05_wmma` | FlashAttention-4 |"
    )
    assert _lines(table) == {
        "`one_hot`": ["∞ · ∞", "×1.00 · ×1.00"],
        "`zeros`": ["×1.50 · ×1.00", "×1.00 · ×1.00"],
        "`normal`": ["×1.10 · ×1.00", "×1.00 · ×1.00"],
    }
    # What was checked on one kind alone does not stand there.
    assert "06_cp_async" not in whole
    assert "| `normal` | D64 full | `05_wmma` | 1.10e-04 | ×1.10 | 2.00e-03 | ×1.00 |" in whole
    with pytest.raises(NoDataError, match="flashlab bench --suite inputs"):
        tables.accuracy(found[:1])


def test_profiles_name_what_warps_waited_for() -> None:
    active = ".avg.pct_of_peak_sustained_active"
    metrics = {f"sm__pipe_tensor_cycles_active{active}": 61.0}
    samples = {"gmma": 3, "made_up": 1}
    line = table_of(tables.PROFILES, [profile("05_wmma", FIRST, metrics=metrics, samples=samples)]).splitlines()[-1]
    assert "61.0 %" in line
    assert "GMMA 75 %, Made Up 25 %" in line
    assert line.count("| –") == 4


def test_traffic_sets_measured_bytes_beside_counted_ones() -> None:
    counted = FIRST.compulsory_bytes
    metrics = {"dram__bytes_read.sum": 1.5 * counted, "dram__bytes_write.sum": 0.5 * counted}
    line = table_of(tables.TRAFFIC, [profile("05_wmma", FIRST, metrics=metrics)]).splitlines()[-1]
    assert f"| `05_wmma` | {tables.number(counted / 1e6)} | {tables.number(2 * counted / 1e6)} | ×2.00 |" in line
    in_l2 = roofline.l2_bytes(FIRST, 64)
    assert line.endswith(f"| {tables.number(in_l2 / 1e6)} | – | – |")


def test_occupancy_names_what_holds_it_back() -> None:
    metrics = {
        "launch__occupancy_limit_registers": 3.0,
        "launch__occupancy_limit_shared_mem": 2.0,
        "launch__occupancy_limit_warps": 2.0,
        "launch__block_size": 256.0,
        "launch__registers_per_thread": 80.0,
        "sm__warps_active.avg.peak_sustained": 64.0,
    }
    line = table_of(tables.OCCUPANCY, [profile("05_wmma", FIRST, metrics=metrics)]).splitlines()[-1]
    assert "| `05_wmma` | threads | 80.0 | 25.0 % | – |" in line, "shared memory follows what else holds back"
    alone = metrics | {"launch__occupancy_limit_warps": 4.0}
    line = table_of(tables.OCCUPANCY, [profile("05_wmma", FIRST, metrics=alone)]).splitlines()[-1]
    assert "| `05_wmma` | shared memory | 80.0 |" in line


def test_hot_lines_link_the_stage_and_name_the_states() -> None:
    found = [profile("05_wmma", FIRST), profile("06_cp_async", FIRST)]
    text = tables.hot_lines(found, pages="stages/")
    first = text.splitlines()[2]
    assert first.startswith("| [`05_wmma`](stages/05_wmma.md) |")
    assert "05_wmma.cu:7" in first
    assert "100 %" in first
    assert "Wait 60 %, Short Scoreboard 30 %, Selected 10 %" in first
    assert first.count(" | ") == 3  # the source's bar is no column
    with pytest.raises(NoDataError, match="traced"):
        tables.hot_lines([found[0].model_copy(update={"lines": ()})])


def test_csv_lines_hold_every_sample_and_state() -> None:
    row = measurement("00_naive", FIRST)
    lines = tables.measurement_lines([row])
    assert [(line["regime"], line["cache"]) for line in lines] == [(s.regime, s.cache) for s in row.samples]
    assert {line["commit"] for line in lines} == {row.source.commit}
    samples = tables.sample_lines([row])
    assert [line["time_us"] for line in samples] == pytest.approx([t for s in row.samples for t in s.time_us], rel=1e-6)


# --- what the emulator says ---


def _place(folder: Path, line: int, name: str = "kernel.cu") -> Place:
    return Place((Frame(folder / name, line),))


def _counter(place: Place, *, space: str = "shared", access: str = "read", passes: int, ideal: int) -> Counter:
    waves = (passes, ideal) if space == "shared" else (0, 0)
    sectors = (passes, ideal) if space == "global" else (0, 0)
    return Counter(
        place=place,
        space=space,
        access=access,
        kind="plain",
        bytes=4,
        requests=2,
        wavefronts=waves[0],
        ideal_wavefronts=waves[1],
        sectors=sectors[0],
        ideal_sectors=sectors[1],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernel.cu").write_text("a[i] = x | y;\nb[i] = a[i * 8];\n", encoding="utf-8")
    (tmp_path / "edited.cu").write_text("// a line more\na[i] = x | y;\nb[i] = a[i * 8];\n", encoding="utf-8")
    return tmp_path


def test_a_line_keeps_its_row_when_an_edit_moves_it(folder: Path) -> None:
    before = Report(
        status="ok",
        message="",
        seconds=1,
        counters=(
            _counter(_place(folder, 1), access="write", passes=4, ideal=4),
            _counter(_place(folder, 2), passes=10, ideal=8),
            _counter(_place(folder, 2), passes=22, ideal=8),
            _counter(_place(folder, 2), space="global", passes=3, ideal=2),
        ),
    )
    after = Report(
        status="ok", message="", seconds=1, counters=(_counter(_place(folder, 3, "edited.cu"), passes=16, ideal=16),)
    )
    table = trial.conflicts({"before": before, "after": after}).splitlines()
    assert len(table) == 2 + 2 + 1
    assert "| 32 | ×2.0 | 16 | ×1.0 |" in table[3]
    assert table[2].endswith("| 4 | ×1.0 | – | – |")
    assert table[-1].startswith("| total |")
    assert "a&#91;i&#93; = x &#124; y;" in table[2]
    assert "×1.5" in trial.sectors({"before": before})
    assert "global memory" in trial.sectors({"after": after})
    assert trial.conflicts({"gone": None}) == trial.NO_REPORT


def test_findings_quote_both_lines_and_say_when_there_are_none(folder: Path) -> None:
    first = Actor(thread=3, block=0, access="write", place=_place(folder, 1))
    second = Actor(thread=40, block=0, access="read", place=_place(folder, 2))
    found = Finding(
        kind="race",
        space="shared",
        array="",
        offset=0,
        bytes=4,
        count=1200,
        block=(0, 0, 0),
        first=first,
        second=second,
    )
    table = trial.findings(Report(status="ok", message="", seconds=1, findings=(found,)))
    assert "**race**, shared memory, 1,200 times | thread\N{NO-BREAK SPACE}3 writes |" in table
    assert '<code class="place">kernel.cu:1</code><br><code>a&#91;i&#93; = x &#124; y;</code>' in table
    assert '<code class="place">kernel.cu:2</code><br><code>b&#91;i&#93; = a' in table
    assert "found nothing" in trial.findings(Report(status="ok", message="", seconds=1))
    assert "up to the point where" in trial.findings(Report(status="timeout", message="", seconds=1))
    assert trial.findings(None) == trial.NO_REPORT


def test_counters_beside_nsight_computes_tell_equal_from_near(folder: Path) -> None:
    report = Report(
        status="ok",
        message="",
        seconds=1,
        counters=(
            _counter(_place(folder, 1), passes=8, ideal=8),
            _counter(_place(folder, 2), space="global", passes=6, ideal=2),
        ),
    )
    line = StageCounters(
        stage="00_naive",
        shape="1x1x64x64",
        gpu="GPU",
        commit="unknown",
        dirty=False,
        metrics={
            "smsp__sass_inst_executed_op_shared_ld.sum": 2,
            "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 4,
            "smsp__sass_inst_executed_op_shared_st.sum": 0,
            "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": 0,
            "smsp__sass_inst_executed_op_global_ld.sum": 2,
        },
    )
    counted = trial.counted(report, line)
    assert counted == {"shared loads": (2, 2, 8, 4)}  # no metric for global sectors, and no stores at all
    assert "| 2 | 2 | equal | wavefronts | 8 | 4 | ×2.00 |" in str(trial.Counted(compared={"00_naive": counted}))


def test_runs_on_the_cpu_are_summed_up_a_stage() -> None:
    rows = [
        CheckRow(
            stage="00_naive",
            problem=FIRST,
            layout="contiguous",
            status=status,
            reason=reason,
            verdict=None,
            schedule=schedule,
            findings=("race",) if reason else (),
        )
        for status, reason, schedule in (("ok", "", "ascending"), ("wrong", "race in shared memory", "descending"))
    ]
    table = str(trial.CpuCheck(rows=tuple(rows)))
    assert "| `00_naive` | ascending, descending | 2 | 1 | 1 |" in table
    assert f"| `00_naive` | {FIRST.label} | descending | race in shared memory |" in table


def test_chip_and_emulator_that_disagree_are_named() -> None:
    passed = Verdict(passed=True, reason="", max_abs_error=1e-4, max_abs_limit=1e-3)
    apart = Verdict(passed=False, reason="max abs error", max_abs_error=2e-3, max_abs_limit=1e-3)
    asked = (
        ("05_wmma", EmulatorVerdict(status="ok", reason="", shape="a", verdict=passed, agreement=passed)),
        ("05_wmma", EmulatorVerdict(status="wrong", reason="apart", shape="b", verdict=passed, agreement=apart)),
        (
            "06_cp_async",
            EmulatorVerdict(status="crashed", reason="deadlock", shape="1x2x1x64", verdict=None, agreement=None),
        ),
    )
    header = checks_header()
    lines = [
        Compared(stage=stage, problem=FIRST, status="ok", emulator=emulator, header=header) for stage, emulator in asked
    ]
    table = trial.agreement(lines)
    assert "| `05_wmma` | 2 | 2 | 2 | 1 | 200 % |" in table
    assert "| `05_wmma` | b | apart |" in table
    assert "| `06_cp_async` | 1 | 1 | 0 | 0 | – |" in table
    assert "| `06_cp_async` | 1x2x1x64 | deadlock |" in table


def test_every_stage_has_its_newest_check_with_run_and_commit() -> None:
    def line(run: str, status: Status = "ok") -> Compared:
        reason = "" if status == "ok" else "made up"
        return Compared(stage="00_naive", problem=FIRST, status=status, reason=reason, header=checks_header(run))

    lengths = {"00_naive": (line("20260102T030405Z-0123abc"), line("20260102T030405Z-0123abc", "wrong"))}
    drawn = {"05_wmma": (line("20260103T030405Z-89abcde"), line("20260103T030405Z-89abcde", "unsupported"))}
    stages = ("00_naive", "05_wmma", "16_ones_column")
    rows = [(name, lengths.get(name, ()), drawn.get(name, ())) for name in stages]
    naive, wmma, none = tables.table(tables.CHECKS, rows).splitlines()[2:]
    assert f"1, such as `00_naive` at {FIRST.label}: made up" in naive
    assert re.search(r"\| 2 \| 1 \| 0 \| [^|]+ \| `20260102T030405Z-0123abc` \| – \|", naive)
    assert wmma.endswith("| 2 | 1 | 1 | 0 | `20260103T030405Z-89abcde` |")
    assert none.count("–") == 10


def test_a_prediction_is_scored_by_how_far_outside_its_range_it_lies() -> None:
    stage = registry.STAGES["12_persistent"]
    low = stage.expected[0].low
    of = {
        value: predictions.Scored(stage=stage, expected=stage.expected[0], measured=value)
        for value in (1.1 * low, 0.9 * low, low)
    }
    assert [tables.outcome(one) for one in of.values()][1:] == ["10 % below", "inside"]
    nothing = predictions.Scored(stage=stage, expected=stage.expected[0], measured=None)
    assert tables.outcome(nothing) == "not on record"
    text = tables.predictions([*of.values(), nothing])
    for family in ("ladder", "all"):
        assert f"| {family} | 3 | 1 | 1 | 1 |" in text
    units = {expected.of: tables._range(replace(nothing, expected=expected)) for expected in stage.expected}
    assert all(text.endswith(" TFLOP/s") == (of == "tflops") for of, text in units.items())


def test_a_predicted_time_is_scored_as_a_time() -> None:
    """In the unit of its words, of which its range is; less is faster."""
    of_time = [(stage, one) for stage in registry.DECODE.values() for one in stage.expected if one.of == "time_us"]
    for stage, one in of_time:
        assert re.search(rf"\b{one.low:g}(\.0)? to {one.high:g}(\.0)?\b", one.words), f"{stage.id}: {one.words}"
    stage, one = next(pair for pair in of_time if pair[1].high == 13.5)
    slow, fast = (predictions.Scored(stage=stage, expected=one, measured=value) for value in (27.0, 0.5 * one.low))
    text = tables.predictions([slow, fast])
    assert f"to 13.5 µs | 27.0 µs | {tables.outcome(slow)} |" in text
    assert tables.outcome(slow) == "100 % above"
    assert tables.outcome(fast) == "50 % below"
    assert (fast.side, slow.side) == ("faster", "slower")
    assert "| decoding | 2 | 0 | 1 | 1 |" in text


def test_a_predicted_number_at_another_problem_than_the_first_says_which() -> None:
    stage = registry.STAGES["12_persistent"]
    full, causal = (
        tables.scored([predictions.Scored(stage=stage, expected=one, measured=None)])
        for one in (replace(stage.expected[0], mask="full"), replace(stage.expected[0], mask="causal"))
    )
    assert full == f"“{stage.expected[0].words}” → –, not on record"
    assert causal == f"“{stage.expected[0].words}” (causal) → –, not on record"


def test_a_predicted_ratio_is_of_two_rows_of_one_run(tmp_path: Path) -> None:
    stage = registry.STAGES["02_half2"]
    assert stage.expected[0].of == "ratio"
    parent = stage.parent or ""
    for run, names, seed in (
        ("20260101T030000Z-0000abc", (stage.id, parent), 1),
        ("20260102T030000Z-0123abc", (stage.id,), 2),
    ):
        path = tmp_path / "nvidia-h200" / "runs" / f"{run}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        for name in names:
            store.append(path, measurement(name, FIRST, run=run, seed=seed))
    shown = select.load("nvidia-h200", tmp_path)
    (one,) = predictions.scores(shown, [stage])
    both = "20260101T030000Z-0000abc"
    rates = [select.rate(measurement(name, FIRST, run=both, seed=1)) or 0.0 for name in (stage.id, parent)]
    assert one.measured == pytest.approx(rates[0] / rates[1])


def test_a_prediction_is_scored_in_the_state_that_it_is_of() -> None:
    stage = registry.DECODE["d12_paged_ends"]
    shown = select.load("nvidia-h200")
    for one in predictions.scores(shown, [stage]):
        assert one.expected.cache == "rotating"
        row, _ = predictions.pair(shown, one.expected.problem, stage.id, stage.id, cache="rotating")
        assert one.measured is not None
        assert one.measured == select.median_us(row, cache="rotating") != select.median_us(row)
        assert "rotating K and V) →" in tables.scored([one])


def test_few_operations_a_byte_put_a_problem_under_the_memorys_roof(tmp_path: Path) -> None:
    for shape, bound in (("32x8x128x64", "(memory)"), (FIRST_SHAPE, " % |")):
        write_synthetic(tmp_path / shape, problems=[Problem.parse(shape)])
        headings, _, placed = tables.placement(select.load("nvidia-h200", tmp_path / shape)).splitlines()
        names = headings.strip("| ").split(" | ")
        assert len(set(names)) == len(names), "which side a column is of"
        assert bound in placed
        assert ("(memory)" in placed) is (bound == "(memory)")
