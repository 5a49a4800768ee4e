"""History of each rule from git, when written and how changed: data/rules_log.json.

A clone may be shallow, so what git says is kept in a file, which `flashlab claims --write` makes where the history is
whole. A commit is identified by its subject and date, which stay when it is put on another parent; its hash does not.

What counts as a claim's rule is its value, its rule and why it is not comparable (data/claims.csv), what is held
against it, and the rule's limits (ledger.toml). Changes of functions, which no data shows, are listed in ledger.toml by
the subjects of their commits.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from flashlab.core.errors import DamagedRecordError
from flashlab.core.facts import Facts
from flashlab.core.paths import DATA
from flashlab.experiments.evidence import facts
from flashlab.record import provenance

LOG = DATA / "rules_log.json"
_OURS = "deba04b"
"""A commit of the history, which a copy with another history lacks."""
_CLAIMS, _FACTS = "data/claims.csv", "src/flashlab/experiments/ledger.toml"
_VERDICTS = "data/nvidia-h200/verdicts.json"
_OLD_NAMES = {"off": "inaccurate"}
_OF_CLAIM = ("value", "rule", "not_comparable")
_OF_ENTRY = ("quantity", "of", "shape", "dtype", "axis", "per", "counts", "arch", "given", "formulas")
_OF_RULE = ("relative", "excess", "least", "open", "no_gain", "otherwise")


class Change(Facts):
    """A commit that changed the rule of a claim."""

    date: str
    """Time of the commit, ISO 8601."""
    subject: str
    reason: str
    """The rest of the commit's message; for a change of a function what ledger.toml says of it."""
    what: Mapping[str, tuple[str, str]]
    """Values before and after, by name; empty if a function was changed."""
    before: str | None
    """The verdict on record then; None if there was none."""
    after: str | None
    """The first verdict on record with the change; None if there is none yet."""

    @property
    def after_its_result(self) -> bool:
        """Whether a result was known when the rule was changed."""
        return self.before not in (None, "pending")


class History(Facts):
    """The history of one claim's rule."""

    written: str
    """Time of its first commit, ISO 8601."""
    changes: tuple[Change, ...] = ()
    """Changes, oldest first."""

    @property
    def changed_after_its_result(self) -> bool:
        """Whether a change is younger than a result."""
        return any(change.after_its_result for change in self.changes)

    @property
    def turned_its_verdict(self) -> bool:
        """Whether such a change came with a different verdict."""
        return any(change.after_its_result and change.after not in (None, change.before) for change in self.changes)

    def flat(self) -> dict[str, object]:
        """As `flashlab claims --json` prints it."""
        marks = {name: getattr(self, name) for name in ("changed_after_its_result", "turned_its_verdict")}
        return self.model_dump(mode="json") | marks


class Log(Facts):
    """Contents of data/rules_log.json."""

    claims: Mapping[str, History]


@cache
def read(path: Path = LOG) -> Log:
    """The log as it was written.

    Raises:
        DamagedRecordError: there is none, or it holds something else.
    """
    try:
        return Log.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"wanted the rules' log in {path}, got {error}; `flashlab claims --write` makes it in a whole clone"
        raise DamagedRecordError(message) from error


def write(path: Path = LOG) -> Path | None:
    """Rewrite the log from git; None, without writing, if the history is missing or incomplete."""
    if not whole_history():
        return None
    path.write_text(as_json(generate()), encoding="utf-8")
    read.cache_clear()
    return path


def as_json(log: Log) -> str:
    """What the file holds."""
    return json.dumps(log.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


# --- What git says ----------------------------------------------------------------------------------------------------


_git = partial(provenance.git, DATA.parent)


def whole_history() -> bool:
    """Whether this is a git checkout with the complete history."""
    try:
        _git("cat-file", "-e", f"{_OURS}^{{commit}}")
        return _git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass(frozen=True)
class _Commit:
    hash: str
    parent: str
    date: str
    subject: str
    body: str


def _commits(at: str, *paths: str) -> Iterator[_Commit]:
    """Commits that change one of the paths, oldest first."""
    form = "--format=%H%x1f%P%x1f%aI%x1f%s%x1f%b%x1e"
    for entry in _git("log", "--no-merges", "--author-date-order", "--reverse", form, at, "--", *paths).split("\x1e"):
        if entry.strip():
            hash_, parents, date, subject, body = entry.strip("\n").split("\x1f")
            yield _Commit(hash_, parents.partition(" ")[0], date, subject, " ".join(body.split()))


def _show(commit: str, path: str) -> str:
    """A file's content at a commit; empty if it does not exist."""
    return _git("show", f"{commit}:{path}", missing="") if commit else ""


@cache
def _rules_at(commit: str) -> dict[str, dict[str, str]]:
    """The parts of each claim's rule at a commit, by claim and name."""
    rows = list(csv.DictReader(io.StringIO(_show(commit, _CLAIMS))))
    known: Mapping[str, Any] = tomllib.loads(_show(commit, _FACTS))
    rules = {}
    for row in rows:
        rule = {name: row.get(name, "") for name in _OF_CLAIM}
        if known:
            entry, limits = known["claims"].get(row["id"], {}), known["rules"].get(row["rule"], {})
            rule |= {name: _text(entry.get(name, "")) for name in _OF_ENTRY}
            rule |= {name: _text(limits.get(name, "")).replace("off", "inaccurate") for name in _OF_RULE}
        else:  # What was held against a claim was code then, described in words.
            rule["how_to_test"] = row["how_to_test"]
        rules[row["id"]] = rule
    return rules


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def _verdicts_at(commit: str) -> dict[str, str]:
    verdicts = json.loads(_show(commit, _VERDICTS) or "[]")
    return {verdict["id"]: _OLD_NAMES.get(verdict["verdict"], verdict["verdict"]) for verdict in verdicts}


def generate(at: str = "HEAD") -> Log:
    """The log of a commit's history."""
    order = {commit.hash: place for place, commit in enumerate(_commits(at, "."))}
    judged = [(order[commit.hash], _verdicts_at(commit.hash)) for commit in _commits(at, _VERDICTS)]
    functions = {changed_function["subject"]: changed_function for changed_function in facts()["functions_changed"]}
    written: dict[str, str] = {}
    changes: dict[str, list[Change]] = {}
    paths = (_CLAIMS, _FACTS, "src/flashlab/evidence.py", "src/flashlab/experiments")
    for commit in _commits(at, *paths):
        place = order[commit.hash]
        before = next((verdicts for when, verdicts in reversed(judged) if when < place), {})
        after = next((verdicts for when, verdicts in judged if when >= place), {})
        old, new = _rules_at(commit.parent), _rules_at(commit.hash)
        function = functions.get(commit.subject, {"claims": ()})
        for claim, rule in new.items():
            written.setdefault(claim, commit.date)
            was = old.get(claim, rule)
            what = {name: (was[name], rule[name]) for name in rule if name in was and was[name] != rule[name]}
            by_function = claim in function["claims"]
            if what or by_function:
                change = Change(
                    date=commit.date,
                    subject=commit.subject,
                    reason=function["what"] if by_function else commit.body,
                    what=what,
                    before=before.get(claim),
                    after=after.get(claim),
                )
                changes.setdefault(claim, []).append(change)
    return Log(
        claims={claim: History(written=date, changes=tuple(changes.get(claim, ()))) for claim, date in written.items()}
    )
