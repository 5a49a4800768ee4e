from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flashlab.core.errors import OutputError
from flashlab.record import provenance
from flashlab.record.provenance import UNKNOWN
from flashlab.record.schema import Source


def git(tree: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, "-C", str(tree), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree whose path has a space in it."""
    tree = tmp_path / "a tree"
    for name in ("kernels/a.cu", "kernels/common/b.cuh", "src/flashlab/c.py", "notebooks/d.ipynb", "README.md"):
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    for name in ("pyproject.toml", "constraints.txt"):
        (tree / name).write_text(name, encoding="utf-8")
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "First")
    return tree


@pytest.fixture
def copy(tree: Path, tmp_path: Path) -> Path:
    """The tree as a GPU machine gets it: with a bundle, without .git."""
    (tree / "build" / "bundle").mkdir(parents=True)
    provenance.write(tree / "build" / "bundle" / "provenance.json", tree)
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git"))
    return copy


def test_checkout_names_its_commit(tree: Path) -> None:
    assert provenance.source(tree) == Source(commit=git(tree, "rev-parse", "HEAD"), dirty=False)


@pytest.mark.parametrize("name", ["kernels/common/b.cuh", "src/flashlab/c.py", "notebooks/d.ipynb", "constraints.txt"])
def test_an_edit_that_decides_a_result_is_dirty(tree: Path, name: str) -> None:
    (tree / name).write_text("edited", encoding="utf-8")
    assert provenance.source(tree).dirty


def test_a_new_kernel_is_dirty(tree: Path) -> None:
    (tree / "kernels" / "new.cu").write_text("", encoding="utf-8")
    assert provenance.source(tree).dirty


def test_a_removed_kernel_is_dirty(tree: Path) -> None:
    (tree / "kernels" / "a.cu").unlink()
    assert provenance.source(tree).dirty


def test_an_edit_elsewhere_is_clean(tree: Path) -> None:
    (tree / "README.md").write_text("edited", encoding="utf-8")
    (tree / "data").mkdir()
    (tree / "data" / "run.jsonl").write_text("", encoding="utf-8")
    assert not provenance.source(tree).dirty


def test_a_copy_has_the_commit_from_its_bundle(tree: Path, copy: Path) -> None:
    assert (
        provenance.source(copy) == provenance.source(tree) == Source(commit=git(tree, "rev-parse", "HEAD"), dirty=False)
    )


def test_running_a_copy_leaves_it_clean(copy: Path) -> None:
    cache = copy / "src" / "flashlab" / "__pycache__"
    cache.mkdir()
    (cache / "c.cpython-312.pyc").write_bytes(b"\0")
    (copy / "notebooks" / ".ipynb_checkpoints").mkdir()
    (copy / "notebooks" / ".ipynb_checkpoints" / "d.ipynb").write_text("", encoding="utf-8")
    assert not provenance.source(copy).dirty


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_a_changed_copy_is_dirty(copy: Path, change: str) -> None:
    kernel = copy / "kernels" / "a.cu"
    match change:
        case "edit":
            kernel.write_text("edited", encoding="utf-8")
        case "add":
            (copy / "kernels" / "new.cu").write_text("", encoding="utf-8")
        case "remove":
            kernel.unlink()
        case _:
            kernel.rename(copy / "kernels" / "z.cu")
    found = provenance.source(copy)
    assert found.dirty
    assert found.commit != "unknown"


def test_a_bundle_of_an_edited_tree_stays_dirty(tree: Path, tmp_path: Path) -> None:
    (tree / "kernels" / "a.cu").write_text("edited", encoding="utf-8")
    bundled = tree / "build" / "bundle" / "provenance.json"
    bundled.parent.mkdir(parents=True)
    provenance.write(bundled, tree)
    shutil.rmtree(tree / ".git")
    assert provenance.source(tree).dirty


@pytest.mark.parametrize("content", [None, "", "[]", "{}", json.dumps({"commit": "a" * 40, "dirty": False})])
def test_neither_git_nor_a_sound_bundle_is_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        path = tmp_path / "build" / "bundle" / "provenance.json"
        path.parent.mkdir(parents=True)
        path.write_text(content, encoding="utf-8")
    assert provenance.source(tmp_path) == UNKNOWN


def test_a_checkout_without_a_commit_is_unknown(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert provenance.source(tmp_path) == UNKNOWN


def test_no_git_program_is_unknown(tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.source(tree) == UNKNOWN


def test_an_unwritable_place_is_named(tree: Path, read_only_dir: Path) -> None:
    with pytest.raises(OutputError, match=r"provenance\.json"):
        provenance.write(read_only_dir / "provenance.json", tree)


def test_software_is_read_without_importing_it() -> None:
    versions = provenance.software()
    assert {"python", "flashlab", "numpy", "cuda-core", "nvidia-cuda-nvrtc"} <= versions.keys()
    assert all(versions.values())
