"""Folders: where the cache is, what a GPU's folder is called, and what an unwritable one gets; the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashlab.core import environment, paths
from flashlab.core.errors import OutputError


def test_the_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "mine"))
    assert paths.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("FLASHLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg" / "flashlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paths.cache_dir() == Path.home() / ".cache" / "flashlab"


def test_a_writable_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert paths.writable_dir(folder, "records") == folder
    assert list(folder.iterdir()) == []


def test_an_unwritable_folder_is_named_with_its_purpose(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"writable folder for records, got .*file"):
        paths.writable_dir(tmp_path / "file" / "folder", "records")


@pytest.mark.parametrize(
    ("product", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"), ("Tesla T4", "tesla-t4")],
)
def test_folders_are_named_after_products(product: str, folder: str) -> None:
    assert paths.slug(product) == folder


def test_the_checkout_is_whole() -> None:
    assert all(p.is_dir() for p in (paths.KERNELS, paths.NOTEBOOKS, paths.DATA, paths.SITE))


def test_a_copy_of_the_environment_leaves_out_what_another_thread_unsets_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unset(dict[str, str]):
        """Names one variable that has no value any more."""

        def __iter__(self) -> Any:
            return iter(["GONE", *super().__iter__()])

        def keys(self) -> Any:
            return list(self)

    variables = Unset(HERE="1")
    with pytest.raises(KeyError):
        assert {**variables}["HERE"]
    monkeypatch.setattr(os, "environ", variables)
    assert environment.environment() == {"HERE": "1"}
