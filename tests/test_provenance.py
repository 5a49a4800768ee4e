from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic import gpu

from flashlab.core.errors import OutputError, ParameterError
from flashlab.measure import harness
from flashlab.record import provenance
from flashlab.record.provenance import UNKNOWN
from flashlab.record.schema import Source, Start


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


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of its start; nobody says what is rented."""
    for variable in provenance.RENTED.values():
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("11111111-2222\n")
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1767322800\n")
    return tmp_path


def test_a_start_says_what_is_rented(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (provenance.start(proc) or {}).keys() == {"boot", "at"}
    monkeypatch.setenv("FLASHLAB_INSTANCE", "p5.48xlarge, us-east-1 (spot)")
    monkeypatch.setenv("FLASHLAB_USD_PER_GPU_HOUR", "2.50")
    start = Start.model_validate(provenance.start(proc))
    assert (start.instance, start.usd_per_gpu_hour) == ("p5.48xlarge, us-east-1 (spot)", 2.5)
    monkeypatch.setenv("FLASHLAB_INSTANCE", "")
    assert Start.model_validate(provenance.start(proc)).instance is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [("FLASHLAB_USD_PER_GPU_HOUR", value) for value in ("0", "-1", "free", "inf", "nan", "$2")]
    + [("FLASHLAB_INSTANCE", value) for value in ("<b>p5</b>", "a\nb", "x" * 400, "https://me:secret@host?token=1")],
)
def test_what_is_no_price_or_name_is_refused_and_not_repeated(
    variable: str, value: str, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ParameterError, match=f"something else in {variable}$") as raised:
        provenance.start(proc)
    assert "secret" not in str(raised.value)


def test_no_credential_gets_into_a_record(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's header holds nothing of the environment but what is rented."""
    for name in ("AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN", "FLASHLAB_UPLOAD"):
        monkeypatch.setenv(name, "hush-hush")
    book = harness.Book(proc / "data", "runs")
    book.gpu = gpu()
    said = [provenance.start(proc), provenance.software(), provenance.source(), harness.host(), book.header()]
    assert "hush" not in str(said)
