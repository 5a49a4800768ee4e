"""The built site: strict, whole, alone, and readable on a phone and a desk, in the light and in the dark."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import lzma
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlparse
from xml.etree import ElementTree

import pytest
import yaml
from shared import live_things

from flashlab.cli.app import _groups
from flashlab.kernels.registry import OFF_LADDER, STAGES
from flashlab.show import trial

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

PAGES = (
    "",
    "journey/",
    "stages/",
    "stages/06_cp_async/",
    "dead_ends/",
    "dead_ends/tile48/",
    "lost_shapes/",
    "real_data/",
    "predictions/",
    "results/",
    "generated/results/nvidia-h200/",
    "generated/results/nvidia-h100/",
    "explorer/",
    "compare/",
    "against/",
    "roofline/",
    "cycle_model/",
    "tuning/",
    "ablations/",
    "levers/",
    "ledger/",
    "anatomy/",
    "correctness/",
    "emulation/",
    "notebooks/",
    "edit/",
    "exercises/",
    "method/",
    "timers/",
    "glossary/",
    "data/",
    "reproduce/",
    "api/",
    "commands/",
)
WITH_FIGURES = (
    "",
    "journey/",
    "stages/",
    "stages/06_cp_async/",
    "generated/results/nvidia-h200/",
    "generated/results/nvidia-h100/",
    "compare/",
    "against/",
    "roofline/",
    "anatomy/",
    *(() if trial.no_compiler() else ("edit/",)),
)
SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
KINDS = (
    *("", "journey/", "stages/", "stages/06_cp_async/", "dead_ends/", "predictions/", "generated/results/nvidia-h100/"),
    *("explorer/", "compare/", "against/", "tuning/", "ledger/", "correctness/", "edit/", "data/", "api/", "commands/"),
)
"""One page of each kind, which `make test` opens on a phone, where less fits."""
DISTINCT = ("", "stages/06_cp_async/", "generated/results/nvidia-h100/", "explorer/", "compare/", "edit/", "api/")
"""Of these those with parts that the others have not: figures, tables, forms, notebooks, signatures.
`make test` opens these on both."""
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def built(report: Path) -> Path:
    """The whole report of made-up records: notebooks executed, pages generated, site built."""
    assert "02_ladder" in (report / "said.txt").read_text(encoding="utf-8")
    return report / "site"


def _pages(built: Path) -> list[Path]:
    return sorted(path for path in built.rglob("*.html") if path.name != "404.html")


def test_every_page_is_there_and_nothing_half_made(built: Path) -> None:
    for page in (
        *PAGES,
        *(f"stages/{stage_id}/" for stage_id in STAGES),
        *(stage.folder + f"{one}/" for one, stage in OFF_LADDER.items()),
    ):
        text = (built / page / "index.html").read_text(encoding="utf-8")
        assert "--8&lt;--" not in text, page
        assert "<h1" in text, page
    assert not list(built.rglob("snippets"))


def test_every_stage_is_in_the_navigation(built: Path) -> None:
    text = (built / "stages" / "index.html").read_text(encoding="utf-8")
    for stage_id in STAGES:
        assert re.search(rf'<a href="{stage_id}/" class="md-nav__link">', text)


def _listed(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation."""
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [target] if isinstance(target, str) else _listed(target)


def test_the_navigation_is_short_and_a_page_outside_it_is_part_of_one_that_links_it(built: Path) -> None:
    settings = yaml.safe_load((built.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(_listed(settings["nav"]))
    stages = {f"{stage.folder or 'stages/'}{one}.md" for one, stage in (STAGES | OFF_LADDER).items()}
    assert len([one for one in listed - stages if not one.startswith("generated/results/")]) <= 25
    folder = built.parent / "pages"
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    outside = {one for one in written - listed if not one.startswith("generated/snippets/")}
    for page in outside:
        name = page.removesuffix(".md")
        text = (built / name / "index.html").read_text(encoding="utf-8")
        back = re.search(r'<p class="part-of">Part of <a href="(.+?)">', text)
        assert back, f"{page} does not say of which page it is part"
        assert "md-tabs__item--active" in text
        parent = urljoin(f"/{name}/", back[1]).strip("/")
        assert listed & {f"{parent}.md", f"{parent}/index.md"}
        links = re.findall(r'href="([^"#]+)', (built / parent / "index.html").read_text(encoding="utf-8"))
        assert f"/{name}/" in {urljoin(f"/{parent}/", link) for link in links}, f"{parent} does not link {page}"


def test_the_reference_has_every_command_and_the_public_functions(built: Path) -> None:
    text = (built / "commands" / "index.html").read_text(encoding="utf-8")
    for group in _groups():
        for name in group.COMMANDS:
            assert f"<code>flashlab {name}</code>" in text
    text = (built / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("attention", "prepare", "emulate"):
        assert f'id="flashlab.run.attention.{name}"' in text
    assert "UnsupportedError" in text


def test_no_reference_leads_to_another_host_or_nowhere(built: Path) -> None:
    for path in _pages(built):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)="([^"]+)"', text)
        for reference in loaded:
            assert not urlparse(reference).netloc, f"{path} loads {reference}"
        for reference in re.findall(r'\b(?:src|href)="([^"#?]+)', text):
            if not urlparse(reference).scheme and not reference.startswith("/"):
                target = (path.parent / reference).resolve()
                assert (target / "index.html" if target.is_dir() else target).is_file(), f"{path} names {reference}"


def test_no_path_of_this_machine(built: Path) -> None:
    for path in (*_pages(built), *built.rglob("search_index.json")):
        assert str(built.parent) not in path.read_text(encoding="utf-8"), path


def test_no_word_of_a_record_is_alive(built: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in _pages(built)}
    assert any("window.hacked" in text for text in pages.values())
    assert not {path: found for path, text in pages.items() if (found := live_things(text))}


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def _open(browser: Browser, address: str, path: str, size: str, scheme: str) -> tuple[Page, list[str]]:
    """A page opened, with everything that went wrong on the way."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a page that is left before its pictures have come
            wrong.append(f"failed: {request.url}")

    page.on("requestfailed", failed)
    page.on(
        "request",
        lambda request: None if request.url.startswith((address, "data:", "blob:")) else wrong.append(request.url),
    )
    page.goto(urljoin(address, path), wait_until="load")
    return page, wrong


@contextmanager
def _opened(browser: Browser, address: str, path: str, size: str, scheme: str) -> Iterator[Page]:
    """A page, closed afterwards; fails where something went wrong on it."""
    page, wrong = _open(browser, address, path, size, scheme)
    try:
        yield page
        assert not wrong
    finally:
        page.close()


Tabs = dict[str, tuple["Page", list[str]]]


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> Iterator[Tabs]:
    """One of each size, in which page after page is opened: a new one costs more than most pages."""
    opened: Tabs = {}
    yield opened
    for page, _ in opened.values():
        page.close()


FIGURES = """() => Promise.all([...document.querySelectorAll("figure.chart")].map(async (figure) => {
    const shown = [...figure.querySelectorAll("img")].filter((image) => image.checkVisibility());
    for (const image of shown) {
        image.loading = "eager";
        await image.decode();
    }
    return shown.map(({ src, alt, width, height }) => ({ src, alt, width, height }));
}))"""
"""Of each figure the variants that are visible, once they are there."""


def _see(page: Page, wrong: list[str], path: str, size: str, scheme: str) -> None:
    """That a page is whole in one size and scheme."""
    assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "the page itself must not scroll sideways"
    figures = page.evaluate(FIGURES)
    assert (len(figures) > 0) == (path in WITH_FIGURES or path == "correctness/")
    for variants in figures:
        assert len(variants) == 1, "one variant of four is shown"
        assert f".{'narrow' if size == 'phone' else 'wide'}.{scheme}.svg" in variants[0]["src"]
        assert variants[0]["width"] > 300
        assert variants[0]["height"] > 80
        assert len(variants[0]["alt"]) > 20
    assert not wrong


@pytest.mark.parametrize(
    ("path", "size"),
    [
        pytest.param(
            *(path, size),
            id=f"{path or 'home'}-{size}",
            marks=() if path in DISTINCT or (path in KINDS and size == "phone") else pytest.mark.exhaustive,
        )
        for path in PAGES
        for size in SIZES
    ],
)
def test_opens_in_both_themes_without_error_or_outside_request(
    path: str, size: str, browser: Browser, address: str, tabs: Tabs
) -> None:
    if size in tabs:
        page, wrong = tabs[size]
        page.goto("about:blank")  # what the last page still asked for ends here, and is not this page's fault
        wrong.clear()
        page.goto(urljoin(address, path), wait_until="load")
    else:
        page, wrong = tabs[size] = _open(browser, address, path, size, "light")
    assert page.evaluate("typeof window.hacked") == "undefined"
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    _see(page, wrong, path, size, "light")
    page.locator('label[title="Switch to the dark theme"]').click()
    page.wait_for_function("document.body.dataset.mdColorScheme == 'slate'")
    _see(page, wrong, path, size, "dark")
    page.locator('label[title="Switch to the light theme"]').click()


def _axe() -> str:
    """axe-core's script, where the package that has it is installed."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core is not installed: pip install axe-playwright-python")
    return Path(package.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path or "home", marks=() if path in DISTINCT else pytest.mark.exhaustive) for path in KINDS],
)
def test_axe_core_finds_nothing(path: str, browser: Browser, address: str) -> None:
    """Each kind of page in one size and scheme, by turns: sizes and schemes share their structure and colours."""
    script = _axe()
    size, scheme = (("desktop", "light"), ("phone", "dark"))[KINDS.index(path) % 2]
    with _opened(browser, address, path, size, scheme) as page:
        if path == "explorer/":
            page.wait_for_selector(".explorer-chart svg")
        page.evaluate(script)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], node["html"][:200]) for one in found for node in one["nodes"][:3]] == []


SIDEWAYS = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.querySelector("table").innerText.slice(0, 80))"""
"""The tables that scroll sideways."""


def test_on_a_phone_rows_of_sentences_stack_and_rows_of_numbers_scroll(browser: Browser, address: str) -> None:
    with _opened(browser, address, "predictions/", "phone", "light") as page:
        assert not page.evaluate(SIDEWAYS)
        cells = page.locator("article table").last.locator("tbody tr").first.locator("td")
        assert [cell.get_attribute("data-label") for cell in cells.all()][3:] == ["predicted", "measured", "outcome"]
        page.set_viewport_size({"width": 1440, "height": 900})
        page.wait_for_selector("article table[data-stacked]", state="detached")
    with _opened(browser, address, "ledger/", "phone", "light") as page:
        assert not page.evaluate(SIDEWAYS)
        page.locator(".ledger th").first.get_by_role("button").click()
        assert page.locator(".ledger tbody td").first.inner_text() == "A01"
    with _opened(browser, address, "stages/", "phone", "light") as page:
        assert [text.splitlines()[0].split("\t")[1] for text in page.evaluate(SIDEWAYS)] == ["TFLOP/s"]
        cue = 'getComputedStyle(document.querySelector(".md-typeset__scrollwrap[tabindex]"), "::before").content'
        assert "scrolls sideways" in page.evaluate(cue)


@pytest.mark.parametrize("path", ["", "stages/06_cp_async/", "against/"], ids=lambda value: value or "home")
def test_print_shows_the_light_variant_of_each_figure_and_no_navigation(
    path: str, browser: Browser, address: str
) -> None:
    with _opened(browser, address, path, "phone", "dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        for variants in page.evaluate(FIGURES):
            assert len(variants) <= 1  # none where its fold is closed
            assert all(".wide.light.svg" in one["src"] for one in variants)
        assert not page.locator(".md-header").is_visible()


def test_a_page_says_which_gpu_it_shows_and_leads_to_the_same_of_the_other(browser: Browser, address: str) -> None:
    with _opened(browser, address, "against/", "desktop", "light") as page:
        shown = page.locator(".gpu-shown")
        assert shown.inner_text().startswith("Shown: NVIDIA H200")
        assert "NVIDIA H100 (partial)" in shown.inner_text()
        shown.get_by_role("link", name="NVIDIA H100").click()
        page.wait_for_url("**/generated/results/nvidia-h100/#against-the-libraries")
        assert page.locator(".gpu-shown").inner_text().startswith("Shown: NVIDIA H100 (partial)")
        page.goto(urljoin(address, "stages/00_naive/"))
        page.locator(".gpu-shown").get_by_role("link", name="NVIDIA H100").click()
        page.wait_for_selector(".explorer-chart svg")
        assert page.locator("select[name=gpu]").input_value() == "nvidia-h100"
        assert page.locator("#flashlab-explorer tbody tr").count() == 1
        for path in ("glossary/", "explorer/", "compare/"):
            page.goto(urljoin(address, path))
            assert not shown.count()


def test_the_explorer_can_be_used_by_keyboard(browser: Browser, address: str) -> None:
    with _opened(browser, address, "explorer/", "desktop", "light") as page:
        page.wait_for_selector(".explorer-chart svg")
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.name") == "gpu":
                break
        assert page.evaluate("document.activeElement.name") == "gpu", "a way by Tab"
        page.keyboard.press("ArrowDown")
        page.wait_for_url("**gpu=nvidia-h100**")
        assert page.evaluate("document.activeElement.matches(':focus-visible')")


class Ids(HTMLParser):
    """The names that links may lead to in a page, and the page's links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {name for name in (given.get("id"), given.get("name") if tag == "a" else None) if name}
        if tag == "a" and (href := given.get("href")):
            self.links.append(href)


def test_anchors_resolve(built: Path) -> None:
    pages = {path.resolve(): Ids(path.read_text(encoding="utf-8")) for path in _pages(built)}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlparse(link)
            if not parts.fragment or parts.netloc or parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if target in pages and unquote(parts.fragment) not in pages[target].ids:
                lost.append(f"{path.relative_to(built.resolve())}: {link}")
    assert not lost


def test_downloads_parse(built: Path) -> None:
    files = [path for path in (built / "generated").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".gz", ".xz", ".json", ".csv", ".ipynb", ".svg", ".png"}
    for path in files:
        content = path.read_bytes()
        name = path.name
        if unpack := {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix):
            content, name = unpack(content), path.stem
        if name.endswith(".jsonl"):
            assert all(json.loads(line) for line in content.splitlines()), path
        elif name.endswith((".json", ".ipynb")):
            assert json.loads(content), path
        elif name.endswith(".csv"):
            lines = list(csv.reader(content.decode("utf-8").splitlines()))
            assert len({len(line) for line in lines}) == 1 < len(lines), path
        elif name.endswith(".svg"):
            ElementTree.fromstring(content)


def test_pages_and_site_are_light(built: Path) -> None:
    """The site of the committed records is larger than this one of made-up records: CONTRIBUTING.md has its limits,
    which leave out the downloads."""
    assert not {path: size for path in _pages(built) if (size := path.stat().st_size) > MEGABYTE}
    pages = (path for path in built.rglob("*") if path.is_file() and path.suffix not in (".gz", ".xz"))
    assert sum(path.stat().st_size for path in pages) < 22 * MEGABYTE
    assert not list(built.rglob("*.map"))
    loose = list((built / "generated" / "data").rglob("*.jsonl"))
    assert not loose, "records are compressed"


def test_a_link_to_a_page_has_a_title_a_sentence_and_a_picture(built: Path) -> None:
    titles: dict[str, list[Path]] = {}
    for path in _pages(built):
        text = path.read_text(encoding="utf-8")
        named = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]+)">', text))
        assert named["title"]
        assert named["description"]
        picture = (path.parent / named["image"]).resolve()
        assert picture.read_bytes()[16:24] == (1200).to_bytes(4, "big") + (630).to_bytes(4, "big")
        titles.setdefault(re.findall(r"<title>(.*?)</title>", text)[0], []).append(path)
    assert not {title: paths for title, paths in titles.items() if len(paths) > 1}


def test_the_front_page_is_light(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    sizes: dict[str, int] = {}
    page.on("response", lambda response: sizes.update({response.url: len(response.body())}))
    try:
        page.goto(address, wait_until="networkidle")
        assert sum(sizes.values()) < MEGABYTE / 2
        assert not [url for url in sizes if "search_index" in url], "the index is fetched when the search is used"
        doors = [link.get_attribute("href") for link in page.locator("a.md-button").all()]
        assert doors == ["journey/", "reproduce/"]
    finally:
        page.close()


def test_search_finds_a_stage(browser: Browser, address: str) -> None:
    with _opened(browser, address, "", "desktop", "light") as page:
        page.locator("input.md-search__input").click()
        page.keyboard.type("cp_async")
        page.wait_for_selector(".md-search-result__item a[href*='06_cp_async']")


def test_the_ledger_sorts_and_filters_by_keyboard(browser: Browser, address: str) -> None:
    with _opened(browser, address, "ledger/", "desktop", "light") as page:
        rows = page.locator(".ledger tbody tr:visible")
        total = rows.count()
        assert total == 65
        page.get_by_label("Document").select_option("Cycle 5: Full WMMA Results")
        assert rows.count() == 9
        assert page.get_by_role("status").first.inner_text() == "9 of 65 claims"
        page.get_by_label("Words").fill("coalescing alone")
        assert rows.count() == 1
        page.get_by_label("Words").fill("")
        page.get_by_label("Document").select_option("")
        verdict = page.locator(".ledger tbody td:nth-child(4)").first.inner_text()
        page.get_by_label("Verdict").select_option(verdict)
        assert 0 < rows.count() <= total
        page.get_by_label("Verdict").select_option("")
        heading = page.locator(".ledger th").first
        heading.get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == "ascending"
        assert rows.first.locator("td").first.inner_text() == "A01"
        page.keyboard.press("Space")
        assert heading.get_attribute("aria-sort") == "descending"
        assert rows.first.locator("td").first.inner_text() == "E09"


def _marks(page: Page) -> int:
    return page.locator(".explorer-chart svg path[d*='A'], .explorer-chart svg [data-mark='dot'] > *").count()


def test_the_explorers_filters_change_the_marks_and_the_address_restores_them(browser: Browser, address: str) -> None:
    with _opened(browser, address, "explorer/", "desktop", "light") as page:
        page.wait_for_selector(".explorer-chart svg")
        rows = page.locator("#flashlab-explorer tbody tr")
        before, every = _marks(page), rows.count()
        assert before > 0
        page.get_by_text("Stages and libraries", exact=True).click()
        page.get_by_role("button", name="none").click()
        assert rows.count() == 0
        for name in ("16_ones_column", "sdpa_cudnn"):
            page.get_by_label(name, exact=True).check()
        assert rows.count() == 2 < every
        assert 0 < _marks(page) < before
        page.locator("select[name=y]").select_option("ratio")
        page.locator("select[name=base]").select_option("sdpa_cudnn")
        page.locator("select[name=mask]").select_option("causal")
        shown = page.locator("#flashlab-explorer tbody").inner_text()
        assert "causal" in shown
        with _opened(browser, address, page.url.removeprefix(address), "phone", "dark") as again:
            again.wait_for_selector(".explorer-chart svg")
            assert again.locator("#flashlab-explorer tbody").inner_text() == shown
            assert again.locator("select[name=mask]").input_value() == "causal"


def test_what_the_explorer_shows_can_be_downloaded_and_each_row_opens_its_record(
    browser: Browser, address: str
) -> None:
    with _opened(browser, address, "explorer/?names=16_ones_column,sdpa_cudnn", "desktop", "light") as page:
        page.wait_for_selector(".explorer-chart svg")
        with page.expect_download() as csv_file:
            page.get_by_role("button", name="CSV").click()
        with page.expect_download() as json_file:
            page.get_by_role("button", name="JSON").click()
        lines = list(csv.DictReader(csv_file.value.path().read_text(encoding="utf-8").splitlines()))
        objects = json.loads(json_file.value.path().read_text(encoding="utf-8"))
        assert [line["name"] for line in lines] == [one["name"] for one in objects]
        assert {line["name"] for line in lines} == {"16_ones_column", "sdpa_cudnn"}
        assert float(lines[0]["us"]) == pytest.approx(objects[0]["us"])
        page.locator("#flashlab-explorer tbody a").first.click()
        page.wait_for_selector("#flashlab-explorer pre")
        record = json.loads(page.locator("#flashlab-explorer pre").inner_text())
        assert record["name"] == lines[0]["name"]
        assert record["run"] == lines[0]["run"]
        assert "record=" in page.url


def test_without_scripts_the_explorer_has_the_fastest_of_each_problem(built: Path) -> None:
    text = (built / "explorer" / "index.html").read_text(encoding="utf-8")
    assert "<noscript>" in text
    assert re.search(r'<a href="\?gpu=nvidia-h200&amp;shape=16x16x2048x64&amp;dtype=float16&amp;mask=full">', text)


def test_the_ledger_is_a_plain_table_without_its_script(built: Path) -> None:
    text = (built / "ledger" / "index.html").read_text(encoding="utf-8")
    table = text.partition('class="ledger"')[2].partition("</table>")[0]
    assert table.count("<tr>") == 66
    assert "<button" not in table
    assert re.search(r'href="\.\./explorer/\?record=nvidia-h200/runs/[^"]+\.jsonl:\d+"', table)
