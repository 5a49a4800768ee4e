"""Execute the notebooks, have the pages generated, and build the site.

notebooks/*.ipynb ──papermill──▶ OUT/notebooks/*.ipynb, *.json ─nbconvert─┐
data/<gpu>/ ──────────────────── figures, tables, downloads ──────────────┼▶ OUT/pages/ ─mkdocs▶ OUT/site/
kernels/*.cu ─────────────────── diffs against the parent ────────────────┤
site/*.md ────────────────────── hand-written pages, copied ──────────────┘
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashlab.core.errors import ParameterError, ReportError
from flashlab.core.paths import BUILD, DATA, NOTEBOOKS, ROOT, SITE, writable_dir
from flashlab.kernels import registry
from flashlab.record import upload
from flashlab.show import pages
from flashlab.show.notebook import Outcome, read_outcome, settings
from flashlab.show.pages import PAGE_OF
from flashlab.show.typed import typed_numbers

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
    command = [sys.executable, "-m", "papermill", str(notebook), str(executed), "--kernel", "python3"]
    command += ["--no-progress-bar", "--log-level", "ERROR", "--execution-timeout", str(int(timeout_s))]
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
    timeout_s: float | None = None,
    say: Say = lambda _: None,
    after_each: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """Execute every notebook that has a page: two at a time, or one when measuring, as they would disturb each other.

    Each is given those of the parameters that it has. One that fails is tried once more when measuring, and the others
    run all the same. `after_each` is called when a notebook has ended, well or not.

    Returns:
        What went wrong, by notebook; empty where all came to their end.

    Raises:
        As `execute`, but for ReportError.
    """
    import papermill

    limit = timeout_s or (MEASURE_TIMEOUT_S if measuring else REPLAY_TIMEOUT_S)

    def attempt(name: str) -> str:
        known = papermill.inspect_notebook(str(NOTEBOOKS / f"{name}.ipynb"))
        given = {key: value for key, value in parameters.items() if key in known}
        for left in (1, 0) if measuring else (0,):
            try:
                execute(NOTEBOOKS / f"{name}.ipynb", out, given, limit)
            except ReportError as error:
                say(f"{name} failed{', and is tried again' if left else ''}: {str(error).splitlines()[0]}")
                failure = str(error)
            else:
                say(f"{name} done")
                failure = ""
            after_each()
            if not failure:
                break
        return failure

    # A notebook is a process of its own; threads only wait for them.
    with ThreadPoolExecutor(1 if measuring else 2) as pool:
        jobs = {name: pool.submit(attempt, name) for name in PAGE_OF}
        try:
            failures = {name: job.result() for name, job in jobs.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: failure for name, failure in failures.items() if failure}


# --- The site ---------------------------------------------------------------------------------------------------------


def written_pages() -> tuple[Path, ...]:
    """What people wrote: the pages under site/, the notebooks and the README."""
    pages = (path for path in SITE.rglob("*.md") if "generated" not in path.relative_to(SITE).parts)
    return (*sorted(pages), *sorted(NOTEBOOKS.glob("*.ipynb")), ROOT / "README.md")


def write_pages(
    out: Path = BUILD,
    *,
    data: Path = DATA,
    executed: Path | None = None,
    gpu: str = "",
    failed: Mapping[str, str] | None = None,
) -> Path:
    """Copy the hand-written pages and generate what they take in, anew, in `out`/pages; that folder.

    Args:
        data, executed, gpu, failed: as for `pages.generate`.

    Raises:
        NoDataError: `gpu` has no records.
        ReportError: somebody typed a measured number into a page, a notebook or the README.
        OutputError: `out` cannot be written.
    """
    if found := list(typed_numbers(written_pages())):
        listed = "\n".join(f"  {one}" for one in found)
        raise ReportError(
            f"wanted measured numbers to come from records, found some that were typed:\n{listed}\nA snippet draws "
            "them from data/; a constant, arithmetic, a quotation or a prediction says so: <!-- fixed: why -->"
        )
    folder = writable_dir(out, "the pages") / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SITE, folder, ignore=shutil.ignore_patterns("generated"))
    pages.generate(folder / "generated", data, executed=executed, gpu=gpu, failed=failed)
    return folder


def build_site(out: Path = BUILD, *, config: Path = ROOT / "mkdocs.yml") -> Path:
    """Build the site of the pages in `out`/pages, strictly, into `out`/site; its index.html.

    The configuration that is built, `out`/mkdocs.yml, is the repository's with absolute paths and with the pages that
    depend on the registry and on data/ in its navigation: one a stage, one a GPU.

    Raises:
        ReportError: `out`/pages was not written, or a page, link or snippet is broken.
        OutputError: `out` cannot be written.
    """
    import yaml

    folder = writable_dir(out, "the site").resolve()
    listing = folder / "pages" / "generated" / "nav.json"
    if not listing.is_file():
        raise ReportError(f"wanted pages in {listing.parents[1]}, found none; site.write_pages makes them")
    configuration, gpus = yaml.safe_load(config.read_text(encoding="utf-8")), json.loads(listing.read_text("utf-8"))
    after: dict[str, list[dict[str, str]]] = {
        "stages/index.md": [{stage_id: f"stages/{stage_id}.md"} for stage_id in registry.STAGES],
        "dead_ends/index.md": [{stage_id: f"dead_ends/{stage_id}.md"} for stage_id in registry.DEAD_ENDS],
        "results.md": [
            {f"{one['name']}{', partial' * one['partial']}": f"generated/results/{one['slug']}.md"} for one in gpus
        ],
    }
    configuration["nav"] = _expanded(configuration["nav"], after)
    configuration["extra"]["gpus"] = gpus
    configuration["theme"]["custom_dir"] = str(ROOT / configuration["theme"]["custom_dir"])
    configuration["site_url"] = os.environ.get("FLASHLAB_SITE_URL", "")
    configuration["docs_dir"], configuration["site_dir"] = str(folder / "pages"), str(folder / "site")
    for extension in configuration["markdown_extensions"]:
        if isinstance(extension, dict) and "pymdownx.snippets" in extension:
            extension["pymdownx.snippets"]["base_path"] = [str(listing.parent / "snippets")]
    written = folder / "mkdocs.yml"
    written.write_text(yaml.safe_dump(configuration, allow_unicode=True, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(written)]
    status, log = _run(command, _SITE_TIMEOUT_S)
    index = folder / "site" / "index.html"
    if status != 0 or not index.is_file():
        what = "ran out of time" if status is None else f"ended with status {status}"
        raise ReportError(f"mkdocs {what}\n{_tail(log)}")
    _lighten(folder / "site")
    return index


def _lighten(built: Path) -> None:
    """Take out of a built site what no page asks for, and shorten what tables repeat in every cell."""
    # The theme brings maps of its sources, and search in other languages.
    for path in (built / "assets").rglob("*.map"):
        path.unlink()
    shutil.rmtree(built / "assets" / "javascripts" / "lunr", ignore_errors=True)
    for path in built.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        text = text.replace(' style="text-align: right;"', ' class="r"').replace(' style="text-align: left;"', "")
        path.write_text(text, encoding="utf-8")


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
    timeout_s: float | None = None,
    progress: Say = lambda _: None,
) -> Path:
    """The whole report: execute every notebook, generate, build; path of the built index.html.

    Args:
        source, gpu, stages, suite: the notebooks' parameters, see `notebook.settings`.
        data: folder of the records; measuring appends to it.
        out: folder for everything built: `notebooks/`, `pages/` and `site/`; nothing is written elsewhere.
        timeout_s: for one notebook.
        progress: called with what is done, a line at a time.

    Raises:
        ParameterError, UnknownStageError, NoGpuError, NoDataError, OutputError: as `notebook.settings` and
            `upload.sync`, and before anything runs; OutputError at the end too, where records could not be sent.
        ReportError: the site's build failed; or a notebook, and then the site is built all the same and its page says
            so.
    """
    executed = out / "notebooks"
    lab = settings(source=source, gpu=gpu, stages=stages, suite=suite, out=executed, data=data)
    progress(str(lab))
    parameters = {"source": lab.source, "gpu": lab.gpu or "", "stages": stages, "suite": suite, "data": str(data)}
    measuring = lab.source == "measure"
    if measuring:
        # Fetches what was measured before, and shows that records can be sent, before an hour of measuring.
        upload.sync(lab.gpu or "", data)

    def keep() -> None:
        if measuring and (failure := upload.attempt(lab.gpu or "", data)):
            progress(failure)

    failed = execute_all(
        executed,
        parameters,
        measuring=measuring,
        timeout_s=timeout_s,
        say=progress,
        after_each=keep,
    )
    write_pages(out, data=data, executed=executed, gpu=lab.gpu or "", failed=failed)
    progress("pages generated")
    index = build_site(out)
    progress(f"site built: {index}")
    if measuring:
        upload.sync(lab.gpu or "", data)
    if failed:
        raise ReportError(
            f"the report is in {index.parent}, without what these notebooks were to show: {', '.join(failed)}\n"
            + "\n".join(failed.values())
        )
    return index
