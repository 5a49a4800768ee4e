"""A stage is one source, one entry and one page: with these three in a copy of the checkout, all else knows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashlab.core.paths import ROOT

OLD, NEW = "01_coalesced", "99_new"
FILES = ("kernels/{}.cu", "kernels/{}.toml", "site/stages/{}.md")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with one stage more: `OLD` under another id."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("src", "kernels", "site"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "generated"))
    shutil.copy(ROOT / "mkdocs.yml", copy)
    for name in FILES:
        text = (ROOT / name.format(OLD)).read_text(encoding="utf-8")
        (copy / name.format(NEW)).write_text(text.replace(OLD, NEW), encoding="utf-8")
    return copy


def _run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=checkout, capture_output=True, text=True, check=False
    )


def test_it_is_listed_whole_and_has_its_page(checkout: Path) -> None:
    listed = _run(checkout, "-m", "flashlab", "stages", "--json")
    assert NEW in [stage["id"] for stage in json.loads(listed.stdout)], listed.stderr
    code = """
import sys
from pathlib import Path
from flashlab.kernels import registry
from flashlab.query.coverage import coverage
from flashlab.query import select
from flashlab.show import pages
stage = registry.get(registry.resolve("99"))
assert registry.faults(stage) == (), registry.faults(stage)
assert list(registry.STAGES)[-1] == list(registry.CUDA_STAGES)[-1] == stage.id
assert all(stage.id in one.missing for one in coverage("nvidia-none"))
out = Path(sys.argv[1])
pages._stage_page(pages.Output(root=out), stage, select.load("nvidia-none", out), out)
assert (out / "snippets" / "stages" / f"{stage.id}.md").is_file()
"""
    ran = _run(checkout, "-c", code, str(checkout / "out"))
    assert ran.returncode == 0, ran.stderr


def test_it_compiles(checkout: Path) -> None:
    compiled = _run(checkout, "-m", "flashlab", "compile", NEW, "--arch", "sm_75", "--json")
    assert compiled.returncode == 0, compiled.stderr
    assert {row["stage"] for row in json.loads(compiled.stdout)} == {NEW}


def test_a_missing_page_or_entry_is_named(checkout: Path) -> None:
    (checkout / "site" / "stages" / f"{NEW}.md").rename(checkout / "page.md")
    try:
        checked = _run(checkout, "-m", "flashlab", "check", NEW, "--on", "cpu", "--dtype", "bfloat16")
        assert f"{NEW}: page: wanted site/stages/{NEW}.md, got no such file" in checked.stderr
    finally:
        (checkout / "page.md").rename(checkout / "site" / "stages" / f"{NEW}.md")
    source = checkout / "kernels" / "98_bare.cu"
    source.write_text("", encoding="utf-8")
    checked = _run(checkout, "-m", "flashlab", "check", source.stem)
    source.unlink()
    assert checked.returncode != 0
    assert "wanted an entry kernels/98_bare.toml beside its source, got none" in checked.stderr


def test_an_entry_that_does_not_load_is_an_error_of_the_program(checkout: Path) -> None:
    entry = checkout / "kernels" / "98_bare.toml"
    entry.write_text('title = "T"\n', encoding="utf-8")
    listed = _run(checkout, "-m", "flashlab", "stages")
    entry.unlink()
    assert listed.returncode == 1
    assert "kernels/98_bare.toml: question: wanted this field, got none" in listed.stderr
    assert "Traceback" not in listed.stderr
