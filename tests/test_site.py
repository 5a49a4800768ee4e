"""What the report generates, and that it is generated from the records."""

from __future__ import annotations

import csv
import dataclasses
import errno
import gzip
import hashlib
import lzma
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from shared import without_variants
from synthetic import MISSING_PEER_REASON, RUN, measurement, profile, write_checks, write_partial, write_synthetic

import flashlab
from flashlab.core.errors import NoDataError, OutputError, ParameterError, ReportError
from flashlab.core.paths import NOTEBOOKS, ROOT, SITE
from flashlab.core.problem import FIRST_SHAPE, Problem, suite
from flashlab.experiments import effects, levers
from flashlab.experiments.effects import LEVER_NOT_MEASURED
from flashlab.kernels import registry
from flashlab.kernels.registry import STAGES
from flashlab.measure import tuned
from flashlab.query import contests, predictions, select
from flashlab.query.rows import headline
from flashlab.record import schema, store
from flashlab.record.checks import CheckRow
from flashlab.record.schema import Status
from flashlab.show import pages as content
from flashlab.show import site, tables
from flashlab.show.notebook import NOTHING_YET

LAST = next(reversed(registry.CUDA_STAGES))
SECTIONS = ("Question", "Result", "Change", "Why", "Prediction", "Next", "Every measurement", "The code")


@pytest.fixture(scope="module")
def pages(report: Path) -> Path:
    """site/ with everything generated from made-up records."""
    return report / "pages"


def test_a_report_writes_nothing_outside_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(root: Path, data: Path, **_: object) -> None:
        content.Output(root=root).text("nav.json", "[]")

    monkeypatch.setattr(content, "generate", generate)
    before = {path: path.stat().st_mtime_ns for path in SITE.rglob("*")}
    folders = [site.write_pages(tmp_path / name, data=tmp_path / "data") for name in ("one", "other")]
    assert {path: path.stat().st_mtime_ns for path in SITE.rglob("*")} == before
    for folder in folders:
        assert (folder / "index.md").read_bytes() == (SITE / "index.md").read_bytes()
        assert (folder / "generated" / "nav.json").is_file()


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        site.write_pages(tmp_path, data=tmp_path / "data")
    assert str(caught.value).count("No space left") == 1


def test_every_stage_has_one_page_with_every_section() -> None:
    written = {path.stem for path in (SITE / "stages").glob("*.md")} - {"index"}
    assert written == set(STAGES)
    for stage_id in STAGES:
        text = (SITE / "stages" / f"{stage_id}.md").read_text(encoding="utf-8")
        assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == SECTIONS
        for section in ("title", "question", "result", "change", "prediction", "measured", "code"):
            assert f'--8<-- "stages/{stage_id}.md:{section}"' in text


def test_the_front_holds_the_stages_against_the_library_that_lacks_the_first_type_too(tmp_path: Path) -> None:
    half, other = Problem.parse(FIRST_SHAPE), Problem.parse(FIRST_SHAPE, dtype="bfloat16")
    unfit = measurement("fa3", half).model_copy(
        update={"status": "unsupported", "reason": "bfloat16 alone", "samples": (), "verdict": None}
    )

    def timed(name: str, problem: Problem, time_us: float) -> schema.Measurement:
        row = measurement(name, problem)
        taken = next(one for one in row.samples if (one.regime, one.cache) == ("burst", "hot"))
        changes = {"time_us": (time_us,), "sm_clock_mhz": (), "call_clock_mhz": (), "cycles_per_score": None}
        return row.model_copy(update={"samples": (taken.model_copy(update=changes),)})

    path = tmp_path / "data" / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    for row in (
        timed(LAST, half, 100.0),
        timed("sdpa_cudnn", half, 130.0),
        unfit,
        timed(LAST, other, 100.0),
        timed("fa3", other, 120.0),
    ):
        store.append(path, row)
    out = content.Output(root=tmp_path / "generated")
    content._front_page(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    text = (out.root / "snippets" / "front-numbers.md").read_text(encoding="utf-8")
    in_bfloat16, in_float16 = text.index("<dd>120 %</dd>"), text.index("<dd>130 %</dd>")
    assert in_bfloat16 < in_float16
    assert "of the fastest library in bfloat16, FlashAttention-3 (of 1 timed)<" in text
    assert "FlashAttention-3: the wheel (fa3-fwd) lacks float16" in text
    assert "B16 H16 S2048 D64 full float16, on normally distributed inputs of unit scale" in text
    finding = (out.root / "snippets" / "front-finding.md").read_text(encoding="utf-8")
    assert f"[`{LAST}`](stages/{LAST}.md), the version that flashlab runs there by default" in finding
    assert "**1.30 times** the rate of cuDNN" in finding
    assert "at B16 H16 S2048 D64 full float16, on normally distributed inputs of unit scale" in finding
    assert "No library is faster at any problem" in (out.root / "snippets" / "losses.md").read_text(encoding="utf-8")


def test_the_front_says_where_a_library_is_faster(tmp_path: Path) -> None:
    problems = [Problem.parse(FIRST_SHAPE), Problem.parse(FIRST_SHAPE, mask="causal")]
    path = tmp_path / "data" / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    for problem, ours, theirs in zip(problems, (100.0, 100.0), (120.0, 80.0), strict=True):
        for name, time_us in (("16_ones_column", ours), ("sdpa_cudnn", theirs)):
            row = measurement(name, problem)
            taken = next(one for one in row.samples if (one.regime, one.cache) == ("burst", "hot"))
            changes = {"time_us": (time_us,), "sm_clock_mhz": (), "call_clock_mhz": (), "cycles_per_score": None}
            store.append(path, row.model_copy(update={"samples": (taken.model_copy(update=changes),)}))
    out = content.Output(root=tmp_path / "generated")
    content._front_page(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    snippets = out.root / "snippets"
    assert "A library is faster at 1 of the 2 problems compared" in (snippets / "front-finding.md").read_text("utf-8")
    assert "| B16 H16 S2048 D64 causal float16 | ×0.800 |" in (snippets / "losses.md").read_text("utf-8")
    finding = (snippets / "front-finding.md").read_text("utf-8")
    assert "the fastest version timed there that flashlab may choose" in finding
    assert f"There flashlab runs [`{LAST}`](stages/{LAST}.md) by default, not timed there yet." in finding
    # By the table of choices, where there is one.
    stage, shape = registry.get("12_persistent"), problems[0]
    chosen = schema.ChoiceRow(
        stage=stage.id,
        **{name: getattr(shape, name) for name in ("shape", "mask", "dtype")},
        parameters=stage.parameters(shape.head_dim),
        time_us=99.0,
        tile_q=192,
        variants=0,
        run=RUN,
    )
    (path.parent.parent / "tuned.json").write_text(tuned.table_text("sm_90a", 132, [chosen]), encoding="utf-8")
    content._front_page(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    assert "There flashlab runs [`12_persistent`]" in (snippets / "front-finding.md").read_text("utf-8")
    cards = (snippets / "front-numbers.md").read_text("utf-8")
    assert cards.index("worst of 2 comparisons") < cards.index("best of 2 on normal and trained inputs")
    # The last rung was timed too, and is slower: the page shows the faster one, which is then not the newest.
    store.append(path, measurement(LAST, problems[0]))
    content._front_page(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    assert "newest" not in (snippets / "front-finding.md").read_text("utf-8")
    assert "newest" not in (snippets / "front-numbers.md").read_text("utf-8")


def test_a_stage_that_this_gpu_has_not_timed_shows_what_another_one_has(tmp_path: Path) -> None:
    """And says whose that is; a new rung is not without numbers until the main GPU is there."""
    here, there, third = "nvidia-h200", "nvidia-h100-80gb-hbm3", "nvidia-z100"
    timed = ((here, "00_naive", RUN), (there, LAST, "20260103T030000Z-0123abc"), (third, "00_naive", RUN))
    for gpu, name, run in timed:
        folder = tmp_path / gpu / "runs"
        folder.mkdir(parents=True)
        row = measurement(name, Problem.parse(FIRST_SHAPE), run=run)
        hardware = row.gpu.model_copy(update={"slug": gpu, "name": gpu.upper()})
        store.append(folder / f"{run}.jsonl", row.model_copy(update={"gpu": hardware}))
    shown = select.load(here, tmp_path)
    assert select.with_stage(shown, "00_naive", tmp_path) is shown
    assert select.with_stage(shown, "05_wmma", tmp_path) is shown
    out = content.Output(root=tmp_path / "generated")
    content._stage_page(out, STAGES[LAST], shown, tmp_path)
    text = (out.root / "snippets" / "stages" / f"{LAST}.md").read_text(encoding="utf-8")
    assert f"\n{there.upper()} · SM " in text
    assert "was written about" not in text, "what follows is about the GPU that timed it"
    assert there in text
    # The same where a third GPU is shown.
    content._stage_page(out, STAGES[LAST], select.load(third, tmp_path), tmp_path)
    text = (out.root / "snippets" / "stages" / f"{LAST}.md").read_text(encoding="utf-8")
    assert f"\n{there.upper()} · SM " in text
    assert "the numbers are those of" not in text


def test_a_stage_page_gives_the_gain_over_a_parent_of_another_session(tmp_path: Path) -> None:
    """From the newest run that timed both, as the journey does."""
    first, folder = Problem.parse(FIRST_SHAPE), tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    earlier, later = "20260102T030000Z-0123abc", "20260105T030000Z-4567def"
    timed = ((earlier, "08_swizzle", "09_wgmma"), (later, "09_wgmma", "10_warp_specialized", "11_pingpong"))
    for run, *names in timed:
        for name in names:
            store.append(folder / f"{run}.jsonl", measurement(name, first, run=run))
    shown, out = select.load("nvidia-h200", tmp_path), content.Output(root=tmp_path / "generated")
    content._stage_page(out, STAGES["09_wgmma"], shown, tmp_path)
    text = (out.root / "snippets" / "stages" / "09_wgmma.md").read_text(encoding="utf-8")
    gain = tables.times(select.speedup(*predictions.pair(shown, first, "09_wgmma", "08_swizzle")))
    assert f" TFLOP/s**: **{gain}** over `08_swizzle`, in a run that timed both" in text
    by_length = text.partition("[start:lengths]")[2].partition("[end:lengths]")[0]
    assert f"\n| S2048 | {gain} | – | – | – |\n" in by_length
    assert "| S512 | – | – | – | – |" in by_length
    result = text.partition("[start:result]")[2].partition("[end:result]")[0]
    for condition in (first.label, "on normally distributed inputs", shown.name):
        assert result.count(condition) == 1, "in the line below, with clocks, date and commit"
    assert re.search(rf"\| {re.escape(first.label)} \| \S+ \| {gain} \|", text)


def test_what_another_session_timed_says_so(tmp_path: Path) -> None:
    first, folder = Problem.parse(FIRST_SHAPE), tmp_path / "data" / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    earlier, later = "20260102T030000Z-0123abc", "20260105T030000Z-4567def"
    for run, name in ((earlier, "00_naive"), (later, "15_renormalize"), (later, "16_ones_column")):
        store.append(folder / f"{run}.jsonl", measurement(name, first, run=run))
    shown, out = select.load("nvidia-h200", tmp_path / "data"), content.Output(root=tmp_path / "generated")
    assert [row.name for row in select.elsewhere(shown.rows())] == ["00_naive"]
    content._front_page(out, shown, tmp_path / "data")
    assert "over 00_naive, timed in another session<" in (out.root / "snippets" / "front-numbers.md").read_text()
    assert "(2026-01-02 to 2026-01-05)" in out.rendered("conditions.md", "journey.md", shown=shown)


def test_ratios_and_errors_by_kind_are_noted_as_missing_where_they_are(pages: Path) -> None:
    for name, of in (("against-inputs.md", "inputs"), ("against-features.md", "windows"), ("accuracy.md", "inputs")):
        text = (pages / "generated" / "snippets" / name).read_text(encoding="utf-8")
        assert f"on record for this GPU yet: `flashlab bench --suite {of}` makes them" in text
    taken_in = {
        "index": ["against-inputs"],
        "against": ["against-inputs", "against-features"],
        "correctness": ["accuracy"],
    }
    for page, names in taken_in.items():
        text = (SITE / f"{page}.md").read_text(encoding="utf-8")
        assert all(f'--8<-- "{name}.md"' in text for name in names)


def test_ratios_and_errors_by_kind_are_the_records_and_say_where_they_are_from(tmp_path: Path) -> None:
    rows = [
        measurement(name, Problem.parse(shape, dtype="bfloat16", inputs=kind))
        for shape in (FIRST_SHAPE, "4x16x8192x64")
        for kind in ("normal", "rising")
        for name in ("16_ones_column", "sdpa_cudnn", "fa3")
    ]
    path = tmp_path / "data" / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    for row in rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.append(path, row)
    out = content.Output(root=tmp_path / "generated")
    content._inputs_and_errors(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    ratios, errors = (
        (out.root / "snippets" / name).read_text(encoding="utf-8") for name in ("against-inputs.md", "accuracy.md")
    )
    found = contests.against_peers("nvidia-h200", tmp_path / "data", ("normal", "rising"))
    assert [one.problem.inputs for one in found] == ["normal", "rising"] * 2
    for one in found:
        assert one.burst is not None
        assert re.search(rf"\| `{one.problem.inputs}` \|.* ×{tables.number(one.burst.ratio)}", ratios.replace("*", ""))
        assert f"| `{one.problem.inputs}` | ×1.00 · " in errors  # every made-up root mean square is the same
    summaries = re.findall(
        r"<summary>(.*), 2 of 13 kinds: at the lowest ×[0-9.]+, on (?:normal|rising)</summary>", ratios
    )
    assert summaries == ["Longer sequences", "Under sustained load", "Longer sequences under sustained load"]
    for text in (ratios, errors):
        assert text.rstrip().endswith("2026-01-02 · commit 0123abc</small>")


def test_windows_and_soft_caps_stand_beside_the_same_run_without_them(tmp_path: Path) -> None:
    plain = Problem.parse("4x16x8192x128", mask="causal", dtype="bfloat16")
    window, softcap = dataclasses.replace(plain, window=(511, -1)), dataclasses.replace(plain, softcap=50.0)
    rows = [measurement("16_ones_column", one) for one in (plain, window, softcap)]
    path = tmp_path / "data" / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    for row in (*rows, measurement("fa3", plain), measurement("fa3", softcap)):
        store.append(path, row)
    out = content.Output(root=tmp_path / "generated")
    content._inputs_and_errors(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    text = (out.root / "snippets" / "against-features.md").read_text(encoding="utf-8")
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    us = {one.problem.features: one.samples[0].median_us for one in rows}
    of_window = lines["B4 H16 S8192 D128 causal bfloat16 window 511:-1"]
    assert of_window[0] == "`16_ones_column`"
    assert of_window[1] == tables.mhz(us["window",])
    assert of_window[3:] == [tables.times(us[()] / us["window",]), "–", "–", "–"]
    of_cap = lines["B4 H16 S8192 D128 causal bfloat16 softcap 50"]
    assert of_cap[4] == tables.short_title("fa3")
    assert of_cap[-1].startswith("×")
    assert text.rstrip().endswith("2026-01-02 · commit 0123abc</small>")


def test_stage_pages_show_diff_result_and_data(pages: Path) -> None:
    shown = select.load("nvidia-h200", pages.parent / "data")
    for stage in STAGES.values():
        text = (pages / "generated" / "snippets" / "stages" / f"{stage.id}.md").read_text(encoding="utf-8")
        for section in ("title", "question", "result", "change", "prediction", "measured", "code"):
            assert text.count(f"[start:{section}]") == text.count(f"[end:{section}]") == 1
        assert stage.question in text
        assert stage.prediction in text
        of_one_language = stage.parent is not None and STAGES[stage.parent].language == stage.language
        assert of_one_language == ("lines added" in text)
        row = next(row for row in shown.rows() if row.name == stage.id)
        assert f"**{tables.number(select.rate(row))} TFLOP/s**" in text
        assert f"../generated/data/nvidia-h200/runs/{RUN}.jsonl.gz" in text
        inputs = "on normally distributed inputs of unit scale"
        source = rf"SM [\d–]+ MHz · B16 H16 S2048 D64 full float16 · {inputs} · burst, hot L2 · 2026-01-02 · commit"
        assert re.search(source, text)


def test_diff_turns_the_parent_into_the_stage() -> None:
    for stage in STAGES.values():
        diff = content.diff_against_parent(stage).splitlines()
        if stage.parent is None or STAGES[stage.parent].language != stage.language:
            assert not diff
            continue
        source = set(stage.source.read_text(encoding="utf-8").splitlines())
        assert {line[1:] for line in diff[2:] if line.startswith("+")} <= source


def test_what_has_no_time_is_named_with_its_reason(pages: Path) -> None:
    text = (pages / "generated" / "results" / "nvidia-h200.md").read_text(encoding="utf-8")
    assert tables.prose(MISSING_PEER_REASON) in text
    assert "Stage 00_naive takes float16, got bfloat16" in text


def lever_record(level: str, factor: float) -> schema.Ablation:
    """A made-up record of a lever that takes `factor` times as long as its stage."""
    row = measurement("13_overlap", Problem.parse(FIRST_SHAPE, dtype="bfloat16")).model_dump(mode="json")
    row = {name: row[name] for name in schema.Ablation.model_fields if name in row and name != "kind"}
    samples = row["samples"][0]
    samples |= {"time_us": [factor * one for one in samples["time_us"]], "cycles_per_score": None}
    fields = {"axis": levers.AXIS, "level": level, "stage": "13_overlap", "parameters": row["cubin"]["parameters"]}
    return schema.Ablation.model_validate({**row, **fields, "samples": [samples]})


@pytest.fixture(scope="module")
def long_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of results, two stages and levers, generated from made-up records of two lengths, and of a profile."""
    root = tmp_path_factory.mktemp("lengths")
    lengths = [problem for problem in suite("lengths") if problem.shape in ("64x16x512x64", "16x16x2048x64")]
    write_synthetic(root / "data", problems=lengths)
    metrics = {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 61.25,
        "dram__bytes_read.sum": 2e8,
        "dram__bytes_write.sum": 1e8,
    }
    one = profile("06_cp_async", Problem.parse(FIRST_SHAPE), metrics=metrics, samples={"barrier": 5})
    folder = root / "data" / "nvidia-h200" / "profiles"
    folder.mkdir()
    store.append(folder / f"{RUN}.jsonl", one)
    folder = root / "data" / "nvidia-h200" / "ablations"
    folder.mkdir()
    for level, factor in ((levers.AS_IT_IS, 1.0), (levers.names()[0], 1.25)):
        store.append(folder / f"{RUN}.jsonl", lever_record(level, factor))
    store.write_checksums("nvidia-h200", root / "data")
    shown, out = select.load("nvidia-h200", root / "data"), content.Output(root=root / "pages" / "generated")
    content._results_page(out, shown, root / "data")
    for stage_id in ("00_naive", "06_cp_async"):
        content._stage_page(out, STAGES[stage_id], shown, root / "data")
    effects.levers_page(out, shown, root / "data")
    return root / "pages"


def test_the_results_page_shows_ratios_costs_and_profiles(long_pages: Path) -> None:
    data = long_pages.parent / "data"
    text = (long_pages / "generated" / "results" / "nvidia-h200.md").read_text(encoding="utf-8")
    for one in contests.against_peers("nvidia-h200", data):
        assert one.burst is not None
        assert f"| {one.problem.label} | ×{tables.number(one.burst.ratio)} |" in text
    shown = select.load("nvidia-h200", data)
    assert tables.costs(shown.rows()) in text
    for one in shown.problems:
        where = f"gpu=nvidia-h200&shape={one.shape}&dtype={one.dtype}&mask={one.mask}"
        assert f"[{one.label}](../../explorer.md?{where})" in text
    assert "61.2 %" in text
    assert "Barrier 100 %" in text
    assert f"profiles/{RUN}.jsonl" in text
    assert not store.verify("nvidia-h200", data)


def test_a_stage_page_names_sustained_rate_cycles_energy_and_its_profile(long_pages: Path) -> None:
    shown = select.load("nvidia-h200", long_pages.parent / "data")
    folder = long_pages / "generated" / "snippets" / "stages"
    text = (folder / "06_cp_async.md").read_text(encoding="utf-8")
    row = next(row for row in shown.rows() if row.name == "06_cp_async")
    line = next(x for x in text.splitlines() if x.startswith(f"| {row.problem.label} |"))
    burst, sustained = headline(row), headline(row, "sustained")
    energy = sustained["energy_j_per_call"]
    assert isinstance(energy, float)
    for value in (burst["tflops"], sustained["tflops"], burst["cycles_per_score"], 1e3 * energy):
        assert isinstance(value, float)
        assert f" {tables.number(value)} |" in line
    assert "Unit utilisation" in text
    assert "61.2 %" in text
    assert "| 300 |" in text
    assert "06_cp_async.cu:7" in text
    # A stage without a profile, and without one of its parent, says nothing of units.
    assert "Unit utilisation" not in (folder / "00_naive.md").read_text(encoding="utf-8")


def test_the_levers_page_shows_diff_prediction_and_what_came(long_pages: Path, pages: Path) -> None:
    measured, *others = levers.choose()
    text, empty = (
        (folder / "generated" / "snippets" / "levers.md").read_text(encoding="utf-8") for folder in (long_pages, pages)
    )
    for lever in (measured, *others):
        assert empty.count(f"(`{lever.name}`,") == 1
        assert lever.question in empty
        assert lever.prediction in empty
        assert lever.shown_diff().splitlines()[2] in empty
    assert empty.count(LEVER_NOT_MEASURED) == 1 + len(others)
    assert text.count(LEVER_NOT_MEASURED) == len(others)
    assert re.search(r"D64 full bfloat16 \| slower \| [\d.]+ \| [\d.]+ \| 1\.250 \(1\.2\d\d to 1\.2\d\d\)", text)
    assert text.count(f"(generated/data/nvidia-h200/ablations/{RUN}.jsonl.xz)") == 1
    assert (pages / "generated" / "snippets" / "levers-chart.md").read_text(encoding="utf-8").strip() == (
        LEVER_NOT_MEASURED
    )
    assert "figures/levers.wide.light.svg" in (long_pages / "generated" / "snippets" / "levers-chart.md").read_text(
        encoding="utf-8"
    )


def test_a_lever_that_no_longer_fits_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = levers.choose(levers.names()[:1])[0]
    stale = dataclasses.replace(stale, diff=stale.diff.replace("\n ", "\n no such line ", 1))
    monkeypatch.setattr(levers, "choose", lambda: (stale,))
    effects.levers_page(content.Output(root=tmp_path), select.load("", tmp_path), tmp_path)
    text = (tmp_path / "snippets" / "levers.md").read_text(encoding="utf-8")
    assert "which no longer applies to the stage" in text
    assert " no such line" in text


def test_what_was_not_measured_is_said(pages: Path) -> None:
    text = (pages / "generated" / "results" / "nvidia-h200.md").read_text(encoding="utf-8")
    snippets = pages / "generated" / "snippets"
    for name, command in (
        ("levers", "flashlab ablate --levers"),
        ("checks", "flashlab check --random 2000 --record"),
        ("sanitizer", "python scripts/sanitize.py"),
    ):
        assert f"`{command}`" in (snippets / f"{name}.md").read_text(encoding="utf-8")
    assert "Units and warps" not in text


def test_method_counts_the_comparisons_on_record(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", problems=[Problem.parse(FIRST_SHAPE)])
    first = Problem.parse(FIRST_SHAPE)
    lines = [
        CheckRow(stage=stage, problem=first, layout=layout, status="ok")
        for stage in STAGES
        for layout in ("contiguous", "padded")
    ]
    lines[-1] = dataclasses.replace(lines[-1], status="wrong", reason="made up")
    path = write_checks(tmp_path / "data" / "nvidia-h200" / "checks" / f"{RUN}.jsonl", lines)
    out = content.Output(root=tmp_path / "generated")
    later = path.with_name("20260109T030405Z-0123abc.jsonl")  # of one stage
    write_checks(later, [dataclasses.replace(lines[-1], reason="fails since")])
    content.check_records(out, select.load_all(tmp_path / "data"), tmp_path / "data")
    text = (out.root / "snippets" / "checks.md").read_text(encoding="utf-8")
    whole, since = text.splitlines()[2:]
    such = f"1, such as `{lines[-1].stage}` at {first.label}: made up"
    counts = f"| contiguous, padded | {len(STAGES)} | 1 | {len(lines)} | {len(lines) - 1} | 0 | "
    assert counts in whole
    assert such in whole
    assert "| 1 | 1 | 1 | 0 | 0 |" in since
    assert "fails since" in since
    assert f"generated/data/nvidia-h200/checks/{RUN}.jsonl.xz" in text


def test_links_of_a_notebook_hold_on_its_page(pages: Path) -> None:
    found = 0
    for name, page in site.PAGE_OF.items():
        text = (pages / "generated" / "snippets" / "notebooks" / f"{name}.md").read_text(encoding="utf-8")
        assert "../site/" not in text
        assert text.startswith("## " if "#" in page else "# ")
        for link in re.findall(r"\]\(([^)#:]+\.md)", text):
            assert ((pages / page).parent / link).is_file(), f"{name}: {link}"
            found += 1
    assert found


def test_conclusions_about_another_gpu_are_labelled(pages: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", "nvidia-a100", problems=suite("first")[:1])
    shown, out = select.load("nvidia-a100", tmp_path / "data"), content.Output(root=tmp_path / "generated")
    content._stage_page(out, STAGES["09_wgmma"], shown, tmp_path / "data")
    for name in ("04_roofline", "06_cycle_model"):
        content._notebook_page(out, name, site.PAGE_OF[name], None, shown)
    files = ("stages/09_wgmma.md", "notebooks/04_roofline.md", "notebooks/06_cycle_model.md")
    for root, labelled in ((tmp_path, True), (pages, False)):
        for file in files:
            text = (root / "generated" / "snippets" / file).read_text(encoding="utf-8")
            assert ("was written about the H200; the numbers are those of the" in text) is labelled, file
    assert text.startswith("# ")


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of a whole GPU, and later ones of another at one problem, with half of the ladder and its libraries."""
    data = tmp_path_factory.mktemp("gpus") / "data"
    write_synthetic(data)
    write_partial(data)
    return data


def test_a_partial_gpu_is_marked_and_never_takes_over(two_gpus: Path, tmp_path: Path) -> None:
    everything = select.load_all(two_gpus)
    assert [one.gpu for one in everything] == ["nvidia-h200", "nvidia-h100"]
    assert everything[0].lacking == ""
    lacking = f"{len(STAGES) // 2} of {len(STAGES)} stages at B16 H16 S2048 D64 full float16 and 19 of the 20 problems"
    assert lacking in everything[1].lacking
    out = content.Output(root=tmp_path / "generated")
    content._results_page(out, everything[1], two_gpus)
    assert lacking in (out.root / "results" / "nvidia-h100.md").read_text(encoding="utf-8")
    assert [(one["slug"], one["partial"], one["main"]) for one in content._gpus(everything[0], everything)] == [
        ("nvidia-h200", False, True),
        ("nvidia-h100", True, False),
    ]
    content._lists(out, everything)
    listed = (out.root / "snippets" / "results.md").read_text(encoding="utf-8")
    assert re.search(r"H200.*\| complete \|", listed)
    assert re.search(r"H100.*\| partial \|", listed)


def test_gpus_are_compared_at_the_same_problems_with_clocks_power_and_ratio(two_gpus: Path, tmp_path: Path) -> None:
    everything, out = select.load_all(two_gpus), content.Output(root=tmp_path / "generated")
    text = content._compared(out, everything, two_gpus)
    machines, ladder, burst, sustained = text.split("\n## ")[0:4]
    assert f"The H100 is partial: it lacks {len(STAGES) // 2} of {len(STAGES)} stages" in machines
    assert "| SMs | 132 | 132 |" in machines
    common = [name for name in list(STAGES)[::2] if name in {row.name for row in everything[0].rows()}]
    for name in common:
        assert f"\n| `{name}` |" in ladder
    assert list(STAGES)[1] not in ladder
    for part, columns in ((burst, ("MHz", "cycles per score")), (sustained, ("W", "mJ/call"))):
        rows = [line for line in part.splitlines() if line.startswith("| B16")]
        assert len(rows) == 2, "the fastest stage and library that both have"
        assert all(re.search(r"\| ×0\.(79|80)\d* \|", line) for line in rows)
        assert all(f"| {column} |" in part for column in columns)
    count = len(common) * (len(common) - 1) // 2
    said = f"on the H200 and the H100 for {count} pairs, each at one problem and with the same tunables."
    assert f"{said} It is the same on both for all." in machines
    alone = content._compared(out, everything[:1], two_gpus)
    assert "This page needs records of a second GPU" in alone


def test_plumbing_is_left_out_and_its_output_kept(pages: Path) -> None:
    folder = pages / "generated" / "snippets" / "notebooks"
    ladder = (folder / "02_ladder.md").read_text(encoding="utf-8")
    assert "lab." not in ladder
    assert "oracle.attention(" in (folder / "01_correctness.md").read_text(encoding="utf-8")


def test_every_status_has_words() -> None:
    assert set(tables._STATUS_WORDS) == set(Status.__args__)  # type: ignore[attr-defined]


def test_downloads_are_the_data(pages: Path) -> None:
    copied, original = pages / "generated" / "data" / "nvidia-h200", pages.parent / "data" / "nvidia-h200"
    for line in (original / "CHECKSUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split("  ")
        (path,) = copied.glob(f"{name}*")
        content = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)(path.read_bytes())
        assert hashlib.sha256(content).hexdigest() == digest
    listing = (pages / "generated" / "snippets" / "downloads.md").read_text(encoding="utf-8")
    for name in ("measurements.csv.xz", "samples.csv.xz", "machine.json", "CHECKSUMS", f"runs/{RUN}.jsonl.gz"):
        assert f"[nvidia-h200/{name}]" in listing


def test_csv_says_what_the_records_say_and_its_dictionary_is_whole(pages: Path) -> None:
    rows = store.measurements("nvidia-h200", pages.parent / "data")
    folder = pages / "generated" / "data" / "nvidia-h200"
    with lzma.open(folder / "measurements.csv.xz", "rt", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(max(1, len(row.samples)) for row in rows)
    assert {line["status"] for line in lines} == {"ok", "missing", "unsupported"}
    first = next(row for row in rows if row.name == "00_naive")
    line = next(x for x in lines if x["name"] == "00_naive" and x["regime"] == "burst" and x["cache"] == "hot")
    assert float(line["median_us"]) == first.samples[0].median_us
    with lzma.open(folder / "samples.csv.xz", "rt", encoding="utf-8", newline="") as file:
        samples = list(csv.DictReader(file))
    assert len(samples) == sum(len(s.time_us) for row in rows for s in row.samples)
    assert list(samples[0]) == list(tables.SAMPLE_COLUMNS)
    assert samples[0]["sm_clock_mhz"] == str(round(rows[0].samples[0].sm_clock_mhz[0]))
    for name, columns in (("measurements", tables.MEASUREMENT_COLUMNS), ("samples", tables.SAMPLE_COLUMNS)):
        text = (pages / "generated" / "snippets" / f"dictionary-{name}.md").read_text(encoding="utf-8")
        assert all(f"| `{column}` |" in text for column in columns)


def test_the_dictionary_of_records_names_types_without_their_constraints() -> None:
    text = content.dictionary(schema.Start)
    assert "| `instance` | `str \\| None` |" in text
    assert "| `software` | `dict[str, str]` |" in content.dictionary(schema.Call)


def test_before_anything_was_measured_every_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_variants(monkeypatch)
    out = content.generate(tmp_path / "generated", tmp_path / "data", executed=NOTEBOOKS)
    said = dict.fromkeys(("front-chart.md", "results.md", "downloads.md", "stages/00_naive.md"), NOTHING_YET)
    said |= {"journey/05_wmma.md": "**Measured:** not on record", "journey/conditions.md": "Nothing is on record yet"}
    for name, words in said.items():
        assert words in (out / "snippets" / name).read_text(encoding="utf-8")


def test_the_page_of_the_api_has_all_that_is_public() -> None:
    text = (SITE / "api.md").read_text(encoding="utf-8")
    for name in flashlab.__all__:
        public = getattr(flashlab, name)
        if name != "__version__" and not (isinstance(public, type) and issubclass(public, Exception)):
            assert f"::: {public.__module__}.{name}\n" in text, name


def test_damage_is_shown_and_nothing_else_is_lost(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "data", problems=[Problem.parse(FIRST_SHAPE)])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0] + "{broken\n" + "".join(lines[1:]), encoding="utf-8")
    out = content.Output(root=tmp_path / "generated")
    content._results_page(out, select.load("nvidia-h200", tmp_path / "data"), tmp_path / "data")
    text = (out.root / "results" / "nvidia-h200.md").read_text(encoding="utf-8")
    assert f"{RUN}.jsonl:2" in text
    assert all(f"`{stage_id}`" in text for stage_id in STAGES)


def test_generate_refuses_an_unknown_gpu(tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="GPUs with data: none yet"):
        content.generate(tmp_path / "generated", tmp_path, gpu="nvidia-abacus")


def test_run_refuses_wrong_parameters_before_anything_runs(tmp_path: Path, read_only_dir: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ParameterError, match="source"):
        site.run(source="later", out=out)
    assert not out.exists()
    with pytest.raises(OutputError):
        site.run(source="replay", out=read_only_dir)


def test_records_are_copied_before_the_first_notebook_and_after_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in between is said and tried again; what fails at the end fails the report."""
    order: list[str] = []
    said: list[str] = []
    fails: set[int] = set()

    def sync(gpu: str, data: Path) -> tuple[int, int]:
        order.append(f"copy {gpu}")
        if len(order) in fails:
            raise OutputError("no bucket")
        return 0, 0

    cell = site.sweep.cell(NOTEBOOKS / "02_ladder.ipynb", "nvidia-h200", {"suite": "smoke"})
    lab = SimpleNamespace(source="measure", gpu="nvidia-h200")
    monkeypatch.setattr(site, "settings", lambda **_: lab)
    monkeypatch.setattr(site, "measuring", lambda *_, **__: (cell,))
    monkeypatch.setattr(site, "showing", lambda *_, **__: ())
    monkeypatch.setattr(site.sweep, "execute", lambda *_, **__: order.append("notebook"))
    monkeypatch.setattr(site, "write_pages", lambda *_, **__: None)
    monkeypatch.setattr(site, "build_site", lambda out: out / "index.html")
    monkeypatch.setattr(site.upload, "sync", sync)
    monkeypatch.setattr(site.sweep, "state", lambda *_: site.sweep.State(state="left"))
    monkeypatch.setattr(site.sweep, "_how_it_ended", lambda job, *_: job.result())
    fails = {3}
    site.run(data=tmp_path, out=tmp_path, say=said.append)
    assert order == ["copy nvidia-h200", "notebook", "copy nvidia-h200", "copy nvidia-h200"]
    assert any("records not copied yet: no bucket" in one for one in said)
    for step, ran in ((1, 1), (4, 4)):
        order.clear()
        fails = {step}
        with pytest.raises(OutputError, match="no bucket"):
            site.run(data=tmp_path, out=tmp_path)
        assert len(order) == ran


def test_site_needs_generated_pages(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"site\.write_pages makes them"):
        site.build_site(tmp_path / "out")


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """Of a site of one page, by the repository's settings."""
    folder, settings = tmp_path / "pages", yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shutil.copytree(SITE / "assets", folder / "assets")
    (folder / "generated").mkdir()
    (folder / "generated" / "nav.json").write_text("[]", encoding="utf-8")
    config = tmp_path / "one-page.yml"
    config.write_text(yaml.safe_dump({**settings, "nav": [{"Home": "index.md"}]}), encoding="utf-8")
    (folder / "index.md").write_text("# Home\n\n[here](index.md)\n", encoding="utf-8")
    assert site.build_site(tmp_path, config=config).is_file()
    (folder / "index.md").write_text("# Home\n\n[nowhere](nowhere.md)\n", encoding="utf-8")
    with pytest.raises(ReportError, match=r"nowhere\.md"):
        site.build_site(tmp_path, config=config)
