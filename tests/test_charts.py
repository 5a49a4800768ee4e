"""Charts say what the records say, in every layout and theme."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import RUN, measurement, profile, write_synthetic

from flashlab.build import sass
from flashlab.core.errors import NoDataError
from flashlab.core.problem import FIRST_SHAPE, Problem, suite
from flashlab.kernels import peers, registry
from flashlab.kernels.registry import STAGES
from flashlab.query import contests, select
from flashlab.query.select import Results
from flashlab.record import schema, store
from flashlab.record.schema import StageProfile
from flashlab.show import charts, tables
from flashlab.show.charts import LAYOUTS, THEMES, Chart

LENGTHS = sorted({problem.q_len for problem in suite("lengths")})


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Results:
    data = tmp_path_factory.mktemp("data")
    lengths = [problem for problem in suite("lengths") if problem.head_dim == 64 and problem.mask == "full"]
    problems = (*suite("first"), Problem.parse("16x16x2048x128"), Problem.parse("32x8x128x64"), *lengths)
    write_synthetic(data, problems=dict.fromkeys(problems))
    return select.load("nvidia-h200", data)


def _profiles(shown: Results) -> list[StageProfile]:
    """Of every stage with a time at the first problem; twice its compulsory bytes crossed device memory."""
    first = shown.first
    assert first is not None
    metrics = {
        "dram__bytes_read.sum": 1.5 * first.compulsory_bytes,
        "dram__bytes_write.sum": 0.5 * first.compulsory_bytes,
        "lts__t_sectors_srcunit_tex.sum": 1e7,
        "smsp__issue_active.avg.pct_of_peak_sustained_active": 40.0,
    }
    return [profile(row.name, first, metrics=metrics) for row in shown.rows() if row.kind == "stage" and row.samples]


CHARTS: dict[str, Callable[[Results], Chart]] = {
    "ladder": lambda r: charts.ladder(r.rows()),
    "climb": lambda r: charts.climb(r.rows(), records=r.records),
    "waterfall": lambda r: charts.waterfall(r.rows()),
    "scaling": lambda r: charts.scaling(r, mask="full"),
    "lengths": lambda r: charts.lengths(r, head_dim=64, mask="full"),
    "lengths sustained": lambda r: charts.lengths(r, head_dim=64, mask="full", dtype="bfloat16", regime="sustained"),
    "regimes": lambda r: charts.regimes(r.rows()),
    "samples": lambda r: charts.samples(r.rows()[0]),
    "errors": lambda r: charts.errors(r.rows()),
    "sass_mix": lambda r: charts.sass_mix({row.name: row.cubin.sass for row in r.rows() if row.cubin}),
    "roofline": lambda r: charts.roofline(r),
    "roofline measured": lambda r: charts.roofline(r, profiles=_profiles(r)),
    "roofline l2": lambda r: charts.roofline(r, level="l2", profiles=_profiles(r)),
    "stalls": lambda r: charts.stalls(_profiles(r)),
    "busy": lambda r: charts.busy(_profiles(r)),
    "ceilings": lambda r: charts.ceilings(r),
}


def _of_style(svg: str, style: str) -> int:
    """How many elements have that in their style."""
    names = [name for name, rule in re.findall(r"\.(s\d+)\{([^}]*)\}", svg) if style in rule]
    return sum(svg.count(f'class="{name}"') for name in names)


def _text(svg: str) -> str:
    return " ".join(
        "".join(element.itertext()) for element in ET.fromstring(svg).iter() if element.tag.endswith("text")
    )


@pytest.mark.parametrize("name", CHARTS)
def test_chart_is_complete_in_every_variant(name: str, shown: Results) -> None:
    chart = CHARTS[name](shown)
    assert len(chart.alt) > 20
    assert chart.caption.endswith(".")
    for layout in LAYOUTS:
        for theme in THEMES:
            svg = chart.themed(layout, theme)
            root = ET.fromstring(svg)
            assert root.attrib["width"].endswith("pt")
            assert _text(svg).strip(), "text must stay text"
            assert "DejaVu" not in svg
            assert not re.search(r"""(?:href|src|url)\s*[=(]\s*["']?https?:""", svg), "a figure may fetch nothing"
            assert charts.SURFACE not in svg, "the ground must be the page's"
            named = set(re.findall(r' id="([^"]+)"', svg))
            used = {*re.findall(r'href="#([^"]+)"', svg), *re.findall(r"url\(#([^)]+)\)", svg)}
            assert used <= named, "what a figure uses is in it"
            assert set(re.findall(r' class="([^"]+)"', svg)) <= set(re.findall(r"\.(s\d+)\{", svg))
            assert " style=" not in svg, "a style is written once"
            assert "<metadata" not in svg
        light, dark = chart.themed(layout, "light"), chart.themed(layout, "dark")
        assert charts.INK in light
        assert charts.INK not in dark
    assert float(root.attrib["width"].removesuffix("pt")) < 300, "a phone is narrow"


def test_same_records_give_the_same_bytes(shown: Results) -> None:
    assert charts.ladder(shown.rows()).svg == charts.ladder(shown.rows()).svg


def test_a_roofline_of_problems_names_their_lengths(tmp_path: Path) -> None:
    problems = [Problem.parse(f"{batch}x16x{length}x64") for batch, length in ((1, 512), (4, 4096))]
    write_synthetic(tmp_path, problems=problems)
    chart = charts.roofline(select.load("nvidia-h200", tmp_path))
    for layout in LAYOUTS:
        text = _text(chart.svg[layout])
        assert "S4096" in text
        assert "B4 D64" not in text


@pytest.mark.parametrize("slug", store.gpus())
def test_nothing_on_record_stands_above_its_roof(slug: str) -> None:
    """The tensor cores' peak at the clock inside a row's own calls; in the chart, at that of the fastest mark."""
    shown = select.load(slug)
    for row in (row for rows in shown.problems.values() for row in rows if select.rate(row)):
        peak = row.gpu.tensor_tflops(select.call_clock(row))
        assert peak is None or (select.rate(row) or 0.0) < peak, row.name
    if "copy" not in shown.ceilings:
        return
    assert "above" not in tables.placement(shown)
    first = shown.first
    assert first is not None
    points = charts._problem_points(shown, first)
    clock_mhz = select.call_clock(max(points, key=lambda point: point.tflops).row)
    assert (
        f"units at {clock_mhz:.0f} MHz, the clock inside the calls of the fastest mark"
        in charts.roofline(shown).caption
    )
    roofs = charts._roofs(shown, first, "copy", clock_mhz)
    top = max(roof.value for roof in roofs if not roof.is_slope)
    slope = max(roof.value for roof in roofs if roof.is_slope)
    for point in points:
        assert point.tflops < min(top, slope * point.intensity), point.row.name


def test_measured_bytes_stand_beside_counted_ones(shown: Results) -> None:
    first, profiles = shown.first, _profiles(shown)
    assert first is not None
    for level, profiled in (("dram", profiles), ("l2", profiles), ("l2", profiles[:1]), ("l2", [])):
        chart = charts.roofline(shown, level=level, profiles=profiled)
        for layout in LAYOUTS:
            for one in profiles:
                assert _text(chart.svg[layout]).count(one.stage) == 1, "two marks share one label"
        hollow = _of_style(chart.svg["wide"], f"fill: {charts.PAPER}; stroke: {charts.STAGE}")
        assert ("Filled" in chart.caption) == bool(profiled)
        assert (f"nvidia-h200/profiles/{RUN}.jsonl" in chart.data_files) == bool(profiled)
        assert hollow >= len(profiles)
    with pytest.raises(NoDataError, match="flashlab profile"):
        charts.roofline(shown, profiles=[])


def test_profiles_that_say_nothing_are_not_drawn(shown: Results) -> None:
    first = shown.first
    assert first is not None
    silent = profile("00_naive", first, metrics={}, samples={})
    for draw in (charts.stalls, charts.busy):
        with pytest.raises(NoDataError, match="flashlab profile"):
            draw([silent])


def test_ladder_shows_every_row_value_and_gain(shown: Results) -> None:
    rows = shown.rows()
    chart = charts.ladder(rows)
    for layout in LAYOUTS:
        text = _text(chart.svg[layout])
        for row in rows:
            assert tables.title_of(row.name) in text
            rate = select.rate(row)
            if rate:
                assert tables.number(rate) in text
        assert "missing" in text
        assert "× parent" in text
    # On a phone names and rates lie on paper, and not under the dashed line.
    rates = sum(select.rate(row) is not None for row in rows)
    paper = re.search(rf"\.(\w+){{fill: {charts.PAPER}}}", chart.svg["narrow"])
    assert paper
    assert chart.svg["narrow"].count(f'class="{paper[1]}"') == len(rows) + rates
    assert rows[0].gpu.name in chart.provenance
    assert "MHz" in chart.provenance
    assert "2026-01-02" in chart.provenance
    assert "0123abc" in chart.provenance
    assert chart.data_files == (f"nvidia-h200/runs/{rows[0].run}.jsonl",)


@pytest.fixture(scope="module")
def two_types(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A library that takes bfloat16 alone, and every other in both types, in one run."""
    data = tmp_path_factory.mktemp("two-types")
    half, other = Problem.parse(FIRST_SHAPE), Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    causal = Problem.parse(FIRST_SHAPE, mask="causal")
    path = write_synthetic(data, problems=[half, other, causal])
    rows = store.measurements("nvidia-h200", data)
    lacking = {"status": "unsupported", "reason": "bfloat16 alone", "verdict": None, "samples": ()}
    changed = [
        row.model_copy(update=lacking) if row.name == "sdpa_cudnn" and row.problem.dtype == "float16" else row
        for row in rows
    ]
    path.write_text("".join(map(schema.to_line, changed)), encoding="utf-8")
    return select.load("nvidia-h200", data)


def test_a_library_without_the_type_stands_beside_in_another_and_counts_for_no_percentage(two_types: Results) -> None:
    rows, beside = two_types.rows(), two_types.beside()
    assert [(row.name, row.problem.dtype, row.problem.mask) for row in beside] == [("sdpa_cudnn", "bfloat16", "full")]
    rate = tables.number(select.rate(beside[0]))
    alone, chart = charts.ladder(rows), charts.ladder(rows, beside=beside)
    best = select.fastest_peer(rows)
    assert best is not None
    assert best.name != "sdpa_cudnn"
    assert "Hollow" not in alone.caption
    assert "it does not take float16" in chart.caption
    said = rf"Its {rate} TFLOP/s are (more than any|no more than the best) library's in float16 there"
    assert re.search(said, chart.caption), "a stage may be faster"
    assert "fastest library in float16" in chart.caption
    for layout in LAYOUTS:
        assert "cuDNN (SDPA) (bfloat16)" in _text(chart.svg[layout])
        assert "unsupported" in _text(alone.svg[layout])
        assert "unsupported" not in _text(chart.svg[layout])
        assert charts.PAPER in chart.svg[layout]
        assert charts.PAPER not in chart.themed(layout, "dark")
    assert chart.provenance == alone.provenance
    line = next(x for x in tables.rates(rows, beside=beside).splitlines() if "(bfloat16)" in x)
    assert rate in line
    assert "%" not in line


def test_beside_keeps_to_one_shape_and_mask(two_types: Results) -> None:
    assert two_types.beside(Problem.parse(FIRST_SHAPE, mask="causal")) == ()
    assert two_types.beside(Problem.parse(FIRST_SHAPE, dtype="bfloat16")) == ()


def test_numbers_keep_their_digits_across_a_power_of_ten() -> None:
    assert [tables.number(value) for value in (99.97, 100.0, 0.9996, 1234.5, 6.342)] == [
        "100",
        "100",
        "1.00",
        "1,234",
        "6.34",
    ]


def test_a_label_keeps_its_decimals() -> None:
    def draw(figure: Any, layout: str) -> None:
        axes = figure.subplots()
        axes.plot([0.9749, 1.0251], [0, 1])
        axes.set(xticks=[0.975, 1.025], title="0.0312 of it")

    chart = charts.compose(draw, name="labels", heights=(2, 2), alt="", caption="")
    for svg in chart.svg.values():
        assert {"0.975", "1.025", "0.0312 of it"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_a_path_is_shortened_without_a_change() -> None:
    assert charts._short_path("M 1 2 L 3 2 L 3 4 L 1 4 z") == "M1 2H3V4H1z"
    assert charts._short_path("M 0 0 Q 1 1 2 2 L 2 5 C 1 1 3 3 4 5 L 6 5 L 7 6") == "M0 0Q1 1 2 2V5C1 1 3 3 4 5H6L7 6"
    assert charts._short_path("M 0 0 L 1 1 z M 1 2 L 1 3") == "M0 0L1 1zM1 2V3"


def test_a_chart_survives_a_notebook(shown: Results) -> None:
    chart = charts.ladder(shown.rows())
    bundle = chart._repr_mimebundle_()
    image, caption = ET.fromstring(str(bundle["text/html"]))
    assert image.attrib["alt"] == chart.alt
    assert b64decode(image.attrib["src"].partition("base64,")[2]).startswith(b"<svg")
    assert "".join(caption.itertext()) == f"{chart.caption}{chart.provenance}"
    assert Chart.model_validate(bundle[charts.MIME]) == chart


def test_sass_groups_cover_every_class() -> None:
    grouped = [kind for kinds in charts.SASS_GROUPS.values() for kind in kinds]
    assert sorted(grouped) == sorted(kind for kind in sass.CLASSES if kind != "total")


def test_nothing_to_draw_is_said() -> None:
    problem = Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    row = measurement("00_naive", problem)
    assert row.status == "unsupported"
    for draw in (charts.ladder, charts.waterfall, charts.regimes, charts.errors):
        with pytest.raises(NoDataError, match="wanted"):
            draw([row])
    with pytest.raises(NoDataError, match="unsupported"):
        charts.samples(row)
    timed = measurement("00_naive", Problem.parse(FIRST_SHAPE))
    bursts = tuple(one for one in timed.samples if (one.regime, one.cache) == ("burst", "hot"))
    alone = timed.model_copy(update={"samples": bursts})
    with pytest.raises(NoDataError, match="bursts with a hot L2 alone"):
        charts.regimes([alone])
    assert "cold" in tables.states([timed])
    assert "cold" not in tables.states([alone])
    assert "burst, hot L2" in tables.states([alone])
    cold = timed.model_copy(update={"samples": tuple(one for one in timed.samples if one.regime == "burst")})
    assert "sustained" not in charts.regimes([cold]).caption
    assert "sustained" in charts.regimes([timed]).caption


def test_an_unknown_gpu_has_no_percentage_of_peak(tmp_path: Path) -> None:
    write_synthetic(tmp_path, "nvidia-unheard-of", problems=suite("first"))
    shown = select.load("nvidia-unheard-of", tmp_path)
    with pytest.raises(NoDataError, match="data sheet"):
        charts.ceilings(shown)
    unlisted = charts.roofline(shown)
    assert "data sheet)" not in _text(unlisted.svg["wide"])
    assert "data sheet" not in unlisted.caption


def test_the_shown_run_is_the_one_that_tells_most_of_the_ladder(tmp_path: Path) -> None:
    problem = Problem.parse(FIRST_SHAPE)
    write_synthetic(tmp_path, problems=[problem])
    later = measurement("00_naive", problem, run="20270102T030405Z-fedcba9")
    path = tmp_path / "nvidia-h200" / "runs" / f"{later.run}.jsonl"
    path.write_text(later.model_dump_json() + "\n", encoding="utf-8")
    rows = select.load("nvidia-h200", tmp_path).rows()
    assert {row.name for row in rows} >= set(STAGES)
    assert {row.run for row in rows} == {"20260102T030405Z-0123abc"}


def test_rows_stand_in_the_ladders_order_then_peers_by_rate(shown: Results) -> None:
    rows = shown.rows()
    assert [row.name for row in rows if row.kind == "stage"] == list(STAGES)
    rates = [select.rate(row) or 0.0 for row in rows if row.kind == "peer"]
    assert rates == sorted(rates, reverse=True)


def test_rows_that_are_not_finite_stay_in_sight() -> None:
    chart = charts.row_errors(
        {"as it is": [1e-4, 2e-4], "edited": [float("nan"), 0.0]}, rows=16, limit=1e-3, note="made up", name="rows"
    )
    assert "edited: not finite" in chart.alt
    assert all("NaN" in chart.svg[layout] and "16–31" in chart.svg[layout] for layout in charts.LAYOUTS)
    with pytest.raises(NoDataError):
        charts.row_errors({"edited": [float("nan")], "gone": []}, rows=16, name="rows")


def test_lengths_show_the_fast_ones_over_every_length(shown: Results) -> None:
    chart = charts.lengths(shown, head_dim=64, mask="full")
    for layout in LAYOUTS:
        text = _text(chart.svg[layout])
        assert all(str(count) in text for count in LENGTHS)
        assert "percent of a large GEMM's rate" in text
        assert tables.title_of("sdpa_cudnn") in text
    # A scalar loop would lie on the axis: it is left out, and the chart says so.
    assert "00_naive" not in _text(chart.svg["wide"])
    assert "slower are not drawn" in chart.caption
    without = dataclasses.replace(shown, ceilings={})
    assert "percent" not in _text(charts.lengths(without, head_dim=64, mask="full").svg["wide"])


def test_ratios_over_lengths_say_which_library_they_are_over(tmp_path: Path) -> None:
    problems = [problem for problem in suite("lengths") if problem.head_dim == 64]
    write_synthetic(tmp_path, problems=dict.fromkeys(problems))
    found, shown = contests.against_peers("nvidia-h200", tmp_path), select.load("nvidia-h200", tmp_path)
    chart = charts.ratios(shown, found=found)
    bursts = [one.burst for one in found if one.burst and one.problem in set(problems)]
    for layout in LAYOUTS:
        text = _text(chart.svg[layout])
        assert all(word in text for word in ("float16", "bfloat16", "D64 full", "D64 causal", *map(str, LENGTHS)))
        assert all(f"over {tables.short_title(burst.peer.name)}" in text for burst in bursts)
    assert all(
        f"{tables.number(burst.ratio)} over {tables.short_title(burst.peer.name)}" in chart.alt for burst in bursts
    )
    assert chart.data_files == tuple(sorted({f"nvidia-h200/runs/{one.run}.jsonl" for one in found}))
    assert "burst" in chart.provenance
    with pytest.raises(NoDataError, match="--suite lengths"):
        charts.ratios(shown, found=found[:1])
    # What is at one length has no line, and its run no part in the caption; a library may have left the registry.
    assert found[0].burst is not None
    gone = replace(found[0].burst, peer=found[0].burst.peer.model_copy(update={"name": "of old"}))
    alone = replace(found[0], problem=replace(found[0].problem, head_dim=128), run="20270101T000000Z-89abcde-dirty")
    known = [replace(found[0], burst=gone), *found[1:]]
    chart = charts.ratios(shown, found=[*known, alone])
    assert "over of old" in _text(chart.svg["wide"])
    assert "89abcde" not in chart.provenance + "".join(chart.data_files)
    assert "changes" not in chart.provenance
    edited = "20270101T000000Z-89abcde-dirty"
    dirty = [
        replace(one, burst=replace(one.burst, stage=one.burst.stage.model_copy(update={"run": edited})))
        for one in found
        if one.burst
    ]
    assert charts.ratios(shown, found=dirty).provenance.endswith("commit 89abcde + changes")


def test_lengths_name_the_libraries_of_another_session(tmp_path: Path) -> None:
    first, later = "20260102T030000Z-0123abc", "20260103T030000Z-4567def"
    problems = [one for one in suite("lengths") if (one.head_dim, one.mask, one.dtype) == (64, "full", "float16")]
    (tmp_path / "nvidia-h200" / "runs").mkdir(parents=True)
    for run, names in (
        (first, ("12_persistent", "16_ones_column", "sdpa")),
        (later, ("flex", "sdpa")),
    ):
        rows = [measurement(name, problem, run=run) for problem in problems for name in names]
        for row in rows:
            store.append(tmp_path / "nvidia-h200" / "runs" / f"{run}.jsonl", row)
    chart = charts.lengths(select.load("nvidia-h200", tmp_path), head_dim=64, mask="full")
    assert chart.caption.endswith("In another session than the last stage at one or more lengths: FlexAttention.")
    assert chart.data_files == tuple(f"nvidia-h200/runs/{run}.jsonl" for run in (first, later))


def test_no_two_lines_over_lengths_look_the_same() -> None:
    of_stages = [charts.mark(name) for name in registry.STAGES]
    of_libraries = [charts.mark(name) for name in peers.PEERS]
    assert len(set(of_stages + of_libraries)) == len(registry.STAGES) + len(peers.PEERS)
    assert not {colour for colour, _ in of_stages} & {colour for colour, _ in of_libraries}
    assert len({shape for _, shape in of_stages[-9:]}) == 1, "the last rungs differ in colour"


def test_what_was_measured_at_one_length_has_no_line(shown: Results) -> None:
    longest = select.of_lengths(shown, head_dim=64, mask="full", dtype="float16")[-1]
    left = {
        problem: tuple(row for row in rows if row.name != "08_swizzle" or problem == longest)
        for problem, rows in shown.problems.items()
    }
    assert "08_swizzle" in _text(charts.lengths(shown, head_dim=64, mask="full").svg["wide"])
    chart = charts.lengths(dataclasses.replace(shown, problems=left), head_dim=64, mask="full")
    assert "08_swizzle" not in _text(chart.svg["wide"])
    assert "1 measured at one length" in chart.caption


def test_lengths_that_were_not_measured_are_named(shown: Results) -> None:
    with pytest.raises(NoDataError, match=r"D128 full float16.*found 1.*--suite lengths"):
        charts.lengths(shown, head_dim=128, mask="full")
    with pytest.raises(NoDataError, match=r"full float16 problems.*found 0. `flashlab bench --suite standard` makes"):
        charts.scaling(dataclasses.replace(shown, problems={}), mask="full")


def test_lengths_are_those_of_the_inputs_shown(tmp_path: Path) -> None:
    problems = [replace(one, inputs="rising") for one in suite("lengths") if one.head_dim == 64]
    write_synthetic(tmp_path, problems=problems)
    shown = select.load("nvidia-h200", tmp_path, ("rising",))
    found = contests.against_peers("nvidia-h200", tmp_path, ("rising", "normal"))
    for chart in (charts.lengths(shown, head_dim=64, mask="full"), charts.ratios(shown, found=found)):
        assert all(str(count) in _text(chart.svg["wide"]) for count in LENGTHS)
        assert "rising" in chart.provenance
    again = "`flashlab bench --suite lengths --inputs rising"
    with pytest.raises(NoDataError, match=f"{again}` makes"):
        charts.ratios(shown, found=())
    with pytest.raises(NoDataError, match=f"{again} --sustained 5` makes"):
        charts.lengths(shown, head_dim=128, mask="full", regime="sustained")


def test_lengths_have_a_figure_of_their_own(shown: Results) -> None:
    assert "S16384" not in _text(charts.scaling(shown, mask="full").svg["wide"])
