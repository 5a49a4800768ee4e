"""Measure, execute the notebooks, have the pages generated, and build the site.

notebooks/*.ipynb ──papermill──▶ OUT/notebooks/*.ipynb, *.json ─nbconvert─┐
data/<gpu>/ ──────────────────── figures, tables, downloads ──────────────┼▶ OUT/pages/ ─mkdocs▶ OUT/site/
kernels/*.cu ─────────────────── diffs against the parent ────────────────┤
site/*.md ────────────────────── hand-written pages, copied ──────────────┘
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashlab.core.errors import OutputError, ReportError
from flashlab.core.paths import BUILD, DATA, NOTEBOOKS, ROOT, SITE, writable_dir
from flashlab.kernels import registry
from flashlab.record import store, upload
from flashlab.show import pages, sweep
from flashlab.show.notebook import settings
from flashlab.show.pages import PAGE_OF
from flashlab.show.sweep import Say, run_program, tail

_SITE_TIMEOUT_S = 180.0
_SHOWN_MIN = 0.3
"""Estimated minutes of a notebook that only shows records."""


# --- The site ---------------------------------------------------------------------------------------------------------


def write_pages(
    out: Path = BUILD,
    *,
    data: Path = DATA,
    executed: Path | None = None,
    gpu: str = "",
    failed: Mapping[str, str] | None = None,
) -> Path:
    """Copy the hand-written pages and regenerate what they include, in `out`/pages, and return that folder.

    Args:
        data, executed, gpu, failed: as for `pages.generate`.

    Raises:
        NoDataError: `gpu` has no records.
        OutputError: `out` cannot be written.
    """
    folder = writable_dir(out, "the pages") / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(SITE, folder, ignore=shutil.ignore_patterns("generated"))
    except shutil.Error as error:  # all that were not copied: one says why
        raise OutputError(f"wanted to copy {SITE} to {folder}, got: {error.args[0][0][2]}") from error
    pages.generate(folder / "generated", data, executed=executed, gpu=gpu, failed=failed)
    return folder


def build_site(out: Path = BUILD, *, config: Path = ROOT / "mkdocs.yml") -> Path:
    """Build the site from `out`/pages, strictly, into `out`/site; return its index.html.

    The configuration that is built, `out`/mkdocs.yml, is the repository's for that folder, and has the pages that
    depend on the registry and on data/ in its navigation: one a stage, one a GPU. The environment's FLASHLAB_SITE_URL
    is where the site will be published, for previews of links and the page of errors; empty: not known.

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
        "decode/index.md": [
            {stage_id: f"{stage.folder}{stage_id}.md"}
            for stage_id, stage in {**registry.DECODE, **registry.FP8}.items()
        ],
        "dead_ends/index.md": [{stage_id: f"dead_ends/{stage_id}.md"} for stage_id in registry.DEAD_ENDS],
        "results.md": [
            {f"{gpu['name']}{', partial' * gpu['partial']}": f"generated/results/{gpu['slug']}.md"} for gpu in gpus
        ],
    }
    configuration["nav"] = _expanded(configuration["nav"], after)
    configuration["extra"]["gpus"] = gpus
    # Beside the configuration, because Zensical, which builds the same file, takes no paths that lead elsewhere.
    overrides = configuration["theme"]["custom_dir"]
    shutil.copytree(ROOT / overrides, folder / overrides, dirs_exist_ok=True)
    configuration["site_url"] = os.environ.get("FLASHLAB_SITE_URL", "")
    configuration["docs_dir"], configuration["site_dir"] = "pages", "site"
    configuration["hooks"] = [str(Path(__file__).with_name("part_of.py"))]
    for extension in configuration["markdown_extensions"]:
        if isinstance(extension, dict) and "pymdownx.snippets" in extension:
            extension["pymdownx.snippets"]["base_path"] = [str(listing.parent / "snippets")]
    written = folder / "mkdocs.yml"
    written.write_text(yaml.safe_dump(configuration, allow_unicode=True, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", str(written)]
    status, log = run_program(command, _SITE_TIMEOUT_S)
    index = folder / "site" / "index.html"
    if status != 0 or not index.is_file():
        what = "ran out of time" if status is None else f"ended with status {status}"
        raise ReportError(f"mkdocs {what}\n{tail(log)}")
    _lighten(folder / "site")
    return index


def _lighten(built: Path) -> None:
    """Remove files that no page uses from a built site, and shorten markup that tables repeat in every cell."""
    # The theme brings maps of its sources, and search in other languages.
    for path in (built / "assets").rglob("*.map"):
        path.unlink()
    shutil.rmtree(built / "assets" / "javascripts" / "lunr", ignore_errors=True)
    for path in built.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        text = text.replace(' style="text-align: right;"', ' class="r"').replace(' style="text-align: left;"', "")
        text = re.sub(r"<th( class=\"r\")?></th>", r"<td\1></td>", text)  # what names no column is no header
        path.write_text(text, encoding="utf-8")


def _expanded(nav: Sequence[Any], after: Mapping[str, Sequence[Mapping[str, str]]]) -> list[Any]:
    """A navigation with entries added after the given pages."""
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


def measuring(gpu: str, *, full: bool = False, stages: str = "") -> tuple[sweep.Cell, ...]:
    """The cells that a report measures on a GPU: the set `full` or `quick` of notebooks/cells.toml."""
    return sweep.cells_of("full" if full else "quick", available=[gpu], given={"stages": stages} if stages else None)


def showing(gpu: str, *, stages: str = "") -> tuple[sweep.Cell, ...]:
    """The cells that show the records: every notebook with a page."""
    cells = []
    for notebook in (NOTEBOOKS / f"{name}.ipynb" for name in PAGE_OF):
        given = {"source": "replay", "stages": stages}
        known = sweep.parameters_of(notebook)
        chosen = {key: value for key, value in given.items() if key in known and value}
        cells.append(sweep.cell(notebook, gpu, chosen, minutes=_SHOWN_MIN))
    return tuple(cells)


def plan(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str = "",
    full: bool = False,
    data: Path = DATA,
    out: Path = BUILD,
) -> list[dict[str, Any]]:
    """The plan of `run` with estimated times, one line per notebook; raises as `run` does, and runs nothing."""
    lab = settings(source=source, gpu=gpu, stages=stages, out=out / "notebooks", data=data)
    cells = measuring(lab.gpu, full=full, stages=stages) if lab.source == "measure" else ()
    shown = sweep.planned(showing(lab.gpu, stages=stages), out / "notebooks", data, flat=True)
    # They are executed anew, whatever was done, and two at a time.
    again = [cell | {"state": "left", "why": "", "minutes": round(cell["minutes"] / 2, 2)} for cell in shown]
    return [*sweep.planned(cells, out / "sweep", data), *again]


def run(
    *,
    source: str = "auto",
    gpu: str = "",
    stages: str = "",
    full: bool = False,
    data: Path = DATA,
    out: Path = BUILD,
    timeout_s: float | None = None,
    say: Say = lambda _: None,
    live: Say = lambda _: None,
) -> Path:
    """The whole report: measure, execute every notebook, generate, build; return the built index.html.

    Measures the cells of `measuring` on this machine's GPU, or nothing if `source` is or resolves to `replay`.

    Args:
        source, gpu, stages: the notebooks' parameters, see `notebook.settings`.
        full: measure all that a report shows, not a first look.
        data: folder of the records; measuring appends to it.
        out: folder for everything built: `sweep/`, `notebooks/`, `pages/` and `site/`; nothing is written elsewhere.
        timeout_s: for one notebook.
        say, live: as `sweep.run` takes them.

    Raises:
        ParameterError, UnknownStageError, NoGpuError, NoDataError, OutputError: as `notebook.settings` and
            `upload.sync`, and before anything runs; OutputError at the end too, where records could not be sent.
        ReportError: the site's build failed; or a notebook, and then the site is built all the same and its page says
            so.
    """
    executed = out / "notebooks"
    lab = settings(source=source, gpu=gpu, stages=stages, out=executed, data=data)
    say(str(lab))
    shown = lab.gpu
    failed: dict[str, str] = {}
    if lab.source == "measure":
        cells = measuring(shown, full=full, stages=stages)
        states = sweep.run(cells, out / "sweep", data, timeout_s=timeout_s, available={shown: 1}, say=say, live=live)
        failed |= {cell.notebook.stem: states[cell.id].why for cell in cells if states[cell.id].state != "done"}
        if shown not in store.gpus(data):
            say(f"nothing of {shown} is on record, so the pages show other GPUs")
            shown = ""
    cells = showing(shown, stages=stages)
    states = sweep.run(cells, executed, data, flat=True, timeout_s=timeout_s, fresh=True, say=say, live=live)
    failed |= {cell.notebook.stem: states[cell.id].why for cell in cells if states[cell.id].state != "done"}
    write_pages(out, data=data, executed=executed, gpu=shown, failed=failed)
    say("pages generated")
    index = build_site(out)
    say(f"site built: {index}")
    if lab.source == "measure":
        upload.sync(lab.gpu, data)
    if failed:
        raise ReportError(
            f"the report is in {index.parent}, without what these notebooks were to show: {', '.join(failed)}\n"
            + "\n".join(f"{name}: {why}" for name, why in failed.items())
        )
    return index
