"""Levers: every patch fits its stage word for word, compiles clean, is right; and what does not fit says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shared import needs_compiler, source_file

from flashlab.build import compiler
from flashlab.build.compiler import Cubin, Job
from flashlab.core.errors import ParameterError
from flashlab.core.problem import Problem
from flashlab.experiments import levers
from flashlab.experiments.levers import Lever
from flashlab.kernels import registry
from flashlab.run import choice
from flashlab.run.attention import emulate
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

LEVERS = levers.choose()
each = pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
LAST = {lever.stage: lever for lever in LEVERS}
"""Of each stage one lever, which `make test` compiles."""

SOURCE = "one\ntwo\nthree\n\nfive\ntwo\nseven\n"
DIFF = """--- a/x
+++ b/x
@@ -2,3 +2,3 @@ of something
 two
-three
+3

@@ -6,2 +6,3 @@
 two
+six and a half
 seven
"""


# --- the patches of kernels/levers/ -----------------------------------------------------------------------------------


@each
def test_a_lever_is_whole_and_fits_its_stage(lever: Lever, tmp_path: Path) -> None:
    assert re.fullmatch(r"[a-z0-9_]+", lever.name)
    assert lever.question.endswith("?")
    assert lever.prediction.endswith((".", ")"))
    assert registry.get(lever.stage).language == "cuda"
    plain = registry.get(lever.stage).source.read_text(encoding="utf-8").splitlines()
    path = lever.write(tmp_path)
    changed = path.read_text(encoding="utf-8").splitlines()
    added, removed = lever.changed_lines()
    assert len(changed) - len(plain) == added - removed
    assert added + removed > 0
    assert max(map(len, changed)) <= max(132, *map(len, plain))
    assert not [line for line in changed if line.rstrip() != line]
    before = path.stat().st_mtime_ns
    assert lever.write(tmp_path) == path
    assert path.stat().st_mtime_ns == before, "another process may be compiling it"


@pytest.mark.parametrize(
    ("lever", "whole"),
    [
        *(pytest.param(one, False, id=f"{one.name}-part") for one in LAST.values()),
        *(pytest.param(one, True, id=f"{one.name}-whole", marks=pytest.mark.exhaustive) for one in LEVERS),
    ],
)
def test_a_lever_compiles_for_what_it_is_measured_on(lever: Lever, whole: bool) -> None:
    """With the tunables of a recorded GPU, without spills or advisories; and somewhere to other code than its stage.

    Each head dim and each mask once: measuring compiles the others, and refuses the same. In part, of a lever of
    each stage the first problem.
    """
    stage, source = registry.get(lever.stage), source_file(f"{lever.name}.cu", lever.text())
    problems = (lever.problems()[0], lever.problems()[-1])
    assert all(getattr(problems[0], name) != getattr(problems[1], name) for name in ("head_dim", "mask"))

    def job(problem: Problem, source: Path | None) -> Job:
        values = choice.parameters(stage, "nvidia-h200", problem)
        return Job(
            stage=stage,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            causal=problem.causal,
            arch="sm_90a",
            overrides=values,
            source=source,
        )

    problems = problems if whole else problems[:1]
    found = compiler.compile_many([job(problem, one) for one in (source, None) for problem in problems])
    assert not [str(one) for one in found if not isinstance(one, Cubin)]
    codes = [one.sha256 for one in found if isinstance(one, Cubin)]
    half = len(problems)
    assert any(with_it != plain for with_it, plain in zip(codes[:half], codes[half:], strict=True))


@needs_compiler
@pytest.mark.parametrize(
    "lever",
    [pytest.param(one, id=one.name, marks=() if one in LAST.values() else pytest.mark.exhaustive) for one in LEVERS],
)
def test_a_lever_leaves_the_output_right(lever: Lever) -> None:
    problem = lever.problems(shapes=["1x2x1x200x333x64"], dtype="float16", mask="causal")[-1]
    q, k, v = make_inputs(problem)
    source = source_file(f"{lever.name}.cu", lever.text())
    ran = emulate(q, k, v, causal=True, stage=lever.stage, source=source, races=True)
    verdict = check(ran.out, ran.lse, q, k, v, causal=True, dtype=problem.dtype)
    assert verdict.passed, verdict.reason
    assert not ran.report.findings


def test_an_unknown_lever_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match=rf"lever: wanted one of .*{LEVERS[0].name}.*, got 'colour'"):
        levers.choose(["colour"])
    name = LEVERS[-1].name
    assert [lever.name for lever in levers.choose([name, name])] == [name]


# --- applying ---------------------------------------------------------------------------------------------------------


def applied(tmp_path: Path, source: str, diff: str = DIFF) -> str:
    path = tmp_path / "x"
    path.write_text(source, encoding="utf-8")
    return levers.apply(diff, path, name="n")


def test_a_diff_is_applied_and_its_line_numbers_are_for_people(tmp_path: Path) -> None:
    wanted = "one\ntwo\n3\n\nfive\ntwo\nsix and a half\nseven\n"
    assert applied(tmp_path, SOURCE) == wanted
    assert applied(tmp_path, f"zero\n{SOURCE}") == f"zero\n{wanted}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SOURCE.replace("three", "THREE"), r"hunk at line 2: wanted its 3 lines once in .*; it has no line 'three'\."),
        (SOURCE.replace("seven", "seven "), r"hunk at line 6: wanted its 2 lines once in .*; it has no line 'seven'\."),
        ("one\n", r"hunk at line 2: .*; it has no line 'two'; it has no line 'three'; it has no line ''\."),
        ("two\nthree\n", r"hunk at line 2: .*; it has no line ''\."),
        ("", r"hunk at line 2: .* got them 0 times; it has no line 'two'"),
        (SOURCE + SOURCE, r"hunk at line 2: wanted its 3 lines once in .*, got them 2 times\."),
        ("two\nseven\ntwo\nthree\n\n", r"hunk at line 6: .* below those of the hunk before, got them 0 times"),
    ],
)
def test_a_diff_that_does_not_fit_says_what_it_wanted_and_what_works(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as raised:
        applied(tmp_path, source)
    assert str(raised.value).startswith("lever n, hunk at line")
    assert "What works: a copy of" in str(raised.value)
    assert "git diff --no-index" in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("-2,3 +2,3", "-2,4 +2,3", "wanted 4 lines before and 3 after, as it says, got 3 and 3"),
        (" two\n-three", "*two\n-three", "wanted 3 lines before and 3 after"),
        ("@@ -2,3", "@ -2,3", "wanted hunks"),
    ],
)
def test_a_damaged_diff_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        applied(tmp_path, SOURCE, DIFF.replace(old, new, 1))


# --- the file ---------------------------------------------------------------------------------------------------------

FILE = """stage = "13_overlap"
question = '''
What now?'''
prediction = "Nothing."

--- a/kernels/dead_ends/13_overlap.cu
+++ b/kernels/dead_ends/13_overlap.cu
@@ -1,1 +1,1 @@
-a
+b
"""


def test_a_header_may_say_why() -> None:
    plain = levers.parse("n", FILE)
    assert (plain.question, plain.why, plain.stage) == ("What now?", "", "13_overlap")
    assert plain.changed_lines() == (1, 1)
    assert levers.parse("n", f'why = "So."\n{FILE}').why == "So."


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('prediction = "Nothing."\n', "", "lever n: prediction: wanted this field, got none"),
        ('"Nothing."', '""', "lever n: prediction: wanted at least 1 character"),
        ("prediction", "predicted = 1\nprediction", "lever n: predicted: wanted a field that there is"),
        ("prediction", "Prediction:", "lever n: wanted a header in TOML above its diff, got: "),
        ('"13_overlap"', '"23_overlap"', "stage: wanted one of"),
        (
            "+++ b/kernels/dead_ends/13_overlap.cu",
            "+++ b/kernels/12_persistent.cu",
            "wanted a diff of kernels/dead_ends/13_overlap.cu alone",
        ),
    ],
)
def test_a_file_that_is_no_lever_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        levers.parse("n", FILE.replace(old, new, 1))
