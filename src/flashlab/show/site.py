"""Execute the notebooks, draw what the pages need from data/, and build the site.

    notebooks/*.ipynb ──papermill──▶ build/notebooks/*.ipynb, *.json ─nbconvert─┐
    data/<gpu>/ ──────────────────── figures, tables, downloads ────────────────┼▶ site/generated/ ─mkdocs▶ build/site/
    kernels/*.cu ─────────────────── diffs against the parent ──────────────────┘

site/ holds hand-written Markdown that takes in snippets from site/generated/snippets/; no number is written by hand.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

from flashlab.build import compiler, sass
from flashlab.core.errors import MissingPackageError, NoDataError, ParameterError, ReportError
from flashlab.core.inputs import KINDS, NORMAL
from flashlab.core.paths import BUILD, DATA, NOTEBOOKS, ROOT, SITE, writable_dir
from flashlab.core.problem import DTYPES, MASKS, Problem, suite
from flashlab.experiments import ablation, ledger, levers, timers
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.query import select
from flashlab.query.select import Results
from flashlab.record import store
from flashlab.record.store import Measurement
from flashlab.show import charts, tables
from flashlab.show.charts import LAYOUTS, MIME, THEMES, Chart
from flashlab.show.notebook import NOTHING_YET, Outcome, read_outcome, settings
from flashlab.verify.cases import FLASH_ATTENTION, FLASH_ATTENTION_INPUTS

PAGE_OF: Mapping[str, str] = {
    "02_ladder": "stages/index.md",
    "07_against_peers": "against.md",
    "04_roofline": "roofline.md",
    "06_cycle_model": "cycle_model.md",
    "01_correctness": "correctness.md",
    "00_hardware": "hardware.md",
    "03_anatomy": "anatomy.md",
    "09_tuning": "tuning.md",
    "10_method": "timers.md",
    "05_ablations": "ablations.md",
    "08_claims": "ledger.md",
    "edit_a_kernel": "edit.md",
}
"""The page each notebook is shown on, those that measure before those that show what was measured."""

WRITTEN_ABOUT, _ITS_NAME = "nvidia-h200", "H200"
"""The GPU that the hand-written conclusions are about."""
_CONCLUDING = ("04_roofline", "06_cycle_model")
"""Notebooks whose text draws conclusions from that GPU's numbers."""
NO_CHECKS = (
    "*No such comparison is on record yet: `flashlab check --random 1000 --record` and `flashlab check --record` on a "
    "GPU make them.*"
)
NO_SANITIZER = "*No such run is on record yet: `python scripts/sanitize.py` on a GPU with compute-sanitizer makes one.*"

REPLAY_TIMEOUT_S = 300.0
MEASURE_TIMEOUT_S = 3600.0
_SITE_TIMEOUT_S = 180.0

Say = Callable[[str], None]


# --- Notebooks --------------------------------------------------------------------------------------------------------


def execute(notebook: Path, out: Path, parameters: Mapping[str, str], timeout_s: float = REPLAY_TIMEOUT_S) -> Outcome:
    """Execute a notebook through papermill into `out`, and read its result file.

    papermill's exit status alone does not prove success: a cell that exits and a mistyped parameter leave it at 0, and
    a killed kernel leaves no trace in the notebook. So parameters are checked by name first, and afterwards no cell may
    be pending and the result file must be there and valid.

    Args:
        out: folder for the executed notebook and its result file.
        parameters: values by name; `out` is set here.
        timeout_s: for the whole notebook; the kernel is stopped when it is over.

    Raises:
        ParameterError: a name that the notebook has no parameter for.
        ReportError: it failed, ran out of time or did not come to its end.
        OutputError: `out` cannot be written.
    """
    import nbformat
    import papermill

    name = notebook.stem
    known = papermill.inspect_notebook(str(notebook))
    unknown = [p for p in parameters if p not in known]
    if unknown or not known:
        raise ParameterError(
            f"notebook {name}: wanted parameters among {', '.join(known) or 'none (it has no parameters cell)'}, "
            f"got {', '.join(unknown) or 'none'}"
        )
    folder = writable_dir(out, "executed notebooks")
    executed, result = folder / notebook.name, folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(notebook),
        str(executed),
        "--kernel",
        "python3",
        "--no-progress-bar",
    ]
    command += ["--log-level", "ERROR", "--execution-timeout", str(int(timeout_s))]
    for key, value in {**parameters, "out": str(folder)}.items():
        command += ["-r", key, value]
    status, log = _run(command, timeout_s + 10)
    cells = nbformat.read(executed, as_version=4).cells if executed.is_file() else []  # type: ignore[no-untyped-call]
    failure = _failure(cells)
    if status != 0 or failure:
        what = failure or ("ran out of time" if status is None else f"papermill ended with status {status}")
        raise ReportError(f"notebook {name}: {what}\n{_tail(log)}".rstrip())
    return read_outcome(result, name)


def _failure(cells: Iterable[Any]) -> str:
    """What went wrong according to an executed notebook; empty where nothing did."""
    for number, cell in enumerate(cells, start=1):
        if cell.cell_type != "code":
            continue
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"cell {number}: {output.ename}: {output.evalue}"
        if cell.metadata.get("papermill", {}).get("status") == "pending":
            return f"cell {number} never ran"
    return ""


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status (None: stopped at the timeout) and output of a command that reads nothing and runs at the root."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
    ) as process:
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # A kernel ends by itself when its parent is gone.
            os.killpg(process.pid, signal.SIGKILL)
            log, _ = process.communicate()
            return None, log
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, log


def _tail(log: str, lines: int = 30) -> str:
    return "\n".join(log.strip().splitlines()[-lines:])


def execute_all(
    out: Path,
    parameters: Mapping[str, str],
    *,
    measuring: bool,
    notebooks: Path = NOTEBOOKS,
    timeout_s: float | None = None,
    say: Say = lambda _: None,
) -> dict[str, Outcome]:
    """Execute every notebook: two at a time, or one when measuring, because they would disturb each other.

    Raises:
        As `execute`.
    """
    limit = timeout_s or (MEASURE_TIMEOUT_S if measuring else REPLAY_TIMEOUT_S)
    names = [*PAGE_OF, *sorted(p.stem for p in notebooks.glob("*.ipynb") if p.stem not in PAGE_OF)]
    outcomes: dict[str, Outcome] = {}
    # A notebook is a process of its own; threads only wait for them.
    with ThreadPoolExecutor(1 if measuring else 2) as pool:
        jobs = {name: pool.submit(execute, notebooks / f"{name}.ipynb", out, parameters, limit) for name in names}
        try:
            for name, job in jobs.items():
                outcomes[name] = job.result()
                say(f"{name} done")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return outcomes


# --- What the pages take in -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Output:
    """Writes what is generated, below site/generated/."""

    root: Path

    def text(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.rstrip("\n") + "\n", encoding="utf-8")

    def snippet(self, path: str, content: str) -> None:
        self.text(f"snippets/{path}", content)

    def chart(self, chart: Chart, page: str) -> str:
        """Write a chart's variants; the Markdown that shows the fitting one on `page` (relative to docs_dir)."""
        up = _up(page)
        alt = chart.alt.replace("[", "(").replace("]", ")").replace("\n", " ")
        images = []
        for layout in LAYOUTS:
            # With its size known the browser keeps the room, and nothing jumps when a figure arrives.
            width, height = charts.size_px(chart.svg[layout])
            for theme in THEMES:
                name = f"figures/{chart.name}.{layout}.{theme}.svg"
                self.text(name, chart.themed(layout, theme))
                attributes = f".{layout} loading=lazy width={width} height={height}"
                images.append(f"![{alt}]({up}generated/{name}#only-{theme}){{ {attributes} }}")
        links = [f"[data]({up}generated/data/{file})" for file in chart.data_files]
        source = " · ".join([html.escape(chart.provenance, quote=False), *links] if chart.provenance else links)
        return (
            f'<figure class="chart" markdown>\n{"".join(images)}\n'
            f'<figcaption markdown="span">{chart.caption}'
            f"{f' <small>{source}</small>' if source else ''}</figcaption>\n</figure>\n"
        )


def _up(page: str) -> str:
    """From a page's folder to docs_dir: `../` for each folder it lies in."""
    return "../" * page.count("/")


def generate(
    data: Path = DATA, *, site: Path = SITE, executed: Path | None = None, gpu: str = "", notebooks: Path = NOTEBOOKS
) -> Path:
    """Write everything the pages take in below `site`/generated/, anew; that folder.

    Args:
        data: folder of the records.
        site: the pages' folder.
        executed: folder of executed notebooks; pages say that they were not executed, where None.
        gpu: the GPU that pages about the ladder show; empty: the one measured last.

    Raises:
        NoDataError: `gpu` has no records.
        OutputError: site/generated/ cannot be written.
    """
    if gpu:
        store.runs(gpu, data)
    shutil.rmtree(site / "generated", ignore_errors=True)
    out = _Output(root=writable_dir(site / "generated", "generated pages"))
    everything = select.load_all(data)
    shown = next((r for r in everything if r.gpu == gpu), everything[0] if everything else None)

    for name, page in PAGE_OF.items():
        text = _notebook_page(out, name, page, executed, notebooks)
        if name in _CONCLUDING:
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n{_elsewhere(shown, 'The text of this page')}\n{rest}"
        out.snippet(f"notebooks/{name}.md", text)
    _generate_front(out, shown, data)
    _generate_inputs(out, shown, data)
    # Drawing is most of the work, and independent from stage to stage.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_generate_stage, out, stage, shown, data) for stage in registry.STAGES.values()]
        jobs += [pool.submit(_generate_results, out, found, data) for found in everything]
        told = select.dead_ends(shown.gpu, data) if shown else {}
        # A rung that was retired was measured with the ladder, at every problem.
        ladder = {one: shown.problems[one] for one in suite("first") if one in shown.problems} if shown else {}
        jobs += [
            pool.submit(_generate_dead_end, out, stage, ladder if stage.retired else told)
            for stage in registry.DEAD_ENDS.values()
        ]
        for job in jobs:
            job.result()
    _generate_stage_list(out)
    _generate_dead_end_list(out, told, ladder)
    _generate_levers(out, shown, data)
    _generate_results_index(out, everything)
    _generate_check_records(out, everything, data)
    lines = [f"- {timers.samples_line(found.gpu, data)}" for found in everything]
    out.snippet("inputs.md", tables.inputs())
    out.snippet("samples.md", "\n".join(lines) if lines else NOTHING_YET)
    _generate_ledger(out, shown, data)
    _generate_data(out, everything, data)
    out.text("nav.json", json.dumps([[r.name, f"generated/results/{r.gpu}.md"] for r in everything]))
    return out.root


def _elsewhere(shown: Results | None, what: str) -> str:
    """That hand-written text is about another GPU than the one shown; empty where it is not."""
    if shown is None or shown.gpu == WRITTEN_ABOUT:
        return ""
    return f'!!! note ""\n    {what} was written about the {_ITS_NAME}; the numbers are those of the {shown.name}.\n'


def _notebook_page(out: _Output, name: str, page: str, executed: Path | None, notebooks: Path) -> str:
    """An executed notebook as Markdown, its charts as figures."""
    import nbformat
    from nbconvert import MarkdownExporter

    source = (executed or notebooks) / f"{name}.ipynb"
    if not source.is_file():
        raise ReportError(
            f"notebook {name}: wanted it executed in {source.parent}, found none; report.execute makes it"
        )
    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    hidden = {"parameters", "injected-parameters", "hide"}
    notebook.cells = [cell for cell in notebook.cells if not hidden & set(cell.metadata.get("tags", []))]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            # Links that hold where the notebook lies, made to hold on its page.
            cell.source = cell.source.replace("](../site/", f"]({_up(page)}")
        if cell.cell_type != "code":
            continue
        if "hide-input" in cell.metadata.get("tags", []):
            cell.metadata["transient"] = {"remove_source": True}  # what nbconvert's templates look for
        kept = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                continue  # progress bars
            if MIME in output.get("data", {}):
                output["data"] = {"text/markdown": out.chart(Chart.from_mime(output["data"][MIME]), page)}
            kept.append(output)
        cell["outputs"] = kept
    text, _ = MarkdownExporter().from_notebook_node(notebook)  # type: ignore[no-untyped-call]
    target = out.root / "notebooks" / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    state = "executed for this page" if executed else "not executed for this page, so it shows no results"
    note = (
        '<p class="source" markdown="span">This page is the notebook '
        f"[`notebooks/{name}.ipynb`]({_up(page)}generated/notebooks/{name}.ipynb), {state}. "
        "The notebook holds the code of every figure and table.</p>\n"
    )
    return f"{text.strip()}\n\n{note}"


def _generate_front(out: _Output, shown: Results | None, data: Path = DATA) -> None:
    if shown is None or shown.first is None:
        out.snippet("front-chart.md", f'!!! note ""\n    {NOTHING_YET}\n')
        out.snippet("front-numbers.md", "")
        return
    rows, beside = shown.rows(), shown.beside()
    stage, peer = select.fastest_stage(rows), select.fastest_peer(rows)
    try:
        out.snippet("front-chart.md", out.chart(charts.ladder(rows, name="front", beside=beside), "index.md"))
    except NoDataError as error:
        out.snippet("front-chart.md", f'!!! note ""\n    {error}\n')
    cards: list[tuple[str, str]] = []
    if stage:
        cards.append((f"{tables.number(select.rate(stage))} TFLOP/s", f"fastest stage, {stage.name}"))
        first = next((r for r in rows if r.kind == "stage" and select.rate(r)), stage)
        if first is not stage:
            factor = (select.rate(stage) or 0.0) / (select.rate(first) or 1.0)
            cards.append((f"×{tables.number(factor)}", f"over {first.name}"))
        if peer:
            share = 100 * (select.rate(stage) or 0.0) / (select.rate(peer) or 1.0)
            said = f"of the fastest library in {peer.problem.dtype}, {tables.peer_title(peer.name)}"
            faster = select.fastest_peer([peer, *beside])
            if faster is not None and faster is not peer:
                # The library to pass lacks this type: what counts first is the ratio in the type that it has.
                other = dataclasses.replace(shown.first, dtype=faster.problem.dtype)
                contest = next((x.burst for x in select.against_peers(shown.gpu, data) if x.problem == other), None)
                if contest:
                    where = f"of the fastest library in {other.dtype}, {tables.peer_title(contest.peer)}"
                    cards.append((f"{tables.number(100 * contest.ratio)} %", where))
                said += f"; {tables.peer_title(faster.name)}: {tables.lacks(faster.name, peer.problem.dtype)}"
            cards.append((f"{tables.number(share)} %", said))
    timed = sum(row.status == "ok" for found in shown.problems.values() for row in found)
    cards.append((str(timed), f"checked and timed rows over {len(shown.problems)} problems"))
    items = "".join(f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>" for value, label in cards)
    where = f"Rates and ratios are those at {shown.first.label}, {select.on_inputs([shown.first])}."
    out.snippet("front-numbers.md", f'<dl class="numbers">{items}</dl>\n<p class="source">{where}</p>\n')


def _generate_inputs(out: _Output, shown: Results | None, data: Path) -> None:
    """Ratios over the libraries, and errors, by kind of inputs; a note where they were not measured."""
    if shown is None:
        out.snippet("against-inputs.md", NOTHING_YET)
        out.snippet("accuracy.md", NOTHING_YET)
        return
    shapes = {problem.shape for problem in select.MAIN}
    try:
        found = select.against_peers(shown.gpu, data, tuple(KINDS))
        parts = [tables.against_inputs(found)]
        with contextlib.suppress(NoDataError):
            sustained = _indent(tables.against_inputs(found, "sustained"))
            parts.append(f'??? abstract "Under sustained load"\n\n{sustained}')
        runs = [run for one in found if one.problem.shape in shapes for run in (one.run, one.sustained_run)]
        text = "\n".join([*parts, _small_source(shown, filter(None, runs))])
    except NoDataError as error:
        text = f"*{error}*"
    out.snippet("against-inputs.md", text)
    errors = select.accuracy(shown.gpu, data)
    try:
        text = f"{tables.accuracy(errors)}\n{_small_source(shown, (one.run for one in errors))}"
    except NoDataError as error:
        text = f"*{error}*"
    out.snippet("accuracy.md", text)


def _small_source(shown: Results, runs: Iterable[str]) -> str:
    """The GPU, dates and commits of runs."""
    ids = sorted(set(runs))
    days = dict.fromkeys((select.date(ids[0]), select.date(ids[-1])))
    commits = sorted({select.commit_label(run) for run in ids})
    return f"<small>{shown.name} · {' to '.join(days)} · commit {', '.join(commits)}</small>"


def _generate_stage_list(out: _Output) -> None:
    lines = [(f"[`{s.id}`]({s.id}.md)", s.title, s.change) for s in registry.STAGES.values()]
    out.snippet("stages.md", tables.markdown(("stage", "idea", "change"), lines, left=3))


def _section(name: str, content: str) -> str:
    return f"<!-- --8<-- [start:{name}] -->\n{content.strip()}\n<!-- --8<-- [end:{name}] -->\n"


def diff_against_parent(stage: Stage) -> str:
    """Unified diff of a stage's kernel against its parent's; empty at the ladder's foot, and between languages."""
    if stage.parent is None or registry.get(stage.parent).language != stage.language:
        return ""
    parent = registry.get(stage.parent)
    before, after = (s.source.read_text(encoding="utf-8").splitlines() for s in (parent, stage))
    return "\n".join(difflib.unified_diff(before, after, parent.source.name, stage.source.name, lineterm="", n=3))


def _generate_stage(out: _Output, stage: Stage, shown: Results | None, data: Path) -> None:
    page = f"stages/{stage.id}.md"
    diff = diff_against_parent(stage)
    added = sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())
    removed = sum(line.startswith("-") and not line.startswith("---") for line in diff.splitlines())
    whole = _kernel_text(stage)
    if diff:
        heading = f"{stage.parent} → {stage.id}: {added} lines added, {removed} removed"
        shown_diff = f'``` {{ .diff .lesson title="{heading}" }}\n{diff}\n```\n'
        change = f"{stage.change}\n\n{shown_diff}\n{whole}"
    else:
        change = f"{stage.change}\n\n" + whole.replace("??? abstract", "???+ abstract", 1)
    needs = tables.markdown(
        ("", ""),
        [
            ("Parent", f"[`{stage.parent}`]({stage.parent}.md)" if stage.parent else "none: the foot of the ladder"),
            ("Architectures", stage.needs),
            ("Element types", ", ".join(stage.dtypes)),
            ("Head dims", ", ".join(map(str, stage.head_dims))),
            *((f"`{n}`", f"{p.meaning}; {_defaults(p)}") for n, p in stage.params.items()),
            *((f"`{n}`", f"for ablations: {p.meaning}; {_defaults(p)}") for n, p in stage.ablations.items()),
        ],
        left=2,
    )
    out.snippet(
        f"stages/{stage.id}.md",
        _section("title", f"# {stage.id}: {stage.title}")
        + _section("question", stage.question)
        + _section("change", change)
        + _section("needs", needs)
        + _section("prediction", stage.prediction)
        + _section("result", f"{_stage_result(out, stage, shown, page, data)}\n\n{_elsewhere(shown, 'What follows')}"),
    )


def _kernel_text(stage: Stage) -> str:
    source = stage.source.read_text(encoding="utf-8")
    return f'??? abstract "The whole kernel, {stage.source.name}"\n\n' + _indent(
        f"``` {{ .{'cuda' if stage.language == 'cuda' else 'python'} .kernel }}\n{source.rstrip()}\n```"
    )


def _generate_dead_end(out: _Output, stage: Stage, told: Mapping[Problem, Sequence[Measurement]]) -> None:
    needs = [
        ("Made from", f"`{stage.parent}`" if stage.parent else None),
        ("Architectures", stage.needs),
        ("Element types", ", ".join(stage.dtypes)),
        ("Head dims", ", ".join(map(str, stage.head_dims))),
        *((f"`{n}`", f"{p.meaning}; {_defaults(p)}") for n, p in stage.params.items()),
    ]
    out.snippet(
        f"dead_ends/{stage.id}.md",
        _section("title", f"# {stage.id}: {stage.title}")
        + _section("question", stage.question)
        + _section("built", f"{stage.change}\n\n{tables.markdown(('', ''), needs, left=2)}\n{_kernel_text(stage)}")
        + _section("prediction", stage.prediction)
        + _section("result", _dead_end_result(stage, told))
        + _section("code", _dead_end_code(stage)),
    )


def _dead_end_result(stage: Stage, told: Mapping[Problem, Sequence[Measurement]]) -> str:
    """A table a problem, with what was measured in turn, and why what has no time has none."""
    own = {stage.id, *stage.variant_names}
    parts = []
    for problem, rows in told.items():
        mine = [row for row in rows if row.name in own]
        if not mine:
            continue
        rungs = {*registry.STAGES, stage.parent}
        beside = [row for row in rows if row.name in own or row.kind == "peer" or row.name in rungs]
        parts.append(f"### {problem.label}\n\n{tables.dead_ends(beside, own)}")
        parts += [f"**{row.name}: {row.status}.** {row.reason}" for row in mine if row.status != "ok"]
        page = f"dead_ends/{stage.id}.md"
        links = ", ".join(f"[data]({_up(page)}generated/data/{file})" for file in select.run_files(mine))
        parts.append(f"<small>{select.provenance(mine)} · {links}</small>")
    return "\n\n".join(parts) or NOTHING_YET


def _dead_end_code(stage: Stage) -> str:
    """Branches and memory accesses of its machine code and its parent's, compiled here."""
    found: dict[str, Sequence[sass.Instruction]] = {}
    arch = "sm_90a"
    try:
        for name in (*([stage.parent] if stage.parent else ()), stage.id, *stage.variant_names):
            one, variant = registry.parse(name)
            cubin = compiler.compile_stage(
                one, head_dim=one.head_dims[0], dtype="float16", causal=False, arch=arch, overrides=variant
            )
            found[name] = sass.without_padding(sass.disassemble(cubin.code, cubin.entry))
    except MissingPackageError as error:
        return f"*Not compiled for this page: {error}*"
    return (
        f"{tables.branches(found)}\nInstructions in the machine code for {arch}, head dim {stage.head_dims[0]}, full "
        "mask, counted once each; `flashlab sass` lists them."
    )


def _generate_levers(out: _Output, shown: Results | None, data: Path) -> None:
    """Every lever: its question, its diff, what was expected and what came."""
    page = "levers.md"
    found = ablation.lever_effects(store.ablations(shown.gpu, data)) if shown else []
    drawn = ablation.lever_chart(found)
    out.snippet("levers-chart.md", drawn if isinstance(drawn, str) else out.chart(drawn, page))
    parts = []
    for lever in levers.choose():
        mine = [one for one in found if one.is_first or one.name == lever.name]
        added, removed = lever.changed_lines()
        links = ", ".join(
            f"[data]({_up(page)}generated/data/{file})"
            for file in dict.fromkeys(f"{one.gpu.slug}/ablations/{one.run}.jsonl" for one in mine if not one.is_first)
        )
        heading = f"{lever.stage}, changed: {added} lines added, {removed} removed"
        try:
            diff = lever.shown_diff()
        except ParameterError as error:
            diff, heading = (
                lever.diff.rstrip(),
                f"The change, which no longer fits the stage: {error}".replace('"', "'"),
            )
        parts += [
            f"### {lever.name.replace('_', ' ')}",
            f"{lever.question} (`{lever.name}`, {_link(lever.stage)})",
            f'??? abstract "{heading}"\n\n' + _indent(f"``` {{ .diff }}\n{diff}\n```"),
            f"*Expected:* {lever.prediction}",
            ablation.lever_table(mine) + (f" <small>· {links}</small>" if links else ""),
            lever.why,
        ]
    out.snippet("levers.md", "\n\n".join(part for part in parts if part))


def _generate_dead_end_list(
    out: _Output, told: Mapping[Problem, Sequence[Measurement]], ladder: Mapping[Problem, Sequence[Measurement]]
) -> None:
    first = next(iter(told), None)
    rows = {row.name: row for row in (*ladder.get(first, ()), *told[first])} if first else {}

    def came(stage: Stage) -> str | None:
        row = rows.get(stage.id)
        if row is None:
            return None
        rate = select.rate(row)
        return f"{tables.number(rate)} TFLOP/s" if rate else f"no time: {row.status}"

    lines = [(f"[`{s.id}`]({s.id}.md)", s.title, s.question, came(s)) for s in registry.DEAD_ENDS.values()]
    header = ("", "what", "hypothesis, as a question", f"at {first.label}" if first else "measured")
    out.snippet("dead_ends.md", tables.markdown(header, lines, left=3))


def _link(name: str) -> str:
    """A stage's page, from a page at the site's root."""
    folder = "stages" if name in registry.STAGES else "dead_ends"
    return f"[`{name}`]({folder}/{name}.md)"


def _defaults(param: registry.Param) -> str:
    special = "".join(f", {value} at head dim {dim}" for dim, value in param.by_head_dim.items())
    return f"default {param.default}{special}"


def _stage_result(out: _Output, stage: Stage, shown: Results | None, page: str, data: Path) -> str:
    """The Result section: the stage on the ladder, against its parent everywhere, its samples and its resources."""
    if shown is None or shown.first is None:
        return NOTHING_YET
    rows, beside = shown.rows(), shown.beside()
    row = next((r for r in rows if r.name == stage.id), None)
    if row is None:
        return f"*This stage was not measured in the run that is shown ({select.date(shown.newest)}).*"
    if row.status != "ok":
        return f"**No time at {shown.first.label}: {row.status}.** {row.reason}"
    parent = select.parent_of(row, rows)
    peer = select.fastest_peer(rows)
    rate, parent_rate, peer_rate = (
        select.rate(row),
        select.rate(parent) if parent else None,
        select.rate(peer) if peer else None,
    )
    where = f"{shown.first.label}, {select.on_inputs([shown.first])}, on one {shown.name}"
    told = f"**{tables.number(rate)} TFLOP/s** at {where}"
    if rate and parent and parent_rate:
        factor = rate / parent_rate
        told += f": **×{tables.number(factor)}** over `{parent.name}`" + (
            "" if factor >= 1 else ", slower than its parent"
        )
    if rate and peer and peer_rate:
        told += (
            f", {tables.number(100 * rate / peer_rate)} % of {tables.peer_title(peer.name)}, "
            f"the fastest library in {peer.problem.dtype}"
        )
    chart = charts.ladder(rows, name=f"ladder-{stage.id}", beside=beside, highlight=stage.id)
    parts = [told + ".", out.chart(chart, page)]
    lines: list[Sequence[tables.Cell]] = []
    for problem, found in shown.problems.items():
        mine = next((r for r in found if r.name == stage.id), None)
        if mine is None:
            continue
        if mine.status != "ok":
            lines.append((problem.label, mine.status, *[None] * 6))
            continue
        before, best = select.parent_of(mine, found), select.fastest_peer(found)
        value, base, top = (
            select.rate(mine),
            select.rate(before) if before else None,
            select.rate(best) if best else None,
        )
        lines.append(
            (
                problem.label,
                value,
                f"×{tables.number(value / base)}" if value and base else None,
                f"{tables.number(100 * value / top)} %" if value and top else None,
                select.rate(mine, "sustained", "hot"),
                _of_best(mine, found),
                *_cycles_and_energy(mine),
            )
        )
    header = (
        "problem",
        "burst TFLOP/s",
        "over parent",
        "of the fastest library",
        "sustained TFLOP/s",
        "of the fastest library",
        "SM clocks a score",
        "mJ a call",
    )
    parts.append(
        f"### Every problem\n\n{tables.markdown(header, lines)}\n\n"
        "The fastest library is the one of the same problem, element type included, also where a later session timed "
        "it than the stage; [Against the libraries](../against.md) has both from one run. "
        "A dash: not measured. Energy is that of sustained load, clocks a score are those of bursts."
    )
    rivals = [r for r in (row, parent, peer) if r is not None and r.samples]
    parts.append(
        f"### Clocks, power and energy\n\n{tables.costs(rivals)}\n\nAt {shown.first.label}; a dash: not recorded. "
        "[Method](../method.md#how-a-time-is-taken) says how the clock in the calls is read."
    )
    profiled = [one for one in select.profiles(shown.gpu, data) if one.stage in (stage.id, stage.parent)]
    parts += _profiles(profiled, page)
    traced = [one for one in profiled if one.stage == stage.id and one.lines][:1]
    if traced:
        parts.append(
            f"### Where its warps were\n\n{tables.hot_lines(traced, lines=10)}\n"
            f"Samples at regular times, {select.profile_provenance(traced)}. A line stands for what is inlined there."
        )
    parts.append(f"### Samples\n\n{out.chart(charts.samples(row, name=f'samples-{stage.id}'), page)}")
    cubins = {r.name: r.cubin for r in (row, parent) if r and r.cubin}
    for problem, found in shown.problems.items():
        # The same source in another element type is other machine code.
        if dataclasses.replace(problem, dtype=shown.first.dtype) == shown.first and problem != shown.first:
            cubins |= {f"{r.name} {problem.dtype}": r.cubin for r in found if r.name == stage.id and r.cubin}
    if cubins:
        parts.append(f"### What it takes of an SM\n\n{tables.resources(cubins)}")
        mixes = tables.mixes({name: cubin.sass for name, cubin in cubins.items()})
        parts.append(
            f"### What it is made of\n\n{mixes}\n\nInstructions in the machine code by class, counted once each: "
            "[Anatomy](../anatomy.md) says what the classes hold."
        )
    return "\n\n".join(parts)


def _sustained_note(rows: Sequence[Measurement]) -> str:
    note = tables.elsewhere_note(rows, "sustained")
    return f"*Sustained: {note[0].lower()}{note[1:]}*\n\n" if note else ""


def _of_best(mine: Measurement, rows: Sequence[Measurement]) -> str | None:
    """Sustained, as a share of the library that is the fastest there."""
    best = select.fastest_peer(rows, "sustained")
    value, top = (select.rate(row, "sustained") if row else None for row in (mine, best))
    return f"{tables.number(100 * value / top)} %" if value and top else None


def _cycles_and_energy(row: Measurement) -> tuple[tables.Cell, tables.Cell]:
    burst, sustained = store.flat(row), store.flat(row, "sustained")
    cycles, energy = burst["cycles_per_score"], sustained["energy_j_per_call"]
    return (
        tables.number(cycles) if isinstance(cycles, float) else None,
        1e3 * energy if isinstance(energy, float) else None,
    )


def _profiles(found: Sequence[store.StageProfile], page: str) -> list[str]:
    """What the SM's units did, a table a problem, with where it comes from; nothing where no profile is on record."""
    parts = []
    for problem in dict.fromkeys(one.problem.problem() for one in found):
        those = [one for one in found if one.problem.problem() == problem]
        links = ", ".join(
            f"[{Path(name).name}]({_up(page)}generated/data/{name})" for name in select.profile_files(those)
        )
        parts.append(
            f"### What the units did: {problem.label}\n\n{tables.profiles(those)}\n"
            f"Percent of the cycles in which the SM was busy.\n\n{tables.traffic(those)}\n"
            "Bytes of one launch. Counted: Q, K and V read and O written once, and from L2 what each tile fetches.\n\n"
            f"{select.profile_provenance(those)} · {links}"
        )
    return parts


def _indent(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"


def _generate_results(out: _Output, shown: Results, data: Path) -> None:
    """The page of one GPU: every problem, stage, library, regime, and what has no time."""
    page = f"generated/results/{shown.gpu}.md"
    everything = [row for rows in shown.problems.values() for row in rows]
    parts = [
        f"# Results: {shown.name}",
        "Every row passed the checker before it was timed; a row without a time says why. "
        "Rates count 4·B·H·Sq·Sk·D operations, half of that under a square causal mask. "
        "[How it is measured](../../method.md).",
        "A percentage of the fastest library keeps to one problem: shape, mask and element type. "
        "Rows of another element type are a problem of their own. A library that the session did not time stands there "
        "from the newest later one that did.",
    ]
    beside = [f"{tables.peer_title(row.name)}: {row.problem.dtype}" for row in shown.beside()]
    if beside:
        parts.append(
            "Not every library, or the wheel it is called from, has every type. Measured in one type alone: "
            f"{', '.join(beside)}; look for it there, and not among the {shown.rows()[0].problem.dtype} percentages."
        )
    if shown.damage:
        listed = "\n".join(f"    - {html.escape(str(d).replace(str(ROOT), '.'))}" for d in shown.damage)
        parts.append(f'!!! warning "Not to be trusted, and left out where it could not be read"\n\n{listed}\n')
    parts.append(
        "## Against the libraries\n\n"
        "The best stage and the best library of the same element type, of those that took turns in one run: the "
        "newest whose session has the fastest library on record, or one close to it; on normally distributed inputs of "
        "unit scale where a problem names no others. Log-sum-exp alike: on for both where the library writes one, else "
        "off for both. Peak: what the tensor cores can do at the clock inside the calls. Sustained ratios, and those "
        "over the named libraries alone, may be of other runs; `flashlab results --against-peers --json` names "
        "each.\n\n"
        f"{tables.against(select.against_peers(shown.gpu, data))}"
    )
    for mask in ("full", "causal"):
        for dtype in ("float16", "bfloat16"):
            try:
                chart = charts.scaling(shown, mask=mask, dtype=dtype, name=f"scaling-{shown.gpu}-{mask}-{dtype}")
            except NoDataError:
                continue
            parts.append(f"## All shapes, {mask}, {dtype}\n\n{out.chart(chart, page)}")
    parts += _lengths(out, shown, page)
    if shown.first:
        rows = shown.rows()
        if any(row.samples for row in rows):
            with contextlib.suppress(NoDataError):
                chart = charts.regimes(rows, name=f"regimes-{shown.gpu}")
                parts.append(
                    f"## Burst, cold and sustained\n\n{out.chart(chart, page)}\n\n"
                    "A burst is over before the GPU meets its power limit; kept busy, it does, and slows down. "
                    "Both are true, of different uses. A cold cache means that L2 was overwritten before every call."
                )
            parts.append(
                f"## Clocks, power and energy\n\n{tables.costs(rows)}\n\nAt {shown.first.label}; a dash: not recorded. "
                "Clocks a score do not depend on the clock and say most about a kernel; under sustained load the "
                "currency is energy."
            )
    profiled = _profiles(select.profiles(shown.gpu, data), page)
    if profiled:
        parts.append("## In the SM\n\n" + "\n\n".join(profiled))
    missing = tables.untimed(everything)
    index = [
        (
            f"[{problem.label}](#{_anchor(problem)})",
            *_best(select.fastest_stage(rows)),
            *_best(select.fastest_peer(rows)),
        )
        for problem, rows in shown.problems.items()
    ]
    header = ("problem", "fastest stage", "TFLOP/s", "fastest library", "TFLOP/s")
    parts.append(f"## Every problem\n\n{tables.markdown(header, index)}")
    for number, (problem, rows) in enumerate(shown.problems.items()):
        files = " · ".join(f"[data](../data/{file})" for file in select.run_files(rows))
        # The anchor lies inside: following a link to it opens the section.
        section = (
            f"{select.provenance(rows)} · {files}\n{{ .source #{_anchor(problem)} }}\n\n"
            f"{tables.rates(rows, beside=shown.beside(problem))}\n"
            f"**Burst and sustained, hot and cold L2**:\n\n{tables.states(rows)}\n"
            f"{_sustained_note(rows)}"
            f"**Clocks, power and energy**:\n\n{tables.costs(rows)}"
        )
        parts.append(f'???{"" if number else "+"} abstract "{problem.label}"\n\n{_indent(section)}')
    parts.append("## Rows without a time\n\n" + (missing or "Every stage and library has a time at every problem."))
    if shown.ceilings:
        parts.append(f"## Ceilings\n\n{tables.ceilings(shown)}")
    if shown.machine:
        parts.append(f"## Machine\n\n{tables.machine(shown)}\n{tables.chips(shown, data)}")
    if everything:
        parts.append(f"## Software\n\n{tables.software(shown)}")
    out.text(f"results/{shown.gpu}.md", "\n\n".join(parts))


def _lengths(out: _Output, shown: Results, page: str) -> list[str]:
    """Figures and tables over sequence length; a sentence where there are none."""
    parts = []
    for dtype in DTYPES:
        for head_dim in (64, 128):
            for mask in MASKS:
                for regime in get_args(store.Regime):
                    what: dict[str, Any] = {"head_dim": head_dim, "mask": mask, "dtype": dtype, "regime": regime}
                    name = f"lengths-{shown.gpu}-D{head_dim}-{mask}-{dtype}-{regime}"
                    try:
                        chart, table = charts.lengths(shown, name=name, **what), tables.lengths(shown, **what)
                    except NoDataError:
                        continue
                    title = f"D{head_dim}, {mask}, {dtype}, {regime}"
                    parts.append(f'{out.chart(chart, page)}\n\n??? abstract "{title}: the numbers"\n\n{_indent(table)}')
    missing = "*Not measured on this GPU yet: `flashlab bench --suite lengths` does it.*"
    return ["## Over sequence length\n\n" + ("\n\n".join(parts) or missing)]


def _anchor(problem: Problem) -> str:
    return problem.label.lower().replace(" ", "-").replace("/", "-")


def _best(row: Measurement | None) -> tuple[tables.Cell, tables.Cell]:
    return (tables.title(row), select.rate(row)) if row else (None, None)


def _generate_results_index(out: _Output, everything: Sequence[Results]) -> None:
    lines = []
    for shown in everything:
        rows = [row for found in shown.problems.values() for row in found]
        best = select.fastest_stage(shown.rows()) if shown.first else None
        lines.append(
            (
                f"[{shown.name}](generated/results/{shown.gpu}.md)",
                len(shown.problems),
                sum(row.status == "ok" for row in rows),
                sum(row.status != "ok" for row in rows),
                f"{tables.number(select.rate(best))} (`{best.name}`)" if best else None,
                select.date(shown.newest),
            )
        )
    header = (
        "GPU",
        "problems",
        "rows with a time",
        "rows without",
        "fastest stage at the first problem, TFLOP/s",
        "measured",
    )
    out.snippet("results.md", tables.markdown(header, lines) if lines else NOTHING_YET)


def _generate_check_records(out: _Output, everything: Sequence[Results], data: Path) -> None:
    """The newest comparisons on record of each GPU, and what compute-sanitizer found there."""
    said, sanitized = [], []
    for shown in everything:
        normal = (NORMAL,)
        kinds: tuple[tuple[select.CheckFolder, tuple[str, ...], str], ...] = (
            ("checks", normal, ""),
            ("random", normal, ""),
            (FLASH_ATTENTION, FLASH_ATTENTION_INPUTS, "flash-attention's own forward cases, by its own rule: "),
        )
        for kind, inputs, what in kinds:
            try:
                path = select.checks_file(shown.gpu, data, kind, inputs)
            except NoDataError:
                continue
            lines = select.checks(shown.gpu, data, kind, inputs)
            if lines:
                folder = f"generated/data/{shown.gpu}/{path.relative_to(data / shown.gpu)}"
                said.append(f"- {what}{tables.check_record(lines)} [Data]({folder})")
        found = store.sanitized(shown.gpu, data)
        if found:
            folder = f"generated/data/{shown.gpu}/sanitizer/{found[0].run}.jsonl"
            sanitized.append(f"{tables.sanitized(found)}\n[Data]({folder})")
    out.snippet("checks.md", "\n".join(said) if said else NO_CHECKS)
    out.snippet("sanitizer.md", "\n\n".join(sanitized) if sanitized else NO_SANITIZER)


def _generate_ledger(out: _Output, shown: Results | None, data: Path) -> None:
    """The claims with their verdicts, each with links to its records and to the pages of its stages."""
    out.snippet("ledger-rules.md", ledger.rules_table())
    out.snippet("ledger-verdicts.md", ledger.kinds_table())
    out.snippet("ledger-gpus.md", ledger.kinship_table())
    out.text("data/claims.csv", ledger.CLAIMS.read_text(encoding="utf-8"))
    if shown is None:
        out.snippet("ledger.md", NOTHING_YET)
        return

    def record(place: str) -> str:
        file, _, line = place.rpartition(":")
        folder = Path(file).parent.name
        page = {"ablations": " ([page](ablations.md))"}.get(folder, "")
        return f"[{folder}, line {line}](generated/data/{file}){page}"

    found = ledger.verdicts(shown.gpu, data)
    table = ledger.table(found, record=record, stage=_link)
    out.snippet("ledger.md", f'<div class="ledger" markdown>\n\n{table}\n</div>\n')


def _generate_data(out: _Output, everything: Sequence[Results], data: Path) -> None:
    """Copies of the raw data, the flattened tables, and what every field means."""
    listed = []
    for shown in everything:
        folder = out.root / "data" / shown.gpu
        shutil.copytree(data / shown.gpu, folder, dirs_exist_ok=True)
        rows = [row for run in store.runs(shown.gpu, data) for row in (*run.measurements, *run.with_lse)]
        _write_csv(folder / "measurements.csv", tables.MEASUREMENT_COLUMNS, tables.measurement_lines(rows))
        _write_csv(folder / "samples.csv", tables.SAMPLE_COLUMNS, tables.sample_lines(rows))
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(out.root / "data").as_posix()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            listed.append((f"[{name}](generated/data/{name})", f"{path.stat().st_size:,}", f"`{digest[:12]}…`"))
    out.snippet("downloads.md", tables.markdown(("file", "bytes", "sha256"), listed) if listed else NOTHING_YET)
    for name, columns in (("measurements", tables.MEASUREMENT_COLUMNS), ("samples", tables.SAMPLE_COLUMNS)):
        lines = [(f"`{column}`", meaning) for column, meaning in columns.items()]
        out.snippet(f"dictionary-{name}.md", tables.markdown(("column", "meaning"), lines, left=2))
    models = (
        store.Measurement,
        store.Ceiling,
        store.Samples,
        store.Verdict,
        store.CubinFields,
        store.Conditions,
        store.Tuning,
        store.Reading,
        store.Call,
        ledger.Verdict,
        ledger.Number,
        store.StageCounters,
        store.PatternCounters,
        store.StageProfile,
        store.LineStalls,
    )
    schema = [
        f"### {model.__name__}\n\n{(model.__doc__ or '').strip()}\n\n"
        + tables.markdown(
            ("field", "type", "meaning"),
            [
                (f"`{n}`", f"`{_type_name(f.annotation)}`", " ".join((f.description or "").replace("`", "").split()))
                for n, f in model.model_fields.items()
            ],
            left=3,
        )
        for model in (*models, store.Gpu, store.Source, store.Start)
    ]
    out.snippet("dictionary-records.md", "\n\n".join(schema))


def _type_name(annotation: object) -> str:
    """A field's type for people: `float | None`, `tuple[Samples, ...]`."""
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"(?:\w+\.)+(?=\w)", "", text)


def _write_csv(path: Path, columns: Mapping[str, str], lines: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns))
        writer.writeheader()
        writer.writerows(lines)


# --- The site ---------------------------------------------------------------------------------------------------------


def build_site(out: Path = BUILD, *, site: Path = SITE, config: Path = ROOT / "mkdocs.yml") -> Path:
    """Build the site, strictly, into `out`/site; its index.html.

    The configuration that is built, `out`/mkdocs.yml, is the repository's with absolute paths and with the pages that
    depend on the registry and on data/ in its navigation: one a stage, one a GPU.

    Raises:
        ReportError: site/generated/ was not generated, or a page, link or snippet is broken.
        OutputError: `out` cannot be written.
    """
    import yaml

    folder = writable_dir(out, "the site")
    listing = site / "generated" / "nav.json"
    if not listing.is_file():
        raise ReportError(f"wanted generated pages in {site / 'generated'}, found none; report.generate makes them")
    configuration = yaml.safe_load(config.read_text(encoding="utf-8"))
    after: dict[str, list[dict[str, str]]] = {
        "stages/index.md": [{stage_id: f"stages/{stage_id}.md"} for stage_id in registry.STAGES],
        "dead_ends/index.md": [{stage_id: f"dead_ends/{stage_id}.md"} for stage_id in registry.DEAD_ENDS],
        "results.md": [{name: page} for name, page in json.loads(listing.read_text(encoding="utf-8"))],
    }
    configuration["nav"] = _expanded(configuration["nav"], after)
    configuration["docs_dir"], configuration["site_dir"] = str(site.resolve()), str(folder.resolve() / "site")
    for extension in configuration["markdown_extensions"]:
        if isinstance(extension, dict) and "pymdownx.snippets" in extension:
            extension["pymdownx.snippets"]["base_path"] = [str(site.resolve() / "generated" / "snippets")]
    written = folder / "mkdocs.yml"
    written.write_text(yaml.safe_dump(configuration, allow_unicode=True, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(written)]
    status, log = _run(command, _SITE_TIMEOUT_S)
    index = folder / "site" / "index.html"
    if status != 0 or not index.is_file():
        what = "ran out of time" if status is None else f"ended with status {status}"
        raise ReportError(f"mkdocs {what}\n{_tail(log)}")
    return index


def _expanded(nav: Sequence[Any], after: Mapping[str, Sequence[Mapping[str, str]]]) -> list[Any]:
    """A navigation with more entries after those pages."""
    expanded: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, target),) = entry.items()
            expanded.append({title: _expanded(target, after) if isinstance(target, list) else target})
        else:
            target = entry
            expanded.append(entry)
        if isinstance(target, str):
            expanded += after.get(target, ())
    return expanded


def run(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str = "",
    suite: str = "standard",
    data: Path = DATA,
    out: Path = BUILD,
    site: Path = SITE,
    timeout_s: float | None = None,
    progress: Say = lambda _: None,
) -> Path:
    """The whole report: execute every notebook, generate, build; path of the built index.html.

    Args:
        source, gpu, stages, suite: the notebooks' parameters, see `notebook.settings`.
        data: folder of the records; measuring appends to it.
        out: folder for everything built: `notebooks/` and `site/`.
        timeout_s: for one notebook.
        progress: told what is done, a line at a time.

    Raises:
        ParameterError, UnknownStageError, NoGpuError, NoDataError, OutputError: as `notebook.settings`, and before
            anything runs.
        ReportError: a notebook or the site's build failed.
    """
    executed = out / "notebooks"
    lab = settings(source=source, gpu=gpu, stages=stages, suite=suite, out=executed, data=data)
    progress(str(lab))
    parameters = {"source": lab.source, "gpu": lab.gpu or "", "stages": stages, "suite": suite, "data": str(data)}
    execute_all(executed, parameters, measuring=lab.source == "measure", timeout_s=timeout_s, say=progress)
    generate(data, site=site, executed=executed, gpu=lab.gpu or "")
    progress("pages generated")
    index = build_site(out, site=site)
    progress(f"site built: {index}")
    return index
