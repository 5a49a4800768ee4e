"""hatchling's build hook: a wheel carries the kernels and the tables of choices, where core/paths.py looks for them.

An editable install finds them in its checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSTALLED = "flashlab/installed"


class Hook(BuildHookInterface[Any]):
    """Of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files that lie outside the package."""
        root = Path(self.root)
        if version == "editable":
            return
        for path in (root / "kernels", root / "data" / "main_gpu", *root.glob("data/*/tuned.json")):
            build_data["force_include"][str(path)] = f"{INSTALLED}/{path.relative_to(root).as_posix()}"
