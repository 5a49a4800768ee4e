"""Records that a stage lacks are reported, by kind, and so are those of an older source."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flashlab.kernels.registry import STAGES
from flashlab.query import coverage

FIRST, SECOND, *OTHERS = STAGES


def _record(data: Path, kind: str, commit: str, *stages: str) -> None:
    folder = data / "gpu" / kind
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f'{{"stage": "{name}"}}\n' for name in stages)
    (folder / f"20260101T000000Z-{commit}.jsonl").write_text(lines, encoding="utf-8")


def test_stages_without_records_are_named_for_each_kind(tmp_path: Path) -> None:
    _record(tmp_path, "random", "0123abc", FIRST, *OTHERS)
    found = {one.kind: one for one in coverage.coverage("gpu", tmp_path)}
    assert found.keys() == coverage.KINDS.keys()
    assert found["random"].missing == (SECOND,)
    assert found["sanitizer"].missing == tuple(STAGES)
    assert f"| `random/` | `{SECOND}` | none | `flashlab check --random 2000 --record` |" in coverage.table(
        "gpu", tmp_path
    )


def test_a_stage_whose_source_changed_since_its_record_is_named(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "kernels").mkdir()
    sources = [tmp_path / "kernels" / STAGES[name].source.name for name in (FIRST, SECOND)]
    for source in sources:
        source.write_text("old", encoding="utf-8")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "Old")
    commit = git("rev-parse", "--short", "HEAD")
    _record(tmp_path / "data", "sanitizer", f"{commit}-4f2a91", FIRST, SECOND)
    sources[1].write_text("new", encoding="utf-8")
    found = {one.kind: one for one in coverage.coverage("gpu", tmp_path / "data", tmp_path)}
    assert found["sanitizer"].older == {SECOND: commit}
    # A commit that is not in the history says nothing.
    _record(tmp_path / "data", "random", "0000000", FIRST)
    assert not {one.kind: one for one in coverage.coverage("gpu", tmp_path / "data", tmp_path)}["random"].older
