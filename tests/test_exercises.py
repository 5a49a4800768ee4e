"""The exercises: blanks that fit the kernels as they are, and answers, right and wrong, in the real kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import nbformat
import pytest
from ahead import ahead

from flashlab.core.errors import ParameterError
from flashlab.core.paths import NOTEBOOKS
from flashlab.show import exercises, trial
from flashlab.show.exercises import BLANK, Checked, ask, check, get

ALL = exercises.EXERCISES
WRONG = [(name, answer) for name, exercise in ALL.items() for answer in exercise.wrong]
needs_compiler = pytest.mark.skipif(bool(trial.no_compiler()), reason=trial.no_compiler())


@pytest.fixture(scope="module")
def answered() -> Iterator[Mapping[tuple[str, str], Future[Checked]]]:
    """What became of the kernels' own answers and of the wrong ones."""
    answers = [*((name, exercise.blank[1]) for name, exercise in ALL.items()), *WRONG]
    with ahead({one: partial(check, *one) for one in answers}) as results:
        yield results


def test_the_notebook_asks_all_of_them_in_order_with_hints() -> None:
    cells = nbformat.read(NOTEBOOKS / "exercises.ipynb", as_version=4).cells  # type: ignore[no-untyped-call]
    asked = [i for i, cell in enumerate(cells) if cell.source.startswith("show(ask(")]
    assert [cells[i].source for i in asked] == [f'show(ask("{name}"))' for name in ALL]
    assert len(asked) >= 8
    for number, (i, name) in enumerate(zip(asked, ALL, strict=True), 1):
        assert cells[i - 1].source.startswith(f"## {number}. ")
        assert re.search(r'<details markdown="1"><summary>Hint( 1)?</summary>\n\n.+\n\n</details>', cells[i - 1].source)
        assert cells[i + 1].source == f'{name} = check("{name}", "{BLANK}")\nshow(str({name}))'


@pytest.mark.parametrize("name", ALL)
def test_a_blank_fits_the_kernel_and_does_not_tell(name: str) -> None:
    own, shown = ALL[name].blank[1], ask(name)
    assert shown.count(BLANK) == 1
    assert own not in shown
    assert len(ALL[name].wrong) == len({own, *ALL[name].wrong}) - 1 > 0
    for unfilled in (BLANK, " "):
        assert not check(name, unfilled).passed
        assert "Nothing is filled in" in str(check(name, unfilled))


@needs_compiler
def test_an_answer_that_never_reaches_shared_memory_is_wrong() -> None:
    tried = check("swizzle", "*(volatile int*)0")
    assert not tried.passed
    assert tried.conflicts is None
    assert "**Wrong.**" in str(tried)


@pytest.mark.parametrize("line", ["const int num_keys = ____ ;", "const int ____;", "no such line ____;"])
def test_a_blank_that_the_kernel_no_longer_has_once_is_refused(line: str) -> None:
    with pytest.raises(ParameterError, match=r"wanted one line of 00_naive\.cu"):
        _ = get("mask").model_copy(update={"line": line}).blank
    with pytest.raises(ParameterError, match="wanted one of mask, "):
        ask("nothing")


@needs_compiler
@pytest.mark.parametrize("name", ALL)
def test_the_kernels_own_answer_is_right(name: str, answered: Mapping[tuple[str, str], Future[Checked]]) -> None:
    found = answered[name, ALL[name].blank[1]].result()
    assert found.passed, str(found)
    assert str(found).startswith("**Right.**")


@needs_compiler
@pytest.mark.parametrize(("name", "answer"), WRONG)
def test_a_wrong_answer_is_caught_and_told_why(
    name: str, answer: str, answered: Mapping[tuple[str, str], Future[Checked]]
) -> None:
    found = answered[name, answer].result()
    assert not found.passed
    assert found.trial is not None
    assert found.trial.wrong or "wavefronts" in str(found)
    assert "does not compile" not in found.trial.wrong
    assert all(f"**{kind}**" in str(found) for kind in found.trial.wrong)


@needs_compiler
def test_another_right_answer_passes_and_what_does_not_compile_says_so() -> None:
    assert check("mask", "max(0, p.kv_len - p.q_len + q_row + 1)").passed
    assert check("tail", "block_keys / TILE_KV + 1").passed, "as its hint says of a number that is too large"
    found = check("mask", "visible_keys(p q_row)")
    assert not found.passed
    assert "the compiler refused the file" in str(found)
    crashed = check("mask", "1 / 0")
    assert crashed.trial is not None
    assert "**crash**: the kernel's process was ended" in trial.explained(crashed.trial)
    assert "divided by zero" in trial.explained(crashed.trial)


@pytest.mark.parametrize("answer", [8, None])
def test_an_answer_that_is_no_text_is_refused_with_one_that_is(answer: Any) -> None:
    with pytest.raises(ParameterError, match=rf'answer: wanted C\+\+ as text, got {answer}. `check\("column", "'):
        check("column", answer)
