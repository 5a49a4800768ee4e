"""The journey and its drawings say what the kernels' sources say, and fail when they do not."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from flashlab.core.errors import NoDataError, ParameterError
from flashlab.core.paths import DATA, ROOT, SITE
from flashlab.experiments import chip, cycle_model, timelines
from flashlab.kernels import registry, text
from flashlab.kernels.registry import STAGES, Excerpt
from flashlab.query import select
from flashlab.query.select import Results
from flashlab.record import store
from flashlab.show import drawings, journey, pages
from flashlab.show.charts import LAYOUTS, THEMES, Chart
from flashlab.show.tables import number


@pytest.fixture(scope="module")
def shown() -> Results:
    return select.load("nvidia-h200", DATA)


PAGE = (SITE / journey.PAGE).read_text(encoding="utf-8")


# --- What the text of a kernel says -----------------------------------------------------------------------------------


def test_constants_are_those_of_the_source_and_its_headers() -> None:
    known = text.constants(STAGES["16_ones_column"], 64)
    assert (known["THREADS"], known["TILE_Q"], known["O_COLUMNS"]) == (512, 192, 72)
    assert (known["HEADROOM"], known["SUM_LIMIT"]) == (2, 65504)
    assert text.constants(STAGES["16_ones_column"], 128)["STAGE_ONES"] == 64 * known["PANEL"]
    assert text.constants(STAGES["00_naive"], 64, THREADS=256)["THREADS"] == 256


@pytest.mark.parametrize("stage_id", [one for one in journey.RUNGS if one != "00_naive"])
def test_shared_memory_is_as_large_as_what_was_launched(stage_id: str, shown: Results) -> None:
    """At tunables that were tuned the tiles are others: those of the record are taken."""
    stage = STAGES[stage_id]
    row = next((one for one in shown.rows() if one.name == stage_id), None)
    if row is None:
        pytest.skip(f"{stage_id} is on no record of {shown.gpu}")
    assert row.cubin is not None
    macros = row.cubin.parameters
    members = text.shared_memory(stage, 64, **macros)
    end = members[-1].offset + members[-1].size
    assert end <= row.cubin.dynamic_smem_bytes < end + 1024, "the whole is rounded up to its alignment"
    assert text.constants(stage, 64, **macros)["THREADS"] == row.cubin.threads


def test_every_mbarrier_has_its_arrivals_and_its_line_in_the_table() -> None:
    stage = STAGES["16_ones_column"]
    names = {one.name for one in text.shared_memory(stage, 64) if one.kind == "ptx::Mbarrier"}
    assert names == text.arrivals(stage, 64).keys() == drawings._WAITING.keys()
    assert text.arrivals(stage, 64)["K_empty"] == 3 * 4
    table = drawings.barriers()
    assert all(f"`{name}`" in table for name in names)


def test_an_excerpt_that_the_source_no_longer_has_is_refused() -> None:
    stage = STAGES["05_wmma"]
    with pytest.raises(ParameterError, match=r"05_wmma.cu: wanted one line with 'no such line', found 0"):
        text.lines(stage, Excerpt(first="no such line"))
    with pytest.raises(ParameterError, match="wanted one line with '__syncwarp', found"):
        text.lines(stage, Excerpt(first="__syncwarp"))
    with pytest.raises(ParameterError, match="wanted a line with 'never' from 'FragC"):
        text.lines(stage, Excerpt(first="FragC O_frag[HEAD_DIM", last="never"))


# --- The journey ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage_id", journey.RUNGS)
def test_key_lines_are_of_the_diff(stage_id: str) -> None:
    stage = STAGES[stage_id]
    lines = [line for one in stage.key_lines for line in text.lines(stage, one)]
    assert 2 <= len(lines) <= 9
    if stage.parent:
        parents = registry.get(stage.parent).source.read_text(encoding="utf-8")
        assert any(line.strip() not in parents for line in lines), "none of these lines is new"


def test_the_page_goes_through_every_rung_in_order() -> None:
    assert len(journey.RUNGS) == 18, "the page's introduction counts them"
    assert set(journey.RUNGS) <= set(registry.CUDA_STAGES)
    places = [PAGE.index(f'--8<-- "journey/{stage_id}.md:heading"') for stage_id in journey.RUNGS]
    assert places == sorted(places)
    for stage_id in journey.RUNGS:
        for section in ("heading", "lines", "score", "links"):
            assert PAGE.count(f'--8<-- "journey/{stage_id}.md:{section}"') == 1
        timeline = f'--8<-- "timelines/journey/{stage_id}.md"' in PAGE
        assert timeline or journey.drawings_of(STAGES[stage_id]), f"{stage_id} has no drawing"
    for name in drawings.DRAWINGS:
        assert f'--8<-- "journey/drawing-{name}.md"' in PAGE
    assert 4000 <= len(PAGE.split()) <= 6000


def test_what_a_rung_shows_is_its_prediction_and_its_record(tmp_path: Path, shown: Results) -> None:
    out = pages.Output(root=tmp_path)
    journey.write(out, shown, DATA)
    for stage_id in journey.RUNGS:
        stage = STAGES[stage_id]
        said = (tmp_path / "snippets" / "journey" / f"{stage_id}.md").read_text(encoding="utf-8")
        assert stage.prediction.strip() in said
        assert f"stages/{stage_id}.md" in said
        row = next((one for one in shown.rows() if one.name == stage_id), None)
        assert row is None or f"**Measured:** {number(select.rate(row))} TFLOP/s" in said
        assert "**×1.00**" not in said, "bold says slower"
    slower = (tmp_path / "snippets" / "journey" / "10_warp_specialized.md").read_text(encoding="utf-8")
    assert re.search(r"\| over parent \| \*\*×0\.\d+\*\*", slower), "a rung that lost says so in bold"
    assert "<figure" in (tmp_path / "snippets" / "journey" / "trained.md").read_text(encoding="utf-8")


# --- Timelines --------------------------------------------------------------------------------------------------------

READINGS = chip.newest("nvidia-h200", DATA)
RATES = cycle_model.rates_of(READINGS, store.newest_ceilings("nvidia-h200", DATA))
ORDER = {
    "08_swizzle": ("exponentiate(0,", "exponentiate(step + 1,", "multiply_QK(step, K_at)", "multiply_PV(step, P_frag"),
    "09_wgmma": ("fetch(tile + ", "multiply_QK<", "wait_group<0>", "softmax<", "multiply_PV<", "wait_group<0>"),
    "10_warp_specialized": ("multiply_QK<", "wait_group<0>", "K_empty", "softmax<", "multiply_PV<", "V_empty"),
    "11_pingpong": ("issue_QK(tile)", "issue_PV(tile - 1)", "wait_group<OVERLAP ? 1", "softmax_of(tile)", "V_empty"),
    "12_persistent": ("issue_QK(tile)", "issue_PV(tile - 1)", "wait_group<OVERLAP &&", "softmax_of(tile)", "V_empty"),
    "13_tma_store": ("issue_QK(", "issue_PV(", "wait_group<1>", "exact_softmax(tile)", "wait_group<0>", "V_empty"),
}
"""What stands in the loop over the tiles of K and V, or in what it calls, one after the other."""
LOOPS = {
    "08_swizzle": "const auto process_tile =",
    "11_pingpong": "for (int tile = 1; tile < work.num_tiles",
    "12_persistent": "for (int tile = 1; tile < num_tiles",
    "13_tma_store": "for (; tile >= 0; --tile) {\n      if (!K_ready)",
}


def timeline(stage_id: str) -> Chart:
    return timelines.draw(stage_id, READINGS, DATA)


def modelled(stage_id: str) -> cycle_model.Kernel:
    kernel = cycle_model.kernel_of(stage_id, 64, STAGES[stage_id].parameters(64))
    assert kernel is not None
    return kernel


def unlike(stage_id: str) -> set[str]:
    """Constants of a kernel's source that its timeline does not have."""
    kernel, known = modelled(stage_id), text.constants(STAGES[stage_id], 64)
    producers = 1 if stage_id >= "10" else 0
    drawn = {"TILE_Q": kernel.tile_rows, "TILE_KV": kernel.keys, "THREADS": 128 * (kernel.groups + producers)}
    drawn |= {"KEY_STEPS": kernel.interleaved} if stage_id == "08_swizzle" else {"WGMMA_ROWS": kernel.group_rows}
    return {name for name, value in drawn.items() if known[name] != value}


@pytest.mark.parametrize("stage_id", timelines.NOTES)
def test_a_timeline_is_of_its_kernel(stage_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not unlike(stage_id)
    source = STAGES[stage_id].source.read_text(encoding="utf-8")
    at = source.index(LOOPS.get(stage_id, "for (int tile = 0; tile < "))
    for words in ORDER[stage_id]:
        at = source.find(words, at + 1)
        assert at > 0, f"{words} no longer follows"
    real = text.constants
    for name in ("TILE_Q", "TILE_KV", "THREADS"):
        changed = {name: real(STAGES[stage_id], 64)[name] * 2}
        monkeypatch.setattr(text, "constants", lambda *what, to=changed, **macros: real(*what, **macros) | to)
        assert unlike(stage_id) == {name}


def test_a_timeline_follows_its_tunables(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = timeline("09_wgmma"), registry.Stage.parameters
    monkeypatch.setattr(registry.Stage, "parameters", lambda self, *what: {**real(self, *what), "TILE_KV": 64})
    after = timeline("09_wgmma")
    assert ("128 keys per tile" in before.caption, "64 keys per tile" in after.caption) == (True, True)
    assert before.svg != after.svg


@pytest.mark.parametrize("stage_id", timelines.NOTES)
def test_a_timeline_is_to_scale(stage_id: str) -> None:
    """Bars are as long as the model's steps or, where several share a unit, longer; loads as long as a reading."""
    kernel = modelled(stage_id)
    uses = timelines.uses_of(cycle_model.moments_of(kernel, RATES))
    steps = cycle_model.steps_of(kernel, RATES)
    issued = next(step.amount for step in steps if step.name == "QK" and step.kind == "issue")
    fastest = kernel.group_rows * kernel.keys / max(RATES.softmax.alone.values())
    for (_, name), spans in uses.items():
        lengths = [span.stop - span.start for span in spans[1:-1]]
        assert min(lengths) >= (fastest / kernel.interleaved if name == "softmax" else issued) - 1e-3
    if kernel.uses_wgmma:
        kib = 32 if stage_id == "09_wgmma" else kernel.keys // 8
        loads = timelines.copies_of(kernel, uses, READINGS)
        assert {round(span.stop - span.start, 3) for span in loads} == {READINGS[f"bulk_copy_{kib}_kib"].value}
        assert [span.words for span in loads[:4]] == ["K", "V", "K", "V"]


def test_a_timeline_of_a_load_that_was_not_measured_says_so() -> None:
    kernel = modelled("10_warp_specialized")
    uses = timelines.uses_of(cycle_model.moments_of(kernel, RATES))
    with pytest.raises(NoDataError, match="bulk_copy_12_kib"):
        timelines.copies_of(replace(kernel, keys=96), uses, READINGS)


def test_without_readings_a_timeline_says_so(tmp_path: Path) -> None:
    timelines.page(pages.Output(root=tmp_path / "site"), select.load("", tmp_path), tmp_path)
    for stage_id in timelines.NOTES:
        for folder in ("stages", "journey"):
            said = tmp_path / "site" / "snippets" / "timelines" / folder / f"{stage_id}.md"
            assert "flashlab chip" in said.read_text(encoding="utf-8")
        stage_page = (SITE / "stages" / f"{stage_id}.md").read_text(encoding="utf-8")
        assert f'--8<-- "timelines/stages/{stage_id}.md"' in stage_page


# --- Drawings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*drawings.DRAWINGS, *timelines.NOTES])
def test_a_drawing_is_whole_in_every_layout_and_theme(name: str) -> None:
    chart = timeline(name) if name in timelines.NOTES else drawings.DRAWINGS[name]()
    assert len(chart.alt) > 60
    assert chart.caption.endswith(".")
    for layout in LAYOUTS:
        for theme in THEMES:
            ET.fromstring(chart.themed(layout, theme))


def test_a_drawing_follows_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawings.DRAWINGS["tiles"]().alt
    real = text.constants
    monkeypatch.setattr(text, "constants", lambda *what, **macros: real(*what, **macros) | {"TILE_KV": 32})
    assert "For each tile of 32 keys" in drawings.DRAWINGS["tiles"]().alt != before


def test_fragments_lie_as_the_header_of_the_instruction_says() -> None:
    """kernels/common/mma.cuh: with g = lane / 4 and t = lane % 4, columns 2·t and 2·t + 1 of rows g and g + 8."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for row, column in ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)):
            assert drawings.lane_of(row, column, 4) == lane


def test_swizzle_and_padding_avoid_the_conflict_that_plain_rows_have() -> None:
    assert [drawings.conflicts(**what) for what in drawings.swizzle_layouts().values()] == [8, 1, 1]
    source = STAGES["08_swizzle"].source.read_text(encoding="utf-8")
    assert text.constants(STAGES["08_swizzle"], 64)["SWAPPED_CHUNKS"] == 8
    assert "chunk ^ row / (MATRIX / SWAPPED_CHUNKS) % SWAPPED_CHUNKS" in source, "bank_of swizzles as the kernel does"


def test_the_site_has_the_page_in_its_navigation() -> None:
    assert "journey.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
