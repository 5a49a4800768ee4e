"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashlab.run import gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu") or "gpu" in item.path.parent.parts[-1:]]
    reason = gpu.available() if wanting else None
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))


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
