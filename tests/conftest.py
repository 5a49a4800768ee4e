"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU; slow ones come first."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shared import OF_STAGES, REPORTED, made_once, without_variants

from flashlab.run import gpu

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from flashlab.show import sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HERE = Path(__file__).parent
SLOW = (
    "test_pages.py",
    "emulation/test_emulated_stages.py",
    "test_decode.py",
    "test_compiler.py",
    "test_sweep.py",
    "test_features.py",
    "test_hopper.py",
    "test_paged.py",
    "test_notebooks.py",
    "test_hostile.py",
    "test_ablation.py",
    "test_levers.py",
    "test_varlen.py",
    "test_fp8.py",
    "emulation/test_bugs.py",
    "test_equal_share.py",
    "test_chip.py",
    "test_dead_ends.py",
    "test_site.py",
    "test_sass.py",
    "emulation/test_sm90.py",
    "test_long.py",
    "emulation/test_numerics.py",
    "test_random_cases.py",
    "emulation/test_mistakes.py",
    "test_charts.py",
    "test_mma.py",
    "test_attention.py",
    "emulation/test_portability.py",
    "test_exercises.py",
    "test_exactness.py",
    "test_emulator.py",
    "test_cases.py",
    "emulation/test_emulated_conformance.py",
    "emulation/test_counters_of_stages.py",
    "test_sanitizer.py",
)
"""Files that compile or emulate many kernels, run notebooks or open the site, longest first: each is one worker's, and
what begins last should be short. The first makes the report, for which those after test_hopper.py would have to wait.
`make test-fast` leaves them out."""
NEXT = ("test_tune.py",)
"""Files of which one test compiles many kernels: they begin after those, and before all others."""


def _part(text: str) -> tuple[int, int]:
    """K and N of `K/N`."""
    matched = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if matched is None or int(matched[1]) > int(matched[2]):
        raise argparse.ArgumentTypeError(f"wanted K/N, such as 2/5, got {text!r}")
    return int(matched[1]), int(matched[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", type=_part, help="run the K-th of N parts of the selected tests alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        number, parts = part
        others = {item for item in items if zlib.crc32(item.nodeid.encode()) % parts != number - 1}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    order = {HERE / name: i for i, name in enumerate((*SLOW, *NEXT))}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if order.get(item.path, len(SLOW)) < len(SLOW):
            item.add_marker(pytest.mark.slow)
    wanting = [item for item in items if item.get_closest_marker("gpu") or "gpu" in item.path.parent.parts[-1:]]
    reason = gpu.available() if wanting else None
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))


def _of_few(showing: Callable[..., tuple[sweep.Cell, ...]], gpu: str, **given: str) -> tuple[sweep.Cell, ...]:
    """The cells of a report, those that compile or emulate what is named for few stages."""
    few = {"stages": ",".join(REPORTED)}
    return tuple(
        one.model_copy(update={"parameters": one.parameters | (few if one.notebook.stem in OF_STAGES else {})})
        for one in showing(gpu, **given)
    )


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of made-up records of two GPUs, one of them partial, made once a test run.

    It has data/, notebooks/, pages/ and site/, and said.txt. Its notebooks compile and emulate few stages;
    test_notebooks.py has them take all, for `make test-all`.
    """
    from synthetic import write_partial, write_synthetic

    from flashlab.show import site

    def make(folder: Path) -> None:
        write_synthetic(folder / "data")
        write_partial(folder / "data")
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(site, "showing", partial(_of_few, site.showing))
            without_variants(patched)
            index = site.run(source="replay", data=folder / "data", out=folder, say=said.append)
        assert index == folder / "site" / "index.html"
        (folder / "said.txt").write_text("\n".join(said), encoding="utf-8")

    return made_once(tmp_path_factory, "report", make)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def read_only_dir(tmp_path: Path) -> Path:
    """A path below which nothing can be made, for root as well: its parent is a file."""
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    return blocker / "folder"


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests read the same whatever terminal and colour settings they are started under."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TERMINAL_WIDTH", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
