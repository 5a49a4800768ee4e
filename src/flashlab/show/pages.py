"""Generated content of the site: figures, tables and downloads from data/, kernels/ and the executed notebooks.

site/ holds hand-written Markdown that includes snippets from generated/snippets/; no number is written by hand.
Experiments write their own pages, which they register (`experiments.registered`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import gzip
import html
import importlib
import inspect
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args, get_type_hints
from urllib.parse import urlencode

import jinja2
import pandas as pd

from flashlab.build import compiler, sass
from flashlab.core.arithmetic import several
from flashlab.core.errors import DamagedRecordError, MissingPackageError, NoDataError, ReportError
from flashlab.core.inputs import KINDS, NORMAL, TRAINED
from flashlab.core.paths import DATA, NOTEBOOKS, ROOT, digest, writable_dir
from flashlab.core.problem import AS_IN_A_MODEL, DTYPES, MASKS, Cache, Problem, Regime, suite
from flashlab.kernels import peers, registry
from flashlab.kernels.registry import Stage
from flashlab.query import contests, coverage, predictions, select
from flashlab.query.rows import grouped
from flashlab.query.select import Results
from flashlab.record import schema, store
from flashlab.record.schema import Measurement
from flashlab.run import choice
from flashlab.show import charts, explorer, journey, machine_code, tables
from flashlab.show.charts import LAYOUTS, MIME, THEMES, Chart
from flashlab.show.notebook import NOTHING_YET, nothing_yet
from flashlab.show.tables import Column, code, markdown, number, percent, table, times
from flashlab.verify.cases import FLASH_ATTENTION, FLASH_ATTENTION_INPUTS

PAGE_OF: Mapping[str, str] = {
    "02_ladder": "stages/index.md",
    "07_against_peers": "against.md",
    "04_roofline": "roofline.md",
    "06_cycle_model": "cycle_model.md",
    "01_correctness": "correctness.md",
    "00_hardware": "roofline.md#hardware",
    "03_anatomy": "anatomy.md",
    "09_tuning": "tuning.md",
    "10_method": "timers.md",
    "05_ablations": "ablations.md",
    "08_claims": "ledger.md",
    "edit_a_kernel": "edit.md",
    "exercises": "exercises.md",
}
"""The page or section of each notebook; those that measure come before those that show measurements."""

WRITTEN_ABOUT, _ITS_NAME = "nvidia-h200", "H200"
"""The GPU of the hand-written conclusions."""
_CONCLUDING = ("04_roofline", "06_cycle_model")
"""Notebooks whose text draws conclusions from that GPU's numbers."""
NO_CHECKS = (
    "*No such comparison is on record yet: `flashlab check --random 2000 --record` and `flashlab check --record` on a "
    "GPU make them.*"
)
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Templates of pages that exist several times or depend on the records."""
NO_SANITIZER = "*No such run is on record yet: `python scripts/sanitize.py` on a GPU with compute-sanitizer makes one.*"


@dataclass(frozen=True, kw_only=True)
class Output:
    """Writes generated files."""

    root: Path

    def text(self, path: str, content: str) -> None:
        """Write a file below `root`."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.rstrip("\n") + "\n", encoding="utf-8")

    def rendered(self, template: str, page: str, **facts: object) -> str:
        """A template rendered for `page`, in which `chart` is `drawn`."""
        return _TEMPLATES.get_template(template).render(facts, chart=partial(self.drawn, page), page=page)

    def drawn(self, page: str, draw: Callable[..., Chart], *what: Any, **options: Any) -> str:
        """The Markdown of the chart that `draw` returns; empty if it has no data."""
        with contextlib.suppress(NoDataError):
            return self.chart(draw(*what, **options), page)
        return ""

    def snippet(self, path: str, content: str) -> None:
        """Write a snippet that pages include by that path."""
        self.text(f"snippets/{path}", content)

    def chart(self, chart: Chart, page: str) -> str:
        """Write a chart's variants and return Markdown that shows the suitable one on `page` (relative to docs_dir)."""
        alt = chart.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
        images = []
        for layout in LAYOUTS:
            # With its size the browser reserves the space, so that the layout does not shift when it loads.
            width, height = charts.size_px(chart.svg[layout])
            for theme in THEMES:
                name = f"figures/{chart.name}.{layout}.{theme}.svg"
                self.text(name, chart.themed(layout, theme))
                attributes = f".{layout} loading=lazy width={width} height={height}"
                images.append(f"![{alt}]({up(page)}generated/{name}#only-{theme}){{ {attributes} }}")
        links = data_links(chart.data_files, page)
        source = " · ".join([html.escape(chart.provenance, quote=False), *links] if chart.provenance else links)
        return (
            f'<figure class="chart" markdown>\n{"".join(images)}\n'
            f'<figcaption markdown="span">{chart.caption}'
            f"{f' <small>{source}</small>' if source else ''}</figcaption>\n</figure>\n"
        )


def up(page: str) -> str:
    """The relative path from a page's folder to docs_dir: one `../` per folder."""
    return "../" * page.count("/")


def data_links(files: Iterable[str], page: str, *, named: bool = False) -> list[str]:
    """Links from a page to copies of raw data."""
    return [f"[{Path(file).name if named else 'data'}]({up(page)}{published(file)})" for file in files]


def published(file: str) -> str:
    """The path from docs_dir of the site's copy of a file in data/; large kinds of files are compressed.

    Runs by gzip, which a browser unpacks for the explorer; others by xz, which is smaller.
    """
    if not file.endswith((".jsonl", "/tuned.json", "/verdicts.json")):
        return f"generated/data/{file}"
    return f"generated/data/{file}{'.gz' if '/runs/' in file else '.xz'}"


def stage_link(name: str) -> str:
    """A link to a stage's page, from a page at the site's root."""
    return f"[{code(name)}]({registry.get(name).folder or 'stages/'}{name}.md)"


def generate(
    root: Path,
    data: Path = DATA,
    *,
    executed: Path | None = None,
    gpu: str = "",
    failed: Mapping[str, str] | None = None,
) -> Path:
    """Regenerate everything that pages include in the folder `root`, and return it.

    Args:
        data: folder of the records.
        executed: folder of executed notebooks; if None, pages state that they were not executed.
        gpu: the GPU that pages about the ladder show; default: the main one, the first of `store.gpus`.
        failed: errors of executed notebooks, by name; their pages show the error and the cells before it.

    Raises:
        NoDataError: `gpu` has no records.
        OutputError: `root` cannot be written.
    """
    if gpu:
        store.require_runs(gpu, data)
    shutil.rmtree(root, ignore_errors=True)
    out = Output(root=writable_dir(root, "generated pages"))
    everything = _everything(data, gpu)
    shown = everything[0] if everything else select.load("", data)
    # Drawing is most of the work, and independent from page to page.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_downloads, out, data, gpu), pool.submit(_apart, data, shown.gpu, journey.write, out)]
        jobs += [pool.submit(_apart, data, shown.gpu, _stage_page, out, stage) for stage in registry.STAGES.values()]
        jobs += [pool.submit(_apart, data, results.gpu, _results_page, out) for results in everything]
        others = [(results.gpu, results.name) for results in everything[1:]]
        jobs += [
            pool.submit(_apart, data, shown.gpu, _off_ladder, out, stage, others)
            for stage in registry.OFF_LADDER.values()
        ]
        decode_page(out, select.off_ladder(shown.gpu, data, registry.DECODE, select.DECODING))
        out.snippet("decode-steps.md", steps_table(everything, data))
        for name, page in PAGE_OF.items():
            _notebook_page(out, name, page, executed, shown, (failed or {}).get(name, ""))
        _notebook_list(out)
        _front_page(out, shown, data)
        scored = tables.predictions(predictions.scores(shown)) if shown else NOTHING_YET
        out.snippet("predictions.md", f"{_elsewhere(shown, 'What was predicted')}\n\n{scored}")
        _inputs_and_errors(out, shown, data)
        _lists(out, everything)
        out.snippet("compare.md", _compared(out, everything, data))
        dead_end_list(out, select.off_ladder(shown.gpu, data), _of_retired(shown))
        check_records(out, everything, data)
        _commands(out)
        # Experiments register their pages: none of them is imported here.
        for write in importlib.import_module("flashlab.experiments").pages():
            write(out, shown, data)
        for job in jobs:
            job.result()
    out.text("nav.json", json.dumps(_gpus(shown, everything)))
    return out.root


def _everything(data: Path, gpu: str) -> tuple[Results, ...]:
    """The results of all GPUs, `gpu` first, the others in order."""
    return tuple(sorted(select.load_all(data), key=lambda results: results.gpu != gpu))


def _apart(data: Path, gpu: str, write: Callable[..., None], *args: Any) -> None:
    """Write a page in a process that reads a GPU's records once, which is faster than sending them."""
    write(*args, _read(gpu, data), data)


_read = lru_cache(maxsize=2)(select.load)


def _of_retired(shown: Results) -> dict[Problem, tuple[Measurement, ...]]:
    """Rows of retired rungs, which were measured with the ladder at every problem."""
    return {problem: shown.problems[problem] for problem in suite("first") if problem in shown.problems}


def _off_ladder(out: Output, stage: Stage, others: Sequence[tuple[str, str]], shown: Results, data: Path) -> None:
    """Write the page of a stage off the ladder from the records of the shown GPU, else of the first of `others`."""
    policy = select.OFF_LADDER if stage.dead_end else select.of_stage(stage)
    measured, note = _of_retired(shown) if stage.retired else {}, ""
    for gpu, name in () if stage.retired else ((shown.gpu, shown.name), *others):
        if measured := select.off_ladder(gpu, data, {stage.id: stage}, policy):
            note = "" if gpu == shown.gpu else f"*Not on record for the {shown.name} yet; numbers are for the {name}.*"
            break
    off_ladder_page(out, stage, measured, note)


def _gpus(main: Results, everything: Sequence[Results]) -> list[dict[str, Any]]:
    """The GPUs for the navigation and for the line that names a page's GPU."""
    return [
        {"slug": results.gpu, "name": results.name, "partial": bool(results.lacking), "main": results is main}
        for results in everything
    ]


def _elsewhere(shown: Results, what: str) -> str:
    """A note if hand-written text is about another GPU than the one shown; else empty."""
    if not shown or shown.gpu == WRITTEN_ABOUT:
        return ""
    return f'!!! note ""\n    {what} was written about the {_ITS_NAME}; the numbers are those of the {shown.name}.\n'


def _notebook_page(out: Output, name: str, page: str, executed: Path | None, shown: Results, failure: str = "") -> None:
    """An executed notebook as Markdown with its charts as figures, up to the failure if there was one."""
    import nbformat
    from nbconvert import MarkdownExporter

    source = (executed or NOTEBOOKS) / f"{name}.ipynb"
    if failure and not source.is_file():
        source = NOTEBOOKS / source.name
    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    hidden = {"parameters", "injected-parameters", "hide"}
    notebook.cells = [cell for cell in notebook.cells if not hidden & set(cell.metadata.get("tags", []))]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            if "#" in page:
                cell.source = re.sub("^#", "##", cell.source, flags=re.MULTILINE)
            continue
        if "hide-input" in cell.metadata.get("tags", []):
            cell.metadata["transient"] = {"remove_source": True}  # what nbconvert's templates look for
        # Libraries' messages on stderr are not shown; an error is shown above.
        cell["outputs"] = [
            output
            for output in cell.get("outputs", [])
            if output.get("name") != "stderr" and output.output_type != "error"
        ]
        for output in cell["outputs"]:
            if MIME in output.get("data", {}):
                output["data"] = {"text/markdown": out.chart(Chart.model_validate(output["data"][MIME]), page)}
    text, _ = MarkdownExporter().from_notebook_node(notebook)  # type: ignore[no-untyped-call]
    title, _, rest = _linked(text, page).strip().partition("\n")
    _notebook_copy(source, out.root / "notebooks" / source.name)
    said = out.rendered(
        "notebook.md",
        page,
        **{"name": name, "title": title, "text": rest.strip("\n"), "executed": executed, "section": "#" in page},
        elsewhere=_elsewhere(shown, "The text of this page") if name in _CONCLUDING else "",
        failure=html.escape(failure.partition("\n")[0]),
    )
    out.snippet(f"notebooks/{name}.md", said)


def _linked(text: str, page: str) -> str:
    """Rewrite a notebook's relative links for a page."""
    text = text.replace("](../site/", f"]({up(page)}")
    return re.sub(r"\]\((\w+)\.ipynb", lambda link: f"]({up(page)}{PAGE_OF[link[1]]}", text)


def _notebook_list(out: Output) -> None:
    """The list of notebooks, from the index notebook."""
    cells = json.loads((NOTEBOOKS / "index.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells)
    out.snippet("notebooks/index.md", _linked(text, "notebooks.md"))


def _notebook_copy(source: Path, target: Path) -> None:
    """A notebook to download, without the chart variants of the pages."""
    import nbformat

    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(MIME, None)
    target.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, target)  # type: ignore[no-untyped-call]


def _front_page(out: Output, shown: Results, data: Path) -> None:
    _about(out)
    rows = shown.rows()
    stage, peer = select.fastest_stage(rows, records=shown.records), select.fastest_peer(rows)
    share = contests.percent_of_peak(stage) if stage else None
    _card(out, stage, rows, share)
    if shown.first is None:
        out.snippet("front-chart.md", f'!!! note ""\n    {NOTHING_YET}\n')
        out.snippet("front-numbers.md", "")
        out.snippet("front-finding.md", "")
        out.snippet("losses.md", NOTHING_YET)
        return
    contested = contests.against_peers(shown.gpu, data, tuple(KINDS))
    bursts = {held.problem: held.burst for held in contested if held.burst}
    try:
        chart = out.chart(charts.climb(rows, records=shown.records), "index.md")
    except NoDataError as error:
        chart = f'!!! note ""\n    {error}\n'
    out.snippet("front-chart.md", chart)
    contest = bursts.get(shown.first)
    if contest and (stage is None or contest.stage.name != stage.name):
        contest = None
    default = _default(stage, data) if stage else ""
    cards = [*_front_cards(shown, stage, peer, bursts, contest, default), *_extremes(bursts)]
    items = "".join(f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>" for value, label in cards)
    where = f"Rates, and ratios over one library, are at {shown.first.label}, {select.on_inputs([shown.first])}."
    out.snippet("front-numbers.md", f'<dl class="numbers">{items}</dl>\n\n{where}\n')
    said: dict[str, Any] = {"row": stage, "share": share, "contest": contest, "default": default}
    said["default_timed"] = any(row.name == default and select.rate(row) for row in rows)
    said["lost"] = sum(burst.ratio < 1 for burst in bursts.values())
    finding = out.rendered("front.md", "index.md", shown=shown, compared=len(bursts), **said)
    out.snippet("front-finding.md", finding)
    out.snippet("losses.md", _losses(bursts))


def _card(out: Output, stage: Measurement | None, rows: Sequence[Measurement], share: float | None) -> None:
    """The preview image for links to the report, used by overrides/main.html."""
    said = ["flashlab: one idea at a time, measured"]
    if stage:
        peak = f", {percent(share)} of the tensor cores’ peak" if share else ""
        said = [f"{number(select.rate(stage))} TFLOP/s{peak}", f"{stage.gpu.name}, {stage.problem.label}"]
    (out.root / "card.png").write_bytes(charts.card(rows, title="How an attention kernel gets fast", said=said))


def _extremes(bursts: Mapping[Problem, contests.Contest]) -> list[tuple[str, str]]:
    """The worst ratio over the fastest library on all inputs, and the best on normal and trained ones."""
    usual = [problem for problem in bursts if problem.inputs in (NORMAL, TRAINED)]
    if len(bursts) < 2 or not usual:
        return []

    def ratio(problem: Problem) -> float:
        return bursts[problem].ratio

    ends = {
        f"worst of {len(bursts)} comparisons": min(bursts, key=ratio),
        f"best of {len(usual)} on normal and trained inputs": max(usual, key=ratio),
    }
    return [
        (times(ratio(problem)), f"{which}: {problem.label}, over {tables.title_of(bursts[problem].peer.name)}")
        for which, problem in ends.items()
    ]


def _losses(bursts: Mapping[Problem, contests.Contest]) -> str:
    """Every problem at which a library is faster, the worst first."""
    lost = sorted((item for item in bursts.items() if item[1].ratio < 1), key=lambda item: item[1].ratio)
    columns = (
        Column("problem", "0.label"),
        Column("× library", "1.ratio", times),
        Column("library", "1.peer.name", tables.short_title, left=True),
        Column("stage", "1.stage.name", stage_link, left=True),
    )
    return table(columns, lost) if lost else "*No library is faster at any problem on record.*"


def _about(out: Output) -> None:
    """The licence, the citation and the repository, if CITATION.cff names one, with copies of the two files."""
    import yaml

    for name in ("LICENSE", "CITATION.cff"):
        out.text(f"{name}.txt", (ROOT / name).read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    links = [f"[Licence: {citation['license']}](generated/LICENSE.txt)", "[How to cite](generated/CITATION.cff.txt)"]
    if "repository-code" in citation:
        links.insert(0, f"[Repository]({citation['repository-code']})")
    out.snippet("about.md", " · ".join(links))


def _default(row: Measurement, data: Path) -> str:
    """The stage that flashlab chooses for a row's problem on its GPU, timed there or not; the last rung that supports
    the problem if the table of choices is damaged, which the Data page reports."""
    arch = registry.arch_for(row.gpu.compute_capability)
    try:
        return choice.stage_for(row.problem, row.gpu.slug, arch, row.gpu.sm_count, data).id
    except DamagedRecordError:
        return registry.best(row.problem, arch).id


def _front_cards(
    shown: Results,
    stage: Measurement | None,
    peer: Measurement | None,
    bursts: Mapping[Problem, contests.Contest],
    contest: contests.Contest | None,
    default: str,
) -> list[tuple[str, str]]:
    """The fastest stage: rate, and speed-ups over the first stage and the libraries, from one run if there is one."""
    rows, rate = shown.rows(), select.rate(stage)
    if stage is None or rate is None:
        return []
    which = "the default version" if default == stage.name else "the fastest version to choose from"
    cards = [(f"{number(rate)} TFLOP/s", f"{which}, {stage.name}")]
    foot = next(row for row in rows if row.kind == "stage" and select.rate(row))
    if foot is not stage:
        late = ", timed in another session" if foot in select.elsewhere(rows) else ""
        cards.append((times(select.speedup(stage, foot) or 1.0), f"over {foot.name}{late}"))
    if peer is None:
        return cards
    library = tables.title_of((contest.peer if contest else peer).name)
    said = f"of the fastest library in {peer.problem.dtype}, {library} ({_timed_there(rows)})"
    faster = select.fastest_peer([peer, *shown.beside()])
    if faster is not None and faster is not peer:
        # The fastest library lacks this type: the ratio in the type that it has comes first.
        other = dataclasses.replace(stage.problem, dtype=faster.problem.dtype)
        if burst := bursts.get(other):
            named = _timed_there(shown.problems.get(other, ()))
            where = f"of the fastest library in {other.dtype}, {tables.title_of(burst.peer.name)} ({named})"
            cards.append((percent(100 * burst.ratio), where))
        said += f"; {tables.title_of(faster.name)}: {tables.lacks(faster.name, peer.problem.dtype)}"
    ratio = contest.ratio if contest else select.speedup(stage, peer)
    return [*cards, (percent(100 * (ratio or 1.0)), said)]


def _timed_there(rows: Iterable[Measurement]) -> str:
    return f"of {sum(row.kind == 'peer' and select.rate(row) is not None for row in rows)} timed"


def _inputs_and_errors(out: Output, shown: Results, data: Path) -> None:
    """Ratios over the libraries, and errors, by kind of inputs; a note if they were not measured."""
    out.snippet("inputs.md", tables.inputs())
    makers = {"against-inputs.md": _against_inputs, "against-features.md": _against_features, "accuracy.md": _accuracy}
    for name, make in makers.items():
        try:
            out.snippet(name, make(shown, data) if shown else NOTHING_YET)
        except NoDataError as error:
            out.snippet(name, f"*{error}*")


def _against_inputs(shown: Results, data: Path) -> str:
    against_peers = contests.against_peers(shown.gpu, data, tuple(KINDS))
    parts = [tables.against_inputs(against_peers)]
    folded: tuple[tuple[str, Regime, Sequence[Problem]], ...] = (
        ("Longer sequences", "burst", contests.LONGER),
        ("Under sustained load", "sustained", contests.MAIN),
        ("Longer sequences under sustained load", "sustained", contests.LONGER),
    )
    for title, regime, problems in folded:
        with contextlib.suppress(NoDataError):
            by_kind = tables.against_inputs(against_peers, regime, problems)
            at = [held for held in against_peers if dataclasses.replace(held.problem, inputs=NORMAL) in problems]
            timed = [(contest.lowest, held.problem.inputs) for held in at if (contest := getattr(held, regime))]
            lowest, kind = min(timed)
            kinds = f"{len({kind for _, kind in timed})} of {len(KINDS)} kinds"
            summary = f"{title}, {kinds}: at the lowest {times(lowest)}, on {kind}"
            parts.append(tables.folded(summary, by_kind, kind="abstract") + "\n")
    shapes = {problem.shape for problem in (*contests.MAIN, *contests.LONGER)}
    runs = [run for held in against_peers if held.problem.shape in shapes for run in held.runs]
    return "\n".join([*parts, _from_runs(shown, runs)])


def _against_features(shown: Results, _: Path) -> str:
    featured = contests.featured(shown)
    if not featured:
        raise NoDataError(
            "No times with a window or a soft cap are on record for this GPU yet: `flashlab bench --suite windows` "
            "makes them."
        )
    return f"{tables.table(tables.FEATURED, featured)}\n{_from_runs(shown, (row.stage.run for row in featured))}"


def _accuracy(shown: Results, data: Path) -> str:
    errors = contests.accuracy(shown.gpu, data)
    return f"{tables.accuracy(errors)}\n{_from_runs(shown, (checked.run for checked in errors))}"


def _from_runs(shown: Results, runs: Iterable[str]) -> str:
    return f"<small>{select.sourced(shown.name, runs=runs)}</small>"


# --- A stage's page ---------------------------------------------------------------------------------------------------


def diff_against_parent(stage: Stage) -> str:
    """Unified diff of a stage's kernel against its parent's; empty for the first stage, and between languages."""
    if stage.parent is None or registry.get(stage.parent).language != stage.language:
        return ""
    parent = registry.get(stage.parent)
    before, after = (version.source.read_text(encoding="utf-8").splitlines() for version in (parent, stage))
    return "\n".join(difflib.unified_diff(before, after, parent.source.name, stage.source.name, lineterm="", n=3))


def _needs(stage: Stage, parent: tuple[str, str | None]) -> str:
    """A stage's parent, requirements and tunables."""

    def defaults(param: registry.Param) -> str:
        special = "".join(f", {value} at head dim {dim}" for dim, value in param.by_head_dim.items())
        return f"default {param.default}{special}"

    facts = [
        parent,
        ("Architectures", stage.needs),
        ("Element types", ", ".join(stage.dtypes)),
        ("Head dims", ", ".join(map(str, stage.head_dims))),
        *((code(name), f"{tunable.meaning}; {defaults(tunable)}") for name, tunable in stage.params.items()),
        *(
            (code(name), f"ablations only: {tunable.meaning}; {defaults(tunable)}")
            for name, tunable in stage.ablations.items()
        ),
    ]
    return markdown(("", ""), facts, left=2)


def _stage_page(out: Output, stage: Stage, shown: Results, data: Path) -> None:
    timed = select.with_stage(shown, stage.id, data)  # if that is another GPU, the page was written about it
    written_elsewhere = _elsewhere(shown, "What follows") if timed is shown else ""
    shown = timed
    page, diff = f"stages/{stage.id}.md", diff_against_parent(stage)
    changes = [line[0] for line in diff.splitlines()[2:] if line.startswith(("+", "-"))]
    parent = f"[{code(stage.parent)}]({stage.parent}.md)" if stage.parent else "none, the first stage"
    text = out.rendered(
        "stage.md",
        page,
        **{"stage": stage, "shown": shown, "needs": _needs(stage, ("Parent", parent))},
        **{"diff": diff, "added": changes.count("+"), "removed": changes.count("-")},
        scored=predictions.scores(shown, [stage]) if shown else [],
        written_elsewhere=written_elsewhere,
        **_measured(out, stage, shown, data),
    )
    out.snippet(page, text)


EVERY_PROBLEM = (
    Column("problem", "problem.label"),
    Column("burst TFLOP/s", lambda item: item["burst"]["tflops"] if item["row"].status == "ok" else item["row"].status),
    Column("over parent", "gain", times),
    Column("of the fastest library", "burst.percent_of_best", percent),
    Column("sustained TFLOP/s", "sustained.tflops"),
    Column("of the fastest library", "sustained.percent_of_best", percent),
    Column("cycles per score", "burst.cycles_per_score"),
    tables.ENERGY,
)


def _measured(out: Output, stage: Stage, shown: Results, data: Path) -> dict[str, Any]:
    """The measurements of a stage's page; `line` is None if it has no time at the first problem."""
    rows = shown.rows()
    row = next((row for row in rows if row.name == stage.id), None)
    if shown.first is None or row is None or row.status != "ok":
        return {"row": row, "line": None}
    of = {dtype: shown.libraries(dtype) for dtype in DTYPES}
    parent, peer = select.parent_of(row, rows), select.fastest_of(of[shown.first.dtype], rows)
    items: list[dict[str, Any]] = [
        {
            "problem": problem,
            "row": mine,
            "gain": select.speedup(*predictions.pair(shown, problem, stage.id, stage.parent)) if stage.parent else None,
            **{
                regime: tables.line(mine, of_problem, libraries=of[problem.dtype], regime=regime)
                for regime in get_args(Regime)
            },
        }
        for problem, of_problem in shown.problems.items()
        for mine in of_problem
        if mine.name == stage.id
    ]
    profiled = [profile for profile in select.profiles(shown.gpu, data) if profile.stage in (stage.id, stage.parent)]
    cubins = {timed.name: timed.cubin for timed in (row, parent) if timed and timed.cubin}
    for item in items:
        # Another element type has other machine code.
        problem, cubin = item["problem"], item["row"].cubin
        if cubin and problem != shown.first and dataclasses.replace(problem, dtype=shown.first.dtype) == shown.first:
            cubins[f"{stage.id} {problem.dtype}"] = cubin
    return {
        "gain": next(item["gain"] for item in items if item["problem"] == shown.first),
        **{"row": row, "parent": parent, "peer": peer, "line": tables.line(row, rows, libraries=of[shown.first.dtype])},
        **{"every_problem": EVERY_PROBLEM, "problems": items, "sets": _sets(of), "cubins": cubins},
        "costs": tables.costs([timed for timed in (row, parent, peer) if timed and timed.samples]),
        "profiles": _profiles(out, profiled, f"stages/{stage.id}.md"),
        "traced": [profile for profile in profiled if profile.stage == stage.id and profile.lines][:1],
        "mixes": {name: cubin.sass for name, cubin in cubins.items()},
    }


def _sets(of: Mapping[Any, Iterable[str]]) -> str:
    """The libraries whose fastest is the base of percentages, by element type."""
    return " ".join(
        f"In {dtype} that is the fastest of {tables.set_of(names)}." for dtype, names in of.items() if names
    )


def _profiles(out: Output, profiles: Sequence[schema.StageProfile], page: str) -> str:
    """Utilisation of the SM's units, one table per problem, with provenance; empty if no profile is on record."""
    groups = list(grouped(profiles, lambda profile: profile.problem).values())
    return out.rendered("profiles.md", page, groups=groups)


# --- What did not work, and what is for decoding ----------------------------------------------------------------------


STEPS = Problem.parse("1x32x8x1x8192x128")
"""The problem of the table of steps, at one batch size."""
_CALLS: Mapping[Cache, str] = {"step": "in a step", "rotating": "other K, V", "hot": "same K, V"}
"""Names of the kinds of calls in the decoding table."""


def decode_page(out: Output, measured: Mapping[Problem, Sequence[Measurement]]) -> None:
    """The best decoding stage against the fastest library, and against FlashInfer, which is made for decoding.

    In calls as in a model (`AS_IN_A_MODEL`) or, if no row has such a time, on the same keys and values. `measured` is
    from `select.off_ladder`. Problems without a time of torch's SDPA are left out: the fastest library may be missing.
    """
    lines: list[tuple[Problem, Cache, Measurement, Measurement, Measurement | None]] = []
    for problem, rows in measured.items():
        taken = (cache for cache in AS_IN_A_MODEL if any(row.samples_of("burst", cache) for row in rows))
        cache: Cache = next(taken, "hot")
        time_us = partial(select.median_us, cache=cache)
        library = select.fastest_of((), rows, cache=cache)
        together = [row for row in rows if library and row.run == library.run and time_us(row)]
        ours = (row for row in together if row.name in registry.DECODE)
        best = min(ours, key=lambda row: time_us(row) or 0.0, default=None)
        if library and best and any(row.name == "sdpa" for row in together):
            lines.append((problem, cache, best, library, next((r for r in together if r.name == "flashinfer"), None)))
    if not lines:
        out.snippet("decode.md", "*Not on record for this GPU yet: `flashlab bench --suite decode` measures it.*")
        return

    caches = {cache for _, cache, *_ in lines}

    def short(problem: Problem) -> str:
        return re.sub(" full| Sq1", "", problem.label).replace("bfloat", "bf").replace("float", "fp")

    def us(place: int) -> Callable[[Any], float | None]:
        return lambda line: select.median_us(line[place], cache=line[1])

    def over(place: int, line: Any) -> float | None:
        return select.speedup(line[2], line[place], cache=line[1])

    columns = (
        Column("problem", "0", short),
        Column("calls", lambda line: _CALLS[line[1]] if len(caches) > 1 else None, left=True),
        Column("over the library", partial(over, 3), times),
        Column("µs", us(2)),
        Column("library's µs", us(3)),
        Column("stage", "2.name", code, left=True),
        Column("library", "3.name", code, left=True),
        Column("over FlashInfer", partial(over, 4), times),
        Column("TB/s", lambda line: line[0].compulsory_bytes / (us(2)(line) or math.inf) / 1e6),
        Column(
            "same K, V: over the library", lambda line: select.speedup(*line[2:4]) if line[1] != "hot" else None, times
        ),
    )
    shown_in: Cache = next((cache for cache in AS_IN_A_MODEL if cache in caches), "hot")
    state = "burst" if len(caches) > 1 else ""  # a column names the calls
    source = select.provenance([row for line in lines for row in line[2:] if row], cache=shown_in, state=state)
    ratios = [(over(3, line) or 0.0, f" ({short(line[0])})") for line in lines]
    said = f"The fastest of our kernels is faster than the fastest library at {tables.standing(ratios)}"
    out.snippet("decode.md", f"{said}\n\n{table(columns, lines, drop_empty=True)}\n\n<small>{source}</small>")


def steps_table(everything: Sequence[Results], data: Path) -> str:
    """Times back to back on rotating K and V, and in a step, at `STEPS` and other batch sizes.

    From the first GPU of `everything` that has steps; for each batch size, from the newest of the runs that timed the
    most libraries in steps.
    """
    for results in everything:
        stepped = [
            row
            for row in store.measurements(results.gpu, data)
            if dataclasses.replace(row.problem, batch=STEPS.batch) == STEPS and row.samples_of("burst", "step")
        ]
        if stepped:
            break
    else:
        return nothing_yet("flashlab bench --suite decode")
    libraries = Counter((row.problem.batch, row.run) for row in stepped if row.kind == "peer")
    newest = {
        batch: max({row.run for row in rows}, key=lambda run: (libraries[batch, run], run))
        for batch, rows in grouped(stepped, lambda row: row.problem.batch).items()
    }
    shown = {(row.name, row.problem.batch): row for row in stepped if row.run == newest[row.problem.batch]}

    def median_us(batch: int, cache: Cache, name: str) -> float | None:
        return select.median_us(shown.get((name, batch)), cache=cache)

    columns = [Column("", lambda name: name, code, left=True)]
    for batch in sorted(newest):
        columns += [
            Column(f"B{batch} back to back, µs", partial(median_us, batch, "rotating")),
            Column(f"B{batch} in a step, µs", partial(median_us, batch, "step")),
        ]
    names = [name for name in (*registry.DECODE, *peers.PEERS) if any(name == known for known, _ in shown)]
    return f"{table(columns, names)}\n\n<small>{select.provenance(list(shown.values()), cache='step')}</small>"


_UNFOLDED = 4
"""Problems that a page of a stage off the ladder shows without a click."""


def off_ladder_page(
    out: Output, stage: Stage, measured: Mapping[Problem, Sequence[Measurement]], note: str = ""
) -> None:
    """The sections of the page of a stage off the ladder, from `select.off_ladder`, with `note` above the results.

    Problems of its prediction come first, then those of the decoding suite; all but the first few are folded.
    """
    page, own = f"{stage.folder}{stage.id}.md", {stage.id, *stage.variant_names}
    rungs = {*registry.STAGES, stage.parent}
    in_order = dict.fromkeys((*(expected.problem for expected in stage.expected), *suite("decode")))
    place = {problem: position for position, problem in enumerate(in_order)}
    shown = [
        (
            problem,
            [row for row in rows if row.name in own or row.kind == "peer" or row.name in rungs],
            [row for row in rows if row.name in own],
        )
        for problem, rows in sorted(measured.items(), key=lambda item: place.get(item[0], len(place)))
        if any(row.name in own for row in rows)
    ]
    kernels: dict[str, Sequence[sass.Instruction]] = {}
    arch, refused = "sm_90a", ""
    try:
        for name in filter(None, (stage.parent, stage.id, *stage.variant_names)):
            compiled, variant = registry.parse(name)
            cubin = compiler.compile_stage(
                compiler.Job(
                    stage=compiled,
                    head_dim=compiled.head_dims[0],
                    dtype="float16",
                    causal=False,
                    arch=arch,
                    overrides=variant,
                )
            )
            kernels[name] = sass.without_padding(sass.disassemble(cubin.code, cubin.entry))
    except MissingPackageError as error:
        refused = str(error)
    text = out.rendered(
        "off_ladder.md",
        page,
        **{"stage": stage, "own": own, "measured": shown, "kernels": kernels, "refused": refused, "arch": arch},
        gains=tables.off_ladder_gains(stage, {problem: rows for problem, rows, _ in shown}),
        first=_UNFOLDED,
        note=note,
        needs=_needs(stage, ("Parent", code(stage.parent) if stage.parent else None)),
        nothing_yet=measured_by(stage),
    )
    out.snippet(page, text)


def measured_by(stage: Stage) -> str:
    """The note that nothing is on record for a stage off the ladder, with the command that measures it."""
    if stage.retired:  # its page shows the ladder's session
        alone = nothing_yet(f"flashlab bench --stages {stage.id}")
        return f"{alone} Run it at the commit that timed the ladder, within six hours of that run."
    what = "--dead-ends --shape 1x8x512x64" if stage.dead_end else f"--suite {stage.place}"
    return nothing_yet(f"flashlab bench {what}")


def dead_end_list(
    out: Output,
    measured: Mapping[Problem, Sequence[Measurement]],
    ladder: Mapping[Problem, Sequence[Measurement]],
) -> None:
    """The table of all dead ends, with rates at the first problem measured."""
    first = next(iter(measured), None)
    rows = {row.name: row for row in (*ladder.get(first, ()), *measured[first])} if first else {}

    def result(stage: Stage) -> str | None:
        row = rows.get(stage.id)
        rate = select.rate(row)
        return f"{number(rate)} TFLOP/s" if rate else f"no time: {row.status}" if row else None

    columns = (
        Column("", "id", lambda name: f"[{code(name)}]({name}.md)"),
        Column("idea", "title", left=True),
        Column("question", "question", left=True),
        Column(f"at {first.label}" if first else "measured", result),
    )
    out.snippet("dead_ends.md", table(columns, registry.DEAD_ENDS.values()))


# --- A GPU's page -----------------------------------------------------------------------------------------------------


def _results_page(out: Output, shown: Results, data: Path) -> None:
    """The page of one GPU: every problem, stage, library and regime, and rows without a time."""
    page, rows = f"generated/results/{shown.gpu}.md", [row for of in shown.problems.values() for row in of]
    text = out.rendered(
        "results.md",
        page,
        **{"shown": shown, "data": data, "root": str(ROOT), "rows": rows, "kinds": list(product(MASKS, DTYPES))},
        damage=store.verify(shown.gpu, data),
        sets=_sets({dtype: shown.libraries(dtype) for dtype in DTYPES}),
        beside=[f"{tables.title_of(row.name)}: {row.problem.dtype}" for row in shown.beside()],
        against=contests.against_peers(shown.gpu, data),
        profiles=_profiles(out, select.profiles(shown.gpu, data), page),
        fastest=_fastest(shown, up(page) + "explorer.md"),
    )
    out.text(f"results/{shown.gpu}.md", text)


def _fastest(shown: Results, explorer: str = "") -> str:
    """The fastest stage and library at every problem, which links to the explorer, a path from the page."""

    def link(problem: Problem) -> str:
        asked = {name: getattr(problem, name) for name in ("shape", "dtype", "mask")}
        return f"[{problem.label}]({explorer}?{urlencode({'gpu': shown.gpu, **asked})})"

    lines = []
    for problem, rows in shown.problems.items():
        stage, peer = select.fastest_stage(rows, records=shown.records), select.fastest_peer(rows)
        lines.append((link(problem), *tables.best(stage), *tables.best(peer)))
    return markdown(("problem", "fastest stage", "TFLOP/s", "fastest library", "TFLOP/s"), lines)


# --- Reference --------------------------------------------------------------------------------------------------------


def _commands(out: Output) -> None:
    """typer's documentation of all commands and options, without its introduction."""
    command = [sys.executable, "-m", "typer", "flashlab.cli.app", "utils", "docs", "--name", "flashlab"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if said.returncode:
        raise ReportError(f"wanted typer's documentation of the commands, got: {said.stderr.strip()[-500:]}")
    out.snippet("commands.md", said.stdout[said.stdout.index("\n## ") :])


# --- Lists and downloads ----------------------------------------------------------------------------------------------


def _lists(out: Output, everything: Sequence[Results]) -> None:
    """The stages, and the GPUs with records."""
    stages = (
        Column("stage", "id", lambda name: f"[{code(name)}]({name}.md)"),
        Column("idea", "title", left=True),
        Column("change", "change", left=True),
    )
    out.snippet("stages.md", table(stages, registry.STAGES.values()))

    def timed(shown: Results, ok: bool) -> int:
        return sum((row.status == "ok") == ok for rows in shown.problems.values() for row in rows)

    def fastest(shown: Results) -> str | None:
        best = select.fastest_stage(shown.rows(), records=shown.records)
        return f"{number(select.rate(best))} ({code(best.name)})" if best else None

    gpus = (
        Column("GPU", lambda shown: f"[{shown.name}](generated/results/{shown.gpu}.md)"),
        Column("records", lambda shown: "partial" if shown.lacking else "complete", left=True),
        Column("problems", lambda shown: len(shown.problems)),
        Column("rows with a time", lambda shown: timed(shown, ok=True)),
        Column("rows without a time", lambda shown: timed(shown, ok=False)),
        Column("fastest stage at the first problem, TFLOP/s", fastest),
        Column("measured", "newest", select.date),
    )
    out.snippet("results.md", table(gpus, everything) if everything else NOTHING_YET)
    parts = (f"### {shown.name}\n\n{_fastest(shown)}" for shown in everything)
    out.snippet("fastest.md", "\n\n".join(parts) if everything else NOTHING_YET)


def _compared(out: Output, everything: Sequence[Results], data: Path) -> str:
    """The GPUs side by side: hardware, the ladder at the first problem, and all problems that two GPUs share."""
    if len(everything) < 2:
        have = f"One GPU has records: {everything[0].name}." if everything else NOTHING_YET
        return f"*{have} This page needs records of a second GPU.*"
    main, shared = everything[0], contests.across_gpus(everything)

    def kinds(shown: Results) -> set[str]:
        return {path.name for path in (data / shown.gpu).glob("*/")}

    ladder = [across for across in shared if across.problem == shared[0].problem]
    return out.rendered(
        "compare.md",
        "compare.md",
        **{"everything": everything, "ladder": ladder, "chosen": contests.fastest_across(shared, main)},
        orders=[(other, *contests.order_across(shared, other.gpu, main.gpu)) for other in everything[1:]],
        without=[(other, sorted(kinds(main) - kinds(other))) for other in everything[1:]],
    )


def check_records(out: Output, everything: Sequence[Results], data: Path) -> None:
    """Each GPU's newest comparisons of most stages, those after it, and the findings of compute-sanitizer."""
    files: list[tuple[str, select.Comparisons]] = []
    sanitized = []
    for shown in everything:
        kinds: tuple[tuple[select.CheckFolder, tuple[str, ...], str], ...] = (
            ("checks", (NORMAL,), "hostile lengths"),
            ("random", (NORMAL,), "random shapes and strides"),
            (FLASH_ATTENTION, FLASH_ATTENTION_INPUTS, "flash-attention's forward tests, by its own criterion"),
        )
        for kind, inputs, what in kinds:
            for path, lines in select.checks(shown.gpu, data, kind, inputs).items():
                files.append((f"[{what}]({published(path.relative_to(data).as_posix())})", lines))
        findings = store.sanitized(shown.gpu, data)
        if findings:
            runs = sorted({record.run for record in findings}, reverse=True)
            links = " ".join(f"[{run}]({published(f'{shown.gpu}/sanitizer/{run}.jsonl')})" for run in runs)
            sanitized.append(f"{tables.sanitized(findings)}\nData: {links}")
    out.snippet("checks.md", table(tables.CHECK_RECORDS, files) if files else NO_CHECKS)
    out.snippet("sanitizer.md", "\n\n".join(sanitized) if sanitized else NO_SANITIZER)


_XZ_PRESET = 4
"""Two thirds of the default preset's time, for a twelfth more bytes."""
_PACKED: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": partial(gzip.compress, mtime=0),
    ".xz": partial(lzma.compress, preset=_XZ_PRESET),
}


def _downloads(out: Output, data: Path, gpu: str) -> None:
    """Copies of the raw data, flattened tables, the explorer's table, and the data dictionary."""
    everything = _everything(data, gpu)
    out.text(explorer.FILE, explorer.text(everything, data))
    listed = []
    for shown in everything:
        folder = out.root / "data" / shown.gpu
        for path in store.record_files(shown.gpu, data):
            target = out.root / published(path.relative_to(data).as_posix()).removeprefix("generated/")
            target.parent.mkdir(parents=True, exist_ok=True)
            pack = _PACKED.get(target.suffix, bytes)
            target.write_bytes(pack(path.read_bytes()))
        rows = sorted(store.records(shown.gpu, Measurement, data), key=lambda row: (row.run, row.with_lse))
        _write_csv(folder / "measurements.csv.xz", tables.MEASUREMENT_COLUMNS, tables.measurement_lines(rows))
        _write_csv(folder / "samples.csv.xz", tables.SAMPLE_COLUMNS, tables.sample_lines(rows))
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(out.root / "data").as_posix()
            sha256 = digest(path.read_bytes())[:12]
            listed.append((f"[{name}](generated/data/{name})", f"{path.stat().st_size:,}", f"`{sha256}…`"))
    files = tables.unsearched(markdown(("file", "bytes", "sha256"), listed))
    out.snippet("downloads.md", files if listed else NOTHING_YET)
    lacking = "\n".join(f"`{shown.gpu}`\n\n{coverage.table(shown.gpu, data)}" for shown in everything)
    out.snippet("coverage.md", lacking or NOTHING_YET)
    withdrawn = [
        f"- `{of.gpu}`, {', '.join(map(code, back.inputs))}{f' at D{back.head_dim}' if back.head_dim else ''}"
        f"{f' {back.mask}' if back.mask else ''} in {', '.join(map(code, back.runs))}. {back.reason}"
        for of in everything
        for back in store.withdrawn(of.gpu, data)
    ]
    out.snippet("withdrawn.md", "\n".join(withdrawn) or "None.")
    for name, columns in (("measurements", tables.MEASUREMENT_COLUMNS), ("samples", tables.SAMPLE_COLUMNS)):
        lines = [(code(column), meaning) for column, meaning in columns.items()]
        out.snippet(f"dictionary-{name}.md", markdown(("column", "meaning"), lines, left=2))
    parts = (schema.Samples, schema.Verdict, schema.CubinFields, schema.Conditions, schema.LineStalls)
    models = (*store.FOLDERS, *parts, schema.Gpu, schema.Source, schema.Start)
    out.snippet("dictionary-records.md", "\n\n".join(map(dictionary, models)))


def dictionary(model: Any) -> str:
    """The data dictionary of a kind of record."""
    types = get_type_hints(model)  # without the constraints that pydantic's annotations carry
    columns = (
        Column("field", "0", code),
        Column("type", lambda item: code(_type_name(types[item[0]])), left=True),
        Column("meaning", lambda item: " ".join((item[1].description or "").replace("`", "").split()), left=True),
    )
    meaning = inspect.cleandoc(model.__doc__ or "")
    return f"### {model.__name__}\n\n{meaning}\n\n{table(columns, model.model_fields.items())}"


def _type_name(annotation: object) -> str:
    """A field's type to display: `float | None`, `tuple[Samples, ...]`."""
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"Optional\[(.+)\]", r"\1 | None", re.sub(r"(?:\w+\.)+(?=\w)", "", text))


def _write_csv(path: Path, columns: Mapping[str, str], lines: Sequence[Mapping[str, object]]) -> None:
    """Write a compressed table, deterministically."""
    table = pd.DataFrame(lines, columns=list(columns), dtype=object)
    table.to_csv(path, index=False, lineterminator="\r\n", compression={"method": "xz", "preset": _XZ_PRESET})


_TEMPLATES.globals |= {
    **{"charts": charts, "journey": journey, "machine_code": machine_code, "select": select, "tables": tables},
    **{
        helper.__name__: helper for helper in (code, data_links, number, percent, several, stage_link, table, times, up)
    },
    "NOTHING_YET": NOTHING_YET,
}
