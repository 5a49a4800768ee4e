"""A Jupyter server extension that saves the notebooks of this repository without outputs.

`saving.json` is installed with the package into the environment's Jupyter server settings and names this module, so
that it applies to every `jupyter lab` of the environment, from any folder, but only to these notebooks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashlab.core.paths import NOTEBOOKS


def strip_before_save(*, model: dict[str, Any], path: str, contents_manager: Any) -> None:
    """Pre-save hook: strip the outputs of files in notebooks/; an open notebook keeps them.

    Args:
        model: of the contents API; its content is modified in place.
        path: relative to the manager's `root_dir`.
    """
    root = getattr(contents_manager, "root_dir", None)
    if model["type"] != "notebook" or root is None:
        return
    if not (Path(root) / path.strip("/")).resolve().is_relative_to(NOTEBOOKS):
        return
    content = model["content"]
    for cell in content["cells"]:
        cell["metadata"] = {key: cell["metadata"][key] for key in ("jupyter", "tags") if key in cell["metadata"]}
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    content["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    server.contents_manager.register_pre_save_hook(strip_before_save)
