"""Which stages a GPU's records leave out, and which of them were recorded with an older source.

A new stage has no records until somebody measures it on that GPU: that is reported here, and fails no test.
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
"""Folders under data/<gpu>/ that want a record of every stage, and the command that makes one."""


class Coverage(NamedTuple):
    """What one kind of records of a GPU lacks."""

    kind: str
    missing: tuple[str, ...]
    """Stages of the ladder without such a record."""
    older: Mapping[str, str]
    """Stages whose source has changed since their newest such record, and the commit of that record. Empty where the
    commit is not in this checkout's history."""


def coverage(gpu: str, data: Path = DATA, root: Path = ROOT) -> tuple[Coverage, ...]:
    """What the records of a GPU lack, by kind."""
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
    """Names of the stages' sources that differ from a commit's; none where git does not know it."""
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
