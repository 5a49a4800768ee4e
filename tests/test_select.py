"""Which rows the report shows, in which order, and which library is the fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import measurement, write_checks, write_synthetic

from flashlab.core.inputs import KINDS
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.query import contests, select
from flashlab.query.rows import sessions
from flashlab.record import provenance, schema, store
from flashlab.record.checks import CheckRow
from flashlab.show import charts, explorer, tables

FIRST = Problem.parse(FIRST_SHAPE)
GPU = "nvidia-h200"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_synthetic(tmp_path, GPU)
    return tmp_path


def test_a_later_run_of_one_stage_does_not_hide_the_ladder(data: Path) -> None:
    before = select.load(GPU, data).rows(FIRST)
    later = "20990101T000000Z-0123abc"
    store.append(data / GPU / "runs" / f"{later}.jsonl", measurement("00_naive", FIRST, run=later))
    assert select.load(GPU, data).rows(FIRST) == before


def test_a_later_whole_run_beside_a_library_replaces_the_earlier(data: Path) -> None:
    before, later = select.load(GPU, data).rows(FIRST), "20990101T000000Z-4567def"
    path = data / GPU / "runs" / f"{later}.jsonl"
    for stage_id in registry.STAGES:
        store.append(path, measurement(stage_id, FIRST, run=later, seed=5))
    assert select.load(GPU, data).rows(FIRST) == before, "the last kernel and the libraries must be of one session"
    fastest = select.fastest_peer(before)
    assert fastest is not None
    store.append(path, fastest.model_copy(update={"run": later}))
    shown = select.load(GPU, data)
    assert {row.run for row in shown.rows(FIRST) if row.kind == "stage"} == {later}
    assert {row.kind for row in select.elsewhere(shown.rows(FIRST))} == {"peer"}
    assert shown.newest == later


def test_the_session_with_the_highest_rung_is_shown_and_others_fill_it_in(tmp_path: Path) -> None:
    """What most readers compare is the last kernel with the libraries: those two must be of one session."""
    whole, last, foot = "20260101T030000Z-0000abc", "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    lower, top = ("14_stale_max", "15_renormalize"), "16_ones_column"
    assert [registry.STAGES[name].parent for name in (lower[1], top)] == list(lower)
    _write(tmp_path, whole, *(_timed(name, FIRST, whole, 20.0) for name in ("00_naive", *lower, "fa4", "sdpa")))
    _write(tmp_path, last, *(_timed(name, FIRST, last, 10.0) for name in (lower[1], top, "fa4")))
    _write(tmp_path, foot, _timed("00_naive", FIRST, foot, 30.0))
    rows = select.load(GPU, tmp_path).rows(FIRST)
    assert {row.name: row.run for row in rows} == {
        "00_naive": foot,
        lower[0]: whole,
        lower[1]: last,
        top: last,
        "fa4": last,
        "sdpa": whole,
    }
    assert [row.name for row in select.elsewhere(rows)] == ["00_naive", lower[0], "sdpa"]
    by_name = {row.name: row for row in rows}
    assert select.parent_of(by_name[lower[1]], rows) is None  # of another session
    assert select.parent_of(by_name[top], rows) == by_name[lower[1]]


def test_a_problem_that_the_last_rung_was_not_timed_at_is_told_apart(tmp_path: Path) -> None:
    run, small = "20260101T030000Z-0000abc", Problem.parse("1x8x512x64")
    lower, top = list(registry.STAGES)[-2:]
    timed = (_timed(name, problem, run, 10.0) for name, problem in ((lower, FIRST), (top, FIRST), (lower, small)))
    _write(tmp_path, run, *timed)
    shown = select.load(GPU, tmp_path)
    assert set(shown.problems) == {FIRST, small}
    assert set(shown.with_last_rung()) == {FIRST}


def test_a_session_with_older_code_of_the_last_rung_is_not_shown(tmp_path: Path) -> None:
    older, newer = "20260101T030000Z-0000abc", "20260102T030000Z-0123abc"
    *lower, top = list(registry.STAGES)[-3:]
    _write(tmp_path, older, *(_timed(name, FIRST, older, 20.0) for name in (*lower, top)))
    changed = _timed(top, FIRST, newer, 10.0)
    assert changed.cubin is not None
    changed = changed.model_copy(update={"cubin": changed.cubin.model_copy(update={"sha256": "f" * 64})})
    _write(tmp_path, newer, changed)
    rows = select.load(GPU, tmp_path).rows(FIRST)
    assert {row.name: row.run for row in rows} == {lower[0]: older, lower[1]: older, top: newer}


def test_stages_stand_in_the_ladders_order_and_libraries_by_speed(data: Path) -> None:
    rows = select.load(GPU, data).rows(FIRST)
    ladder = [row.name for row in rows if row.kind == "stage"]
    assert ladder == list(registry.STAGES)
    assert [row.kind for row in rows] == sorted((row.kind for row in rows), reverse=True)
    rates = [select.rate(row) or 0.0 for row in rows if row.kind == "peer"]
    assert rates == sorted(rates, reverse=True)
    fastest = select.fastest_peer(rows)
    assert fastest is not None
    assert select.rate(fastest) == rates[0]


def test_the_parent_is_the_registrys(data: Path) -> None:
    rows = select.load(GPU, data).rows(FIRST)
    for row in rows:
        parent = select.parent_of(row, rows)
        wanted = registry.STAGES[row.name].parent if row.kind == "stage" else None
        assert (parent.name if parent else None) == wanted


def test_a_percentage_is_of_the_fastest_of_one_set_of_libraries(tmp_path: Path) -> None:
    few = Problem.parse("4x16x8192x64")
    run = "20260102T000000Z-0123abc"
    unable = _timed("fa3", few, run, 9.0).model_copy(
        update={"status": "unsupported", "reason": "bfloat16 alone", "samples": (), "verdict": None}
    )
    rows = [_timed(name, FIRST, run, 200.0, sustained=250.0) for name in ("00_naive", "sdpa", "sdpa_cudnn")]
    _write(tmp_path, run, *rows, *(_timed(name, few, run, 900.0) for name in ("00_naive", "sdpa")), unable)
    shown = select.load(GPU, tmp_path)
    wanted = shown.libraries("float16")
    assert wanted == {"sdpa", "sdpa_cudnn"}
    assert shown.libraries("bfloat16") == frozenset()
    assert select.fastest_of(wanted, shown.rows()) == select.fastest_peer(shown.rows())
    assert select.fastest_of(wanted, shown.rows(few)) is None
    assert select.fastest_of({"sdpa", "fa3"}, shown.rows(few)) == select.fastest_peer(shown.rows(few))
    assert select.fastest_of(wanted, shown.rows(), "sustained") is not None
    assert select.fastest_of({"sdpa"}, shown.rows(few), "sustained") is None
    stage = shown.rows(few)[0]
    assert tables.line(stage, shown.rows(few), libraries=wanted)["percent_of_best"] is None
    assert tables.line(stage, shown.rows(few))["percent_of_best"] is not None


def test_rates_follow_from_the_median() -> None:
    row = measurement("00_naive", FIRST)
    samples = row.samples_of()
    assert samples is not None
    assert select.rate(row) == pytest.approx(FIRST.flops / samples.median_us / 1e6)
    assert select.rate(measurement("00_naive", Problem.parse(FIRST_SHAPE, dtype="bfloat16"))) is None


def test_what_was_not_measured_has_no_rows(data: Path) -> None:
    assert select.load(GPU, data).rows(Problem.parse("3x1x7x64")) == ()
    assert not select.load("nvidia-unheard-of", data)
    assert [shown.gpu for shown in select.load_all(data)] == [GPU]


# --- The fastest stage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beside_us", "alone_us", "expected"),
    [
        (101.0, 99.0, "parent"),  # one run timed both: its order counts, though the other run's start was slower
        (101.0, 90.0, "last"),  # no two GPUs differ by so much: the parent is as its newest row says
        (99.0, 101.0, "last"),
        (None, 101.0, "parent"),  # no run timed both
        (None, 99.0, "last"),
    ],
)
def test_stages_of_two_runs_are_compared_in_the_newest_run_that_timed_both(
    tmp_path: Path, beside_us: float | None, alone_us: float, expected: str
) -> None:
    both, last = "20260101T030000Z-0000abc", "20260102T030000Z-0123abc"
    names = {"parent": "12_persistent", "last": "16_ones_column"}
    _write(tmp_path, both, _timed(names["parent"], FIRST, both, 100.0), _timed("00_naive", FIRST, both, 500.0))
    if beside_us:
        _write(tmp_path, both, _timed(names["last"], FIRST, both, beside_us))
        earlier = "20251231T030000Z-0000abc"  # an older run of both, which says otherwise, does not count
        rows = ((names["parent"], 100.0), (names["last"], 201.0 - beside_us))
        _write(tmp_path, earlier, *(_timed(name, FIRST, earlier, time_us) for name, time_us in rows))
    alone = _timed(names["last"], FIRST, last, alone_us)
    assert alone.cubin is not None
    # Other machine code, so that the session with both is not the one that is shown.
    alone = alone.model_copy(update={"cubin": alone.cubin.model_copy(update={"sha256": "f" * 64})})
    _write(tmp_path, last, alone)
    shown = select.load(GPU, tmp_path)
    assert {row.name: row.run for row in shown.rows()} == {
        "00_naive": both,
        names["parent"]: both,
        names["last"]: last,
    }
    fastest = select.fastest_stage(shown.rows(), records=shown.records)
    assert fastest is not None
    assert fastest.name == names[expected]
    drawn = charts.ladder(shown.rows(), records=shown.records)
    climb = charts.climb(shown.rows(), records=shown.records)
    assert f"The fastest stage, {fastest.name}, reaches" in drawn.alt
    higher = max(shown.rows(), key=lambda row: select.rate(row) or 0.0)
    note = tables.fastest_note(shown.rows(), shown.records)
    assert note.startswith(f"The fastest stage is `{fastest.name}`") == (higher is not fastest)
    assert bool(note) == (higher is not fastest)
    assert all(
        note in text for text in (tables.rates(shown.rows(), records=shown.records), drawn.caption, climb.caption)
    )


@pytest.mark.parametrize("gpu", store.gpus())
def test_no_stage_that_is_named_the_fastest_loses_to_another_in_the_newest_run_that_timed_both(gpu: str) -> None:
    shown = select.load(gpu)
    able = {stage.id for stage in registry.STAGES.values() if not stage.by_name_only}
    times: dict[Problem, dict[str, dict[str, float]]] = {}
    for row in shown.records:
        time_us = select.median_us(row)
        if row.name in able and not row.with_lse and time_us is not None:
            times.setdefault(row.problem, {}).setdefault(row.run, {})[row.name] = time_us
    for problem, rows in shown.problems.items():
        fastest = select.fastest_stage(rows, records=shown.records)
        if fastest is None:
            continue
        best = select.rate(fastest) or 0.0
        for row in rows:
            near = row.name in able and select.NEAR * (select.rate(row) or 0.0) >= best
            if near and row.run != fastest.run:  # rows of one run are compared as they are
                together = [of for _, of in sorted(times[problem].items()) if {row.name, fastest.name} <= of.keys()]
                assert not together or together[-1][fastest.name] <= together[-1][row.name], (problem, row.name)


@pytest.mark.parametrize("gpu", store.gpus())
def test_what_is_held_against_the_libraries_is_shown_with_the_same_times(gpu: str) -> None:
    """Of Results, charts and Against a reader takes one problem's times, and finds the same ones."""
    shown = select.load(gpu)
    contested = [found.burst for found in contests.against_peers(gpu) if found.burst]
    assert len(contested) > 50
    for contest in contested:
        by_name = {row.name: row for row in shown.problems[contest.stage.problem]}
        for row in (contest.stage, contest.peer):
            assert select.median_us(by_name[row.name]) == select.median_us(row), (row.problem, row.name)


# --- Sessions ---------------------------------------------------------------------------------------------------------


def _write(data: Path, run: str, *rows: schema.Measurement) -> None:
    path = data / GPU / "runs" / f"{run}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        store.append(path, row)


def _timed(name: str, problem: Problem, run: str, time_us: float, **states: float) -> schema.Measurement:
    """A row with one burst sample of `time_us`, and one sustained where `sustained` is given."""
    row = measurement(name, problem, run=run)
    taken: list[schema.Samples] = []
    for samples in row.samples:
        wanted = {"burst": time_us, "sustained": states.get("sustained")}[samples.regime]
        if wanted and samples.cache == "hot":
            changes = {"time_us": (wanted,), "sm_clock_mhz": (1980.0,), "call_clock_mhz": (1700.0,)}
            taken.append(samples.model_copy(update=changes))
    return row.model_copy(update={"samples": tuple(taken)})


def _runs(tmp_path: Path, *ids: str) -> dict[str, str]:
    for run in ids:
        _write(tmp_path, run, measurement("00_naive", FIRST, run=run))
    return sessions(GPU, tmp_path)


def test_a_session_is_the_runs_of_one_commit_close_together(tmp_path: Path) -> None:
    a, b, c, d, e = (
        "20260102T030000Z-0123abc",
        "20260102T035959Z-0123abc",
        "20260102T040000Z-4567def",
        "20260102T050000Z-0123abc-dirty",
        "20260102T090000Z-0123abc",
    )
    f = "20260102T160000Z-0123abc"
    assert _runs(tmp_path, a, b, c, d, e, f) == {a: a, b: a, c: c, d: d, e: a, f: f}


def test_what_one_run_of_a_session_left_out_is_filled_in_from_another(tmp_path: Path) -> None:
    first, second, older = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc", "20260101T030000Z-4567def"
    _write(tmp_path, older, *(measurement(name, FIRST, run=older) for name in list(registry.STAGES)[:2]))
    _write(tmp_path, first, *(measurement(name, FIRST, run=first) for name in ("00_naive", "01_coalesced", "sdpa")))
    _write(tmp_path, second, *(measurement(name, FIRST, run=second) for name in ("00_naive", "02_half2")))
    rows = {row.name: row.run for row in select.load(GPU, tmp_path).rows(FIRST)}
    # The two runs tried equally many, but the older has a library that stages are held against: it is the base.
    assert rows == {"00_naive": first, "01_coalesced": first, "02_half2": second, "sdpa": first}


def test_a_library_that_was_missing_in_one_run_is_shown_from_another_of_the_session(tmp_path: Path) -> None:
    first, second = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    missing = measurement("flex", FIRST, run=first).model_copy(
        update={"status": "missing", "reason": "not installed", "samples": (), "verdict": None}
    )
    _write(tmp_path, first, *(measurement(name, FIRST, run=first) for name in ("00_naive", "01_coalesced")), missing)
    _write(tmp_path, second, measurement("00_naive", FIRST, run=second), measurement("flex", FIRST, run=second))
    rows = {row.name: (row.run, row.status) for row in select.load(GPU, tmp_path).rows(FIRST)}
    assert rows == {"00_naive": (second, "ok"), "01_coalesced": (first, "ok"), "flex": (second, "ok")}


def test_stages_that_do_not_take_a_problem_do_not_keep_a_later_run_from_view(tmp_path: Path) -> None:
    problem = Problem.parse("16x16x2048x64", dtype="bfloat16")
    unable = [name for name, stage in registry.STAGES.items() if stage.why_not(problem)]
    older, newer = "20260101T030000Z-4567def", "20260102T030000Z-0123abc"
    assert len(unable) > 1
    _write(tmp_path, older, *(measurement(name, problem, run=older) for name in (*unable, "06_cp_async")))
    _write(tmp_path, newer, *(measurement(name, problem, run=newer) for name in ("12_persistent", "16_ones_column")))
    assert [row.name for row in select.load(GPU, tmp_path).rows(problem)] == [
        "06_cp_async",
        "12_persistent",
        "16_ones_column",
    ]


def test_within_a_session_the_run_with_more_states_is_shown(tmp_path: Path) -> None:
    full, bursts = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    _write(tmp_path, full, measurement("00_naive", FIRST, run=full))
    _write(tmp_path, bursts, _timed("00_naive", FIRST, bursts, 1.0))
    assert {row.run for row in select.load(GPU, tmp_path).rows(FIRST)} == {full}


def test_a_library_of_another_type_stands_beside_rows_of_its_session(tmp_path: Path) -> None:
    first, second = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    bf16 = Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    unfit = measurement("sdpa_cudnn", FIRST, run=first).model_copy(
        update={"status": "unsupported", "reason": "bfloat16 alone", "samples": (), "verdict": None}
    )
    _write(tmp_path, first, measurement("00_naive", FIRST, run=first), unfit)
    _write(tmp_path, second, measurement("sdpa_cudnn", bf16, run=second))
    shown = select.load(GPU, tmp_path)
    assert [(row.name, row.run) for row in shown.beside(FIRST)] == [("sdpa_cudnn", second)]
    # Another session has a stage there and is shown for that type; the hollow mark stays in its own session.
    later = "20260103T030000Z-4567abc"
    able = next(stage.id for stage in registry.STAGES.values() if "bfloat16" in stage.dtypes)
    _write(tmp_path, later, measurement("sdpa_cudnn", bf16, run=later), measurement(able, bf16, run=later))
    shown = select.load(GPU, tmp_path)
    assert {row.run for row in shown.rows(bf16)} == {later}
    assert [(row.name, row.run) for row in shown.beside(FIRST)] == [("sdpa_cudnn", second)]


def test_a_library_of_another_type_and_another_session_does_not_stand_beside(tmp_path: Path) -> None:
    first, second = "20260102T030000Z-0123abc", "20260102T100000Z-0123abc"
    unfit = measurement("sdpa_cudnn", FIRST, run=first).model_copy(
        update={"status": "unsupported", "reason": "bfloat16 alone", "samples": (), "verdict": None}
    )
    _write(tmp_path, first, measurement("00_naive", FIRST, run=first), unfit)
    _write(tmp_path, second, measurement("sdpa_cudnn", Problem.parse(FIRST_SHAPE, dtype="bfloat16"), run=second))
    assert select.load(GPU, tmp_path).beside(FIRST) == ()


def test_a_state_that_a_run_left_out_is_filled_in_from_its_session(tmp_path: Path) -> None:
    first, second, other = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc", "20260102T033500Z-4567abc"
    burst = _timed("00_naive", FIRST, first, 300.0), _timed("01_coalesced", FIRST, first, 100.0)
    _write(tmp_path, first, *burst)
    _write(tmp_path, second, _timed("01_coalesced", FIRST, second, 120.0, sustained=150.0))
    _write(tmp_path, other, _timed("00_naive", FIRST, other, 300.0, sustained=400.0))
    shown = select.load(GPU, tmp_path)
    naive, coalesced = shown.rows(FIRST)
    taken = {(samples.regime, samples.median_us) for samples in coalesced.samples}
    assert taken == {("burst", 100.0), ("sustained", 150.0)}
    assert {samples.regime for samples in naive.samples} == {"burst"}  # another commit's are not its own
    assert (naive.run, coalesced.run) == (first, first)
    assert select.run_files([naive]) == (f"{GPU}/runs/{first}.jsonl",)
    assert select.run_files([naive, coalesced]) == tuple(f"{GPU}/runs/{run}.jsonl" for run in (first, second))


@pytest.mark.parametrize(("seconds", "shown"), [(0.5, 150.0), (1.5, 170.0), (None, 170.0)])
def test_too_short_sustained_load_is_not_shown(tmp_path: Path, seconds: float | None, shown: float) -> None:
    """Half a second after another kernel the clock is still on its way to what the power limit allows."""
    first, second = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    _write(tmp_path, first, _timed("00_naive", FIRST, first, 300.0, sustained=150.0))
    short = _timed("00_naive", FIRST, second, 300.0, sustained=170.0)
    burst, sustained = short.samples
    short = short.model_copy(update={"samples": (burst, sustained.model_copy(update={"continuous_s": seconds}))})
    _write(tmp_path, second, short)
    (row,) = select.load(GPU, tmp_path).rows(FIRST)
    samples = row.samples_of("sustained")
    assert samples is not None
    assert samples.median_us == shown
    assert len(row.settled) == 2
    states = {line["state"] for line in explorer.lines(GPU, tmp_path) if line["run"] == second}
    assert ("sustained" in states) == (seconds != 0.5)
    lines = [line for line in tables.measurement_lines([short]) if line["regime"] == "sustained"]
    # What is on record can be downloaded all the same.
    assert [(line["median_us"], line["continuous_s"]) for line in lines] == [(170.0, seconds)]


def test_layers_under_sustained_load_add_up() -> None:
    """They follow one another without a pause, so that a layer's own share may be short."""
    row = _timed("00_naive", FIRST, "20260102T030000Z-0123abc", 300.0, sustained=150.0)

    def of_layers(count: int) -> schema.Measurement:
        layers = [
            samples.model_copy(update={"layer": layer, **({"continuous_s": 0.4} if samples.regime != "burst" else {})})
            for layer in range(count)
            for samples in row.samples
        ]
        return row.model_copy(update={"samples": tuple(layers)})

    assert of_layers(4).samples_of("sustained") is not None
    assert of_layers(3).samples_of("sustained") is None
    assert of_layers(3).samples_of() is not None


def test_other_sessions_add_libraries(tmp_path: Path) -> None:
    """Else a percentage of the fastest library leaves out one that was measured since."""
    earliest, shown, later = "20260101T030000Z-0000abc", "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    _write(tmp_path, earliest, _timed("sdpa_math", FIRST, earliest, 900.0))
    _write(
        tmp_path,
        shown,
        _timed("00_naive", FIRST, shown, 300.0),
        _timed("01_coalesced", FIRST, shown, 100.0),
        _timed("sdpa", FIRST, shown, 90.0),
    )
    _write(
        tmp_path,
        later,
        _timed("sdpa", FIRST, later, 88.0, sustained=110.0),
        _timed("triton_fa2", FIRST, later, 80.0),
    )
    found = select.load(GPU, tmp_path)
    rows = {row.name: row for row in found.rows(FIRST)}
    assert {name: row.run for name, row in rows.items()} == {
        "00_naive": shown,
        "01_coalesced": shown,
        "sdpa": shown,
        "triton_fa2": later,
        "sdpa_math": earliest,
    }
    assert {samples.regime: samples.median_us for samples in rows["sdpa"].samples} == {
        "burst": 90.0,
        "sustained": 110.0,
    }
    assert {samples.regime for samples in rows["01_coalesced"].samples} == {"burst"}
    fastest = select.fastest_peer(rows.values())
    assert fastest is not None
    assert fastest.name == "triton_fa2"
    assert [row.name for row in select.elsewhere(found.rows(FIRST))] == ["triton_fa2", "sdpa_math"]
    # No stage of the session was kept busy: there is nothing that the library could be apart from.
    assert select.elsewhere(found.rows(FIRST), "sustained") == ()
    assert select.provenance([rows["sdpa"]], "sustained").endswith("commit 4567def")
    assert select.provenance([rows["sdpa"]]).endswith("commit 0123abc")


@pytest.mark.parametrize("status", ["missing", "unsupported", "error", "crashed", "timeout", "wrong"])
def test_a_library_without_a_time_is_shown_from_a_later_session_that_has_one(tmp_path: Path, status: str) -> None:
    shown, later = "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    without = _timed("flex", FIRST, shown, 1.0).model_copy(
        update={"status": status, "reason": "made up", "samples": ()}
    )
    timed = (_timed(name, FIRST, shown, 9.0) for name in ("00_naive", "01_coalesced", "sdpa"))
    _write(tmp_path, shown, *timed, without)
    _write(tmp_path, later, _timed("flex", FIRST, later, 8.0))
    rows = {row.name: row.run for row in select.load(GPU, tmp_path).rows(FIRST)}
    assert rows == {"00_naive": shown, "01_coalesced": shown, "sdpa": shown, "flex": later}


def test_other_machine_code_fills_nothing_in(tmp_path: Path) -> None:
    first, second = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    _write(tmp_path, first, _timed("00_naive", FIRST, first, 300.0), _timed("01_coalesced", FIRST, first, 100.0))
    tuned = _timed("01_coalesced", FIRST, second, 90.0, sustained=150.0)
    assert tuned.cubin is not None
    retuned = tuned.model_copy(update={"cubin": tuned.cubin.model_copy(update={"sha256": "0" * 64})})
    _write(tmp_path, second, retuned)
    coalesced = select.load(GPU, tmp_path).rows(FIRST)[1]
    assert {samples.regime for samples in coalesced.samples} == {"burst"}


# --- Against the libraries --------------------------------------------------------------------------------------------


def _against(data: Path, **filters: Any) -> dict[tuple[str, str], contests.AgainstPeers]:
    return {(one.problem.dtype, one.problem.mask): one for one in contests.against_peers(GPU, data)}


def test_the_best_stage_is_held_against_the_best_library_of_its_type(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    bf16 = Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    able = next(stage.id for stage in registry.STAGES.values() if "bfloat16" in stage.dtypes)
    _write(
        tmp_path,
        run,
        _timed("00_naive", FIRST, run, 300.0, sustained=310.0),
        _timed("01_coalesced", FIRST, run, 100.0, sustained=150.0),
        _timed("sdpa_cudnn", FIRST, run, 130.0, sustained=140.0),
        _timed("sdpa_flash", FIRST, run, 120.0, sustained=180.0),
        _timed(able, bf16, run, 100.0),
        _timed("sdpa_flash", bf16, run, 90.0),
    )
    found = _against(tmp_path)
    fp16 = found["float16", "full"]
    assert fp16.burst is not None
    assert (fp16.burst.stage.name, fp16.burst.peer.name) == ("01_coalesced", "sdpa_flash")
    assert fp16.burst.ratio == pytest.approx(1.2)
    assert [select.call_clock(row) for row in (fp16.burst.stage, fp16.burst.peer)] == [1700.0, 1700.0]
    # Sustained: the same stage, and whichever library is the fastest there.
    assert fp16.sustained is not None
    assert (fp16.sustained.stage.name, fp16.sustained.peer.name) == ("01_coalesced", "sdpa_cudnn")
    assert fp16.sustained.ratio == pytest.approx(140 / 150)
    assert fp16.named is not None
    assert (fp16.named.peer.name, fp16.named.ratio) == ("sdpa_cudnn", pytest.approx(1.3))
    other = found["bfloat16", "full"]
    assert other.burst is not None
    assert other.burst.ratio == pytest.approx(0.9)
    assert other.sustained is None
    assert other.named is None
    flat = other.flat()
    assert flat["ratio"] == pytest.approx(0.9)
    assert flat["sustained"] is None


def test_a_new_rung_leaves_its_parent_the_problems_at_which_it_was_not_timed(tmp_path: Path) -> None:
    """But not the rungs before: what was the best one once is not held against libraries of today."""
    sessions = ("20260101T030000Z-0123abc", "20260102T030000Z-1123abc", "20260103T030000Z-2123abc")
    problems = tuple(replace(FIRST, batch=batch) for batch in (1, 2, 3))
    first, parent, last = "14_stale_max", "16_ones_column", "17_around_the_loop"
    assert registry.STAGES[last].parent == parent
    for run, name, problem in zip(sessions, (first, parent, last), problems, strict=True):
        _write(tmp_path, run, _timed(name, problem, run, 100.0), _timed("sdpa", problem, run, 110.0))
    found = {one.problem: one.burst and one.burst.stage.name for one in contests.against_peers(GPU, tmp_path)}
    assert found == {problems[1]: parent, problems[2]: last}


def _wrote(row: schema.Measurement, lse: bool | None) -> schema.Measurement:
    return row.model_copy(update={"lse": lse})


@pytest.mark.parametrize(
    ("library_writes", "adjusted", "sustained"),
    [(True, 130.0 / 104.0, 180.0 / 160.0), (False, 1.3, 1.2), (None, None, None)],
)
def test_an_adjusted_ratio_has_the_log_sum_exp_on_for_both_or_for_neither(
    tmp_path: Path, library_writes: bool | None, adjusted: float | None, sustained: float | None
) -> None:
    run = "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        run,
        _wrote(_timed("01_coalesced", FIRST, run, 100.0, sustained=150.0), False),
        _wrote(_timed("01_coalesced", FIRST, run, 104.0, sustained=160.0), True),
        _wrote(_timed("sdpa_cudnn", FIRST, run, 130.0, sustained=180.0), library_writes),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert found.sustained is not None
    assert (select.median_us(found.burst.stage), found.burst.ratio) == (100.0, pytest.approx(1.3))
    assert found.burst.adjusted_ratio == pytest.approx(adjusted)
    assert found.sustained.adjusted_ratio == pytest.approx(sustained)
    flat = found.flat()
    assert flat["adjusted_ratio"] == pytest.approx(adjusted)
    assert flat["peer_writes_lse"] is library_writes
    # The row with the log-sum-exp on is nobody's time but the adjusted ratio's.
    shown = select.load(GPU, tmp_path)
    assert {row.name: row.samples_of() and row.samples_of().median_us for row in shown.rows(FIRST)} == {  # type: ignore[union-attr]
        "01_coalesced": 100.0,
        "sdpa_cudnn": 130.0,
    }


def test_a_library_that_writes_a_log_sum_exp_has_no_adjusted_ratio_without_such_a_row(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        run,
        _wrote(_timed("01_coalesced", FIRST, run, 100.0), False),
        _wrote(_timed("fa3", FIRST, run, 130.0), True),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert (found.burst.ratio, found.burst.adjusted_ratio) == (pytest.approx(1.3), None)


def test_a_rate_is_a_percentage_of_the_tensor_cores_peak_at_its_clock(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    _write(tmp_path, run, _timed("01_coalesced", FIRST, run, 100.0), _timed("sdpa_cudnn", FIRST, run, 130.0))
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    peak = 4096 * 132 * 1700.0 / 1e6  # TFLOP/s at the clock in the calls
    assert contests.percent_of_peak(found.burst.stage) == pytest.approx(100 * FIRST.tflops(100.0) / peak)
    assert found.flat()["peer_percent_of_peak"] == pytest.approx(100 * FIRST.tflops(130.0) / peak)
    # Where the clock was not read there is none, and on a GPU whose tensor cores are not known here neither.
    old = "20260103T030000Z-0123abc"
    rows = [_timed(name, FIRST, old, 99.0) for name in ("01_coalesced", "sdpa_cudnn")]
    blind = [
        row.model_copy(update={"samples": tuple(s.model_copy(update={"call_clock_mhz": ()}) for s in row.samples)})
        for row in rows
    ]
    _write(tmp_path, old, *blind)
    found = _against(tmp_path)["float16", "full"]
    assert found.run == old
    assert found.flat()["stage_percent_of_peak"] is None


def test_other_inputs_are_shown_where_they_are_asked_for(tmp_path: Path) -> None:
    run, later = "20260102T030000Z-0123abc", "20260102T040000Z-0123abc"
    sink = replace(FIRST, inputs="sink_first")
    _write(tmp_path, run, _timed("01_coalesced", FIRST, run, 100.0), _timed("sdpa", FIRST, run, 110.0))
    _write(tmp_path, later, _timed("01_coalesced", sink, later, 400.0), _timed("sdpa", sink, later, 110.0))
    assert list(select.load(GPU, tmp_path).problems) == [FIRST]
    assert list(select.load(GPU, tmp_path, ("sink_first",)).problems) == [sink]
    (normal,) = contests.against_peers(GPU, tmp_path)
    assert (normal.problem, normal.flat()["inputs"]) == (FIRST, "normal")
    both = contests.against_peers(GPU, tmp_path, tuple(KINDS))
    assert [(one.problem.inputs, one.burst and one.burst.ratio) for one in both] == [
        ("normal", pytest.approx(1.1)),
        ("sink_first", pytest.approx(0.275)),
    ]
    assert both[0].flat()["worst_ratio"] is None


def _layers(name: str, problem: Problem, run: str, *times_us: float) -> schema.Measurement:
    row = _timed(name, problem, run, 1.0)
    taken = [
        row.samples[0].model_copy(update={"layer": layer, "time_us": (time_us,), "sm_clock_mhz": ()} | UNCLOCKED)
        for layer, time_us in enumerate(times_us)
    ]
    return row.model_copy(update={"samples": tuple(taken)})


UNCLOCKED = {"call_clock_mhz": (), "cycles_per_score": None}


def test_the_worst_layer_of_trained_inputs_stands_beside_their_ratio(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    problem = replace(FIRST, inputs="trained")
    _write(
        tmp_path,
        run,
        _layers("01_coalesced", problem, run, 100.0, 200.0, 100.0),
        _layers("sdpa_cudnn", problem, run, 120.0, 150.0, 130.0),
        _layers("sdpa_flash", problem, run, 300.0, 140.0, 300.0),
    )
    (found,) = contests.against_peers(GPU, tmp_path, ("trained",))
    assert found.burst is not None
    assert (found.burst.peer.name, found.burst.ratio) == ("sdpa_cudnn", pytest.approx(1.3))
    # On layer 1 another library is the fastest.
    assert (found.burst.worst_layer, found.burst.worst_ratio) == (1, pytest.approx(0.7))
    flat = found.flat()
    assert (flat["inputs"], flat["worst_layer"], flat["worst_ratio"]) == ("trained", 1, pytest.approx(0.7))
    assert "×0.700 on layer 1" in tables.table(tables.AGAINST, [found])


def test_a_ratio_is_of_two_rows_of_one_run_the_newest_with_both(tmp_path: Path) -> None:
    old, both, alone = "20260101T030000Z-4567def", "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    causal = Problem.parse(FIRST_SHAPE, mask="causal")
    _write(
        tmp_path,
        old,
        _timed("01_coalesced", FIRST, old, 100.0, sustained=200.0),
        _timed("sdpa", FIRST, old, 100.0, sustained=300.0),
    )
    _write(tmp_path, old, _timed("01_coalesced", causal, old, 1.0), _timed("sdpa", causal, old, 1.0))
    _write(tmp_path, both, _timed("01_coalesced", FIRST, both, 50.0), _timed("sdpa", FIRST, both, 100.0))
    _write(tmp_path, alone, _timed("01_coalesced", FIRST, alone, 10.0))
    found = {one.problem: one for one in contests.against_peers(GPU, tmp_path)}
    first = found[FIRST]
    assert (first.run, first.burst and first.burst.ratio) == (both, 2.0)
    assert first.sustained is not None
    assert (first.sustained.run, first.sustained.ratio) == (old, 1.5)
    assert found[causal].run == old
    assert found[causal].sustained is None


def test_a_session_without_the_fastest_library_gives_no_ratio(tmp_path: Path) -> None:
    fast, slow = "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    _write(tmp_path, fast, _timed("01_coalesced", FIRST, fast, 100.0), _timed("sdpa", FIRST, fast, 110.0))
    _write(tmp_path, slow, _timed("01_coalesced", FIRST, slow, 99.0), _timed("sdpa_math", FIRST, slow, 900.0))
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert (found.run, found.burst.peer.name) == (fast, "sdpa")


def test_the_run_that_a_ratio_is_of_is_shown_though_another_session_tried_more_of_the_ladder(tmp_path: Path) -> None:
    whole, later = "20260101T030000Z-0000abc", "20260102T030000Z-0123abc"
    lower, top = ("14_stale_max", "15_renormalize"), "16_ones_column"
    _write(tmp_path, whole, *(_timed(name, FIRST, whole, 20.0) for name in (*lower, top, "fa3", "sdpa")))
    _write(tmp_path, later, *(_timed(name, FIRST, later, 19.0) for name in (lower[1], top, "fa3")))
    assert _against(tmp_path)["float16", "full"].run == later
    rows = select.load(GPU, tmp_path).rows(FIRST)
    assert {row.name: row.run for row in rows if row.run == later}.keys() == {lower[1], top, "fa3"}
    assert [row.name for row in select.elsewhere(rows)] == [lower[0], "sdpa"]


@pytest.mark.parametrize("later", ["20260102T030000Z-0123abc", "20260101T033000Z-0000abc"], ids=["session", "run"])
def test_a_later_run_without_the_last_rung_does_not_take_its_ratio(later: str, tmp_path: Path) -> None:
    whole = "20260101T030000Z-0000abc"
    parent, last = "16_ones_column", "17_around_the_loop"
    assert registry.STAGES[last].parent == parent
    _write(tmp_path, whole, *(_timed(name, FIRST, whole, us) for name, us in ((parent, 19), (last, 18), ("fa3", 20))))
    _write(tmp_path, later, *(_timed(name, FIRST, later, 19.5) for name in (parent, "12_persistent", "sdpa", "fa3")))
    found = _against(tmp_path)["float16", "full"]
    assert (found.run, found.burst and found.burst.stage.name) == (whole, last)


def test_a_later_run_without_the_last_rung_does_not_take_its_sustained_ratio(tmp_path: Path) -> None:
    whole, later = "20260101T030000Z-0000abc", "20260101T033000Z-0000abc"
    for run, *stages in ((whole, "16_ones_column", "17_around_the_loop"), (later, "12_persistent", "16_ones_column")):
        _write(tmp_path, run, *(_timed(name, FIRST, run, 18.0, sustained=21.0) for name in (*stages, "sdpa_flash")))
    found = _against(tmp_path)["float16", "full"]
    assert (found.run, found.sustained and found.sustained.run) == (whole, whole)


def test_the_stage_of_a_sustained_ratio_is_the_fastest_under_load(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        run,
        _timed("00_naive", FIRST, run, 100.0, sustained=150.0),
        _timed("01_coalesced", FIRST, run, 110.0, sustained=120.0),
        _timed("sdpa_cudnn", FIRST, run, 130.0, sustained=180.0),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    for contest in (found.sustained, found.named_sustained):
        assert contest is not None
        assert (found.burst.stage.name, contest.stage.name, contest.ratio) == (
            "00_naive",
            "01_coalesced",
            pytest.approx(1.5),
        )


def test_the_named_ratio_is_over_the_faster_of_the_named_libraries(tmp_path: Path) -> None:
    first, second = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    _write(tmp_path, first, _timed("01_coalesced", FIRST, first, 100.0), _timed("fa3", FIRST, first, 105.0))
    _write(
        tmp_path,
        second,
        _timed("01_coalesced", FIRST, second, 100.0),
        _timed("triton_fa2", FIRST, second, 90.0),
        _timed("sdpa_cudnn", FIRST, second, 150.0),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert found.named is not None
    assert (found.run, found.named and found.named.run) == (second, first)
    assert (found.named.peer.name, found.named.ratio) == ("fa3", pytest.approx(1.05))


def test_a_session_is_held_against_its_fastest_library_though_another_run_timed_more(tmp_path: Path) -> None:
    most, fastest = "20260102T030000Z-0123abc", "20260102T033000Z-0123abc"
    _write(
        tmp_path,
        most,
        _timed("00_naive", FIRST, most, 300.0),
        _timed("01_coalesced", FIRST, most, 100.0),
        _timed("sdpa", FIRST, most, 130.0),
        _timed("sdpa_cudnn", FIRST, most, 130.0),
    )
    _write(
        tmp_path, fastest, _timed("01_coalesced", FIRST, fastest, 101.0), _timed("triton_fa2", FIRST, fastest, 110.0)
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert (found.burst.peer.name, found.run) == ("triton_fa2", fastest)
    assert found.burst.ratio == pytest.approx(110 / 101)


def test_a_newer_session_without_one_of_the_fastest_libraries_does_not_hide_one_with_all_of_them(
    tmp_path: Path,
) -> None:
    complete, newer = "20260101T030000Z-4567def", "20260102T030000Z-0123abc"
    rows = [_timed("01_coalesced", FIRST, complete, 100.0), _timed("sdpa_cudnn", FIRST, complete, 112.0)]
    _write(tmp_path, complete, *rows, _timed("fa4", FIRST, complete, 109.0))
    _write(tmp_path, newer, _timed("01_coalesced", FIRST, newer, 100.0), _timed("sdpa_cudnn", FIRST, newer, 113.0))
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert (found.run, found.burst.peer.name, found.burst.left_out) == (complete, "fa4", ())
    _write(tmp_path, newer, _timed("fa4", FIRST, newer, 110.0))
    assert _against(tmp_path)["float16", "full"].run == newer


def test_no_sustained_ratio_leaves_out_the_library_that_is_the_fastest_in_bursts(tmp_path: Path) -> None:
    run, full = "20260102T030000Z-0123abc", "20260101T030000Z-4567def"
    rows = [_timed("01_coalesced", FIRST, run, 100.0, sustained=150.0), _timed("sdpa_flash", FIRST, run, 120.0)]
    _write(tmp_path, run, *rows, _timed("sdpa", FIRST, run, 190.0, sustained=200.0))
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert found.burst.peer.name == "sdpa_flash"
    assert (found.sustained, found.named_sustained) == (None, None)
    _write(
        tmp_path,
        full,
        _timed("01_coalesced", FIRST, full, 100.0, sustained=150.0),
        _timed("sdpa_flash", FIRST, full, 120.0, sustained=165.0),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.sustained is not None
    assert found.sustained.run == full
    assert found.sustained is not None
    assert found.sustained.ratio == pytest.approx(1.1)


def test_the_named_libraries_sustained_ratio_is_of_the_newest_run_that_kept_theirs_busy(tmp_path: Path) -> None:
    old, new = "20260101T030000Z-4567def", "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        old,
        _timed("01_coalesced", FIRST, old, 100.0, sustained=150.0),
        _timed("sdpa_cudnn", FIRST, old, 120.0, sustained=180.0),
    )
    _write(
        tmp_path,
        new,
        _timed("01_coalesced", FIRST, new, 100.0, sustained=150.0),
        _timed("triton_fa2", FIRST, new, 110.0, sustained=165.0),
        _timed("sdpa_cudnn", FIRST, new, 120.0),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.sustained is not None
    assert found.named_sustained is not None
    assert (found.sustained.run, found.sustained.ratio) == (new, pytest.approx(1.1))
    assert (found.named_sustained.run, found.named_sustained.ratio) == (old, pytest.approx(1.2))


def test_a_library_that_is_as_fast_in_bursts_stands_for_the_fastest_under_load(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        run,
        _timed("01_coalesced", FIRST, run, 100.0, sustained=150.0),
        _timed("sdpa", FIRST, run, 119.5),
        _timed("sdpa_cudnn", FIRST, run, 120.0, sustained=180.0),
    )
    found = _against(tmp_path)["float16", "full"]
    assert found.burst is not None
    assert found.sustained is not None
    assert (found.burst.peer.name, found.sustained.peer.name) == ("sdpa", "sdpa_cudnn")
    assert found.sustained.ratio == pytest.approx(1.2)


def test_an_edited_copy_is_no_stage_of_ours(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    copy = _timed("00_naive", FIRST, run, 1.0).model_copy(update={"name": "00_naive@mine"})
    _write(tmp_path, run, copy, _timed("sdpa", FIRST, run, 100.0))
    (found,) = contests.against_peers(GPU, tmp_path)
    assert found.burst is None
    assert found.flat()["ratio"] is None
    assert found.reason == "no stage has a time in that run"
    _write(tmp_path, run, _timed("00_naive", FIRST, run, 90.0))
    (rows,) = select.load(GPU, tmp_path).problems.values()
    assert {row.name for row in rows} == {"00_naive", "sdpa"}


def _erring(name: str, problem: Problem, run: str, rms: float | None, largest: float | None) -> schema.Measurement:
    row = measurement(name, problem, run=run)
    assert row.verdict is not None
    changes = {"overall_rms_error": rms, "overall_max_error": largest}
    return row.model_copy(update={"verdict": row.verdict.model_copy(update=changes)})


def test_errors_are_of_the_newest_run_that_has_a_stage_and_a_reference(tmp_path: Path) -> None:
    old, new, alone = "20260101T030000Z-4567def", "20260102T030000Z-0123abc", "20260103T030000Z-0123abc"
    bf16 = Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    able = next(stage.id for stage in registry.STAGES.values() if "bfloat16" in stage.dtypes)
    _write(tmp_path, old, _erring(able, bf16, old, 9.0, 9.0), _erring("fa3", bf16, old, 1.0, 1.0))
    _write(
        tmp_path,
        new,
        _erring(able, bf16, new, 3e-4, 2e-3),
        _erring("fa3", bf16, new, 2e-4, 4e-3),
        _erring("sdpa_cudnn", bf16, new, 5e-4, 4e-3),
        _erring("sdpa_flash", bf16, new, None, None),  # from before there were such errors
    )
    _write(tmp_path, alone, _erring(able, bf16, alone, 1.0, 1.0), _erring("fa3", bf16, alone, None, None))
    elsewhere = Problem.parse("1x8x512x64", dtype="bfloat16")
    _write(tmp_path, alone, _erring(able, elsewhere, alone, 1.0, 1.0), _erring("fa3", elsewhere, alone, 1.0, 1.0))
    (found,) = contests.accuracy(GPU, tmp_path)
    assert (found.problem, found.run, found.reference) == (bf16, new, "fa3")
    assert set(found.errors) == {able, "fa3", "sdpa_cudnn"}
    assert found.over_reference(able) == (pytest.approx(1.5), pytest.approx(0.5))
    assert found.over_reference("fa3") == (1.0, 1.0)


def test_there_is_no_ratio_without_data(tmp_path: Path) -> None:
    assert contests.against_peers(GPU, tmp_path) == ()


def test_the_newest_check_of_every_stage_is_found_though_a_later_run_checked_fewer(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x1x64")
    folder = tmp_path / "nvidia-h200" / "checks"
    for run, stages in (
        ("20260102T030405Z-0123abc", ("00_naive", "05_wmma")),
        ("20260103T030405Z-89abcde", ("05_wmma",)),
    ):
        write_checks(folder / f"{run}.jsonl", (CheckRow(stage=one, problem=problem, status="ok") for one in stages))
    newest = select.newest_checks("nvidia-h200", tmp_path)
    assert {stage: lines[0].header.run for stage, lines in newest.items()} == {
        "00_naive": "20260102T030405Z-0123abc",
        "05_wmma": "20260103T030405Z-89abcde",
    }
    assert select.newest_checks("nvidia-h200", tmp_path, "random") == {}


def test_a_later_check_of_a_few_problems_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "checks"
    whole, later, fragment = "20260101T030405Z-0123abc", "20260102T030405Z-89abcde", "20260103T030405Z-4567abc"
    for run, count in ((whole, 10), (later, 6), (fragment, 4)):
        problems = [Problem.parse(f"1x2x{length}x64") for length in range(1, 1 + count)]
        rows = (CheckRow(stage="05_wmma", problem=problem, status="ok") for problem in problems)
        write_checks(folder / f"{run}.jsonl", rows)
    assert {line.header.run for line in select.newest_checks("nvidia-h200", tmp_path)["05_wmma"]} == {later}


def test_a_ratio_says_which_of_the_fastest_libraries_its_run_left_out(tmp_path: Path) -> None:
    run, other = "20260102T030000Z-0123abc", "20260101T030000Z-0123abc"
    longer = Problem.parse("16x16x4096x64")
    _write(tmp_path, run, _timed("01_coalesced", FIRST, run, 100.0), _timed("sdpa", FIRST, run, 120.0))
    assert _against(tmp_path)["float16", "full"].flat()["not_timed"] == []  # no other library is on record
    _write(
        tmp_path,
        other,
        _timed("01_coalesced", longer, other, 400.0),
        _timed("fa4", longer, other, 440.0),
        _timed("sdpa_cudnn", longer, other, 450.0),
        _timed("sdpa_flash", longer, other, 900.0),
    )
    found = {one.problem: one for one in contests.against_peers(GPU, tmp_path)}
    assert found[longer].flat()["not_timed"] == []
    assert found[FIRST].flat()["not_timed"] == ["fa4"], "torch chooses cuDNN, and sdpa_flash is never the fastest"
    assert found[FIRST].flat()["sustained_not_timed"] == [], "nothing was kept busy"
    said = tables.against([*found.values()])
    assert "At 1 problem in bursts the run left out" in said
    assert "without FlashAttention-4" in tables.table(tables.AGAINST, [found[FIRST]])


def test_a_sustained_ratio_says_which_of_the_fastest_libraries_its_run_did_not_keep_busy(tmp_path: Path) -> None:
    run = "20260102T030000Z-0123abc"
    _write(
        tmp_path,
        run,
        _timed("01_coalesced", FIRST, run, 100.0, sustained=120.0),
        _timed("sdpa_cudnn", FIRST, run, 110.0, sustained=130.0),
        _timed("fa4", FIRST, run, 115.0),
    )
    (found,) = contests.against_peers(GPU, tmp_path)
    assert found.sustained
    assert (found.flat()["not_timed"], found.flat()["sustained_not_timed"]) == ([], ["fa4"])
    assert "| ×1.08, without FlashAttention-4 |" in tables.table(tables.AGAINST, [found])
    assert "At 1 problem under sustained load the run left out" in tables.against([found])


def test_the_package_that_loads_stages_does_not_part_the_starts_of_a_library() -> None:
    """What a call of a library, or a limit of the GPU, does not run makes no other code of it."""
    row = measurement("sdpa", FIRST)
    loads = {"cuda-core": "1.2.2", provenance.UNUSED: "13.5.37"}
    row = row.model_copy(update={"software": row.software | loads})
    for name in row.software:
        other = row.model_copy(update={"software": row.software | {name: "0.0.1"}})
        assert select.same_code(row, other) is (name in {"flashlab", *loads}), name
