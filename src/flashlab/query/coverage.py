"""Stages without records on a GPU, and stages recorded with an older source.

A new stage has no records on a GPU until it is measured there; this reports it, and no test fails.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flashlab.core.paths import DATA, ROOT
from flashlab.kernels import registry
from flashlab.record import provenance, store
from flashlab.record.schema import RUN

KINDS: Mapping[str, str] = {
    "runs": "flashlab bench",
    "checks": "flashlab check --record",
    "random": "flashlab check --random 2000 --record",
    "sanitizer": "python scripts/sanitize.py",
    "tuning": "flashlab tune",
}
"""Folders under data/<gpu>/ that should have a record of every stage, and the commands that make them."""


class Coverage(NamedTuple):
    """Gaps in one kind of a GPU's records."""

    kind: str
    missing: tuple[str, ...]
    """Stages of the ladder without a record of this kind."""
    older: Mapping[str, str]
    """Stages whose source has changed since their newest record, with that record's commit. Empty if the commit is not
    in this checkout's history."""


def coverage(gpu: str, data: Path = DATA, root: Path = ROOT) -> tuple[Coverage, ...]:
    """The gaps in a GPU's records, by kind."""
    coverages = []
    for kind in KINDS:
        newest: dict[str, str] = {}
        for path in store.files(data / gpu / kind):
            text = path.read_text(encoding="utf-8")
            named = re.match(RUN, path.stem)
            commit = named["commit"] if named else ""
            newest |= {stage_id: commit for stage_id in registry.STAGES if f'"{stage_id}"' in text}
        older = {
            stage_id: commit
            for stage_id, commit in newest.items()
            if registry.STAGES[stage_id].source.name in _changed_since(commit, root)
        }
        coverages.append(Coverage(kind, tuple(name for name in registry.STAGES if name not in newest), older))
    return tuple(coverages)


@cache
def _changed_since(commit: str, root: Path) -> frozenset[str]:
    """Names of stage sources that changed since a commit; empty if git does not know it."""
    try:
        listed = provenance.git(root, "diff", "--name-only", commit, "--", "kernels")
    except (OSError, subprocess.CalledProcessError):
        return frozenset()
    return frozenset(Path(line).name for line in listed.splitlines() if Path(line).parent == Path("kernels"))


def table(gpu: str, data: Path = DATA) -> str:
    """`coverage` as a Markdown table."""
    lines = ["| records | stages without one | source edited since | made by |", "|---|---|---|---|"]
    for kind, missing, older in coverage(gpu, data):
        names = [", ".join(f"`{name}`" for name in some) or "none" for some in (missing, older)]
        lines.append(f"| `{kind}/` | {' | '.join(names)} | `{KINDS[kind]}` |")
    return "\n".join(lines) + "\n"
