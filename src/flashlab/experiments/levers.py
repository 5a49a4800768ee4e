"""Levers: microarchitectural experiments, each a patch of a stage's source with a question and a prediction.

`kernels/levers/<name>.patch` is a header in TOML, an empty line, and a unified diff of the stage's file:

    stage = "13_overlap"
    question = "One sentence?"
    prediction = "Written before the measurement."
    why = "The result; may come later."
    dtype = "float16"               # what it is measured in, where not bfloat16
    inputs = ["normal", "scale10"]  # and on, where not on normal inputs alone

    --- a/kernels/dead_ends/13_overlap.cu
    +++ b/kernels/dead_ends/13_overlap.cu
    @@ ...

A hunk's lines must stand in the file word for word, once, and in the hunks' order; its line numbers are for people. So
a change elsewhere in the file leaves a patch good, and a change of what it is about breaks it, which tests notice.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from flashlab.build.sources import shown
from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.inputs import NORMAL, drawn
from flashlab.core.paths import BUILD, KERNELS, writable_dir
from flashlab.core.problem import MASKS, DType, Mask, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import reason
from flashlab.record.store import write_at_once

FOLDER = KERNELS / "levers"
PATCHED = BUILD / "levers"
"""Folder of patched sources."""
SHAPES = ("16x16x2048x64", "16x16x2048x128")
"""Shapes at which levers are measured, with both masks."""
AXIS = "levers"
"""The axis of levers' records (`records.Ablation`). Its levels are `AS_IT_IS` and the levers' names."""
AS_IT_IS = "as it is"
"""The level of a lever's unchanged stage."""
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n((?:(?!@@).*\n)*)")
"""Its line, how many it has before and after, where those are not one, and its lines."""


_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Lever:
    """One change of one stage."""

    name: str
    stage: str
    """Id of its stage."""
    question: _Text
    prediction: _Text
    """Written before the measurement."""
    why: str = ""
    """The result in words; empty if not written yet."""
    dtype: DType = "bfloat16"
    """Element type of the measurement, on the kinds of `inputs`."""
    inputs: tuple[str, ...] = (NORMAL,)
    diff: str

    def problems(
        self,
        *,
        shapes: Sequence[str] | None = None,
        dtype: DType | None = None,
        mask: Mask | None = None,
        inputs: Sequence[str] | None = None,
    ) -> tuple[Problem, ...]:
        """The problems of the measurement; arguments override its own values."""
        return tuple(
            Problem.parse(shape, dtype=dtype or self.dtype, mask=of_mask, inputs=drawn(kind))
            for shape in shapes or SHAPES
            for of_mask in ([mask] if mask else MASKS)
            for kind in inputs or self.inputs
        )

    def changed_lines(self) -> tuple[int, int]:
        """Numbers of lines added and removed."""
        signs = [line[:1] for line in self.diff.splitlines()[2:]]
        return signs.count("+"), signs.count("-")

    def shown_diff(self) -> str:
        """The diff with the line numbers of its hunks in the stage's current file.

        Raises:
            ParameterError: it does not fit the source as it is now.
        """
        source = registry.get(self.stage).source
        before, after = source.read_text(encoding="utf-8").splitlines(), self.text().splitlines()
        return "\n".join(difflib.unified_diff(before, after, f"a/{shown(source)}", f"b/{shown(source)}", lineterm=""))

    def text(self) -> str:
        """The stage's source with the change.

        Raises:
            ParameterError: it does not fit the source as it is now.
        """
        return apply(self.diff, registry.get(self.stage).source, name=self.name)

    def write(self, folder: Path = PATCHED) -> Path:
        """The same in a file of its own, `folder`/<name>.cu.

        Raises:
            ParameterError: it does not fit the source as it is now.
            OutputError: the folder cannot be written.
        """
        path = writable_dir(folder, "patched kernels") / f"{self.name}.cu"
        text = self.text()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_at_once(path, text)
        return path


def names() -> tuple[str, ...]:
    """All levers, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.patch")))


def choose(chosen: Sequence[str] | None = None) -> tuple[Lever, ...]:
    """The levers with these names; all if None or empty.

    Raises:
        ParameterError: there is none of a name, or a file is no lever.
    """
    refuse_unknown("lever", names(), *(chosen or ()))
    unique = dict.fromkeys(chosen or names())
    return tuple(parse(name, (FOLDER / f"{name}.patch").read_text(encoding="utf-8")) for name in unique)


# --- The file ---------------------------------------------------------------------------------------------------------


def parse(name: str, text: str) -> Lever:
    """A lever from its file's text.

    Raises:
        ParameterError: the header lacks something, or says what cannot be; or there is no diff of its stage's file.
    """
    header, _, diff = text.partition("\n--- a/")
    try:
        fields = tomllib.loads(header) | {"name": name, "diff": f"--- a/{diff}".strip("\n") + "\n"}
        lever = Lever(**fields)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"lever {name}: wanted a header in TOML above its diff, got: {error}") from None
    except ValidationError as error:
        raise ParameterError("\n".join(f"lever {name}: {reason(detail)}" for detail in error.errors())) from None
    path = shown(registry.get(lever.stage).source)
    opening = [f"--- a/{path}", f"+++ b/{path}"]
    if lever.diff.splitlines()[:2] != opening:
        raise ParameterError(
            f"lever {name}: wanted a diff of {path} alone, which begins with {' and '.join(opening)}, got "
            f"{lever.diff.splitlines()[:2]}"
        )
    return lever


# --- The diff ---------------------------------------------------------------------------------------------------------


def _hunks(diff: str, name: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """For each hunk, the line number in its header, its lines before, and its lines after."""
    _, _, *lines = diff.splitlines(keepends=True)
    if not lines or not re.fullmatch(f"({_HUNK.pattern})+", "".join(lines)):
        raise ParameterError(f"lever {name}: wanted hunks, each below its `@@ -line,lines +line,lines @@`, got others")
    for line, num_old, num_new, text in _HUNK.findall("".join(lines)):
        # An editor may have taken the space of an empty line.
        body = [text_line or " " for text_line in text.splitlines()]
        old, new = ([text_line[1:] for text_line in body if text_line[0] in signs] for signs in (" -", " +"))
        counts = (int(num_old or 1), int(num_new or 1))
        if (len(old), len(new)) != counts or {text_line[0] for text_line in body} - set(" -+"):
            raise ParameterError(
                f"lever {name}, hunk at line {line}: wanted {counts[0]} lines before and {counts[1]} after, as it "
                f"says, got {len(old)} and {len(new)}"
            )
        yield line, old, new


def apply(diff: str, source: Path, *, name: str) -> str:
    """Apply a unified diff to the text of `source`, exactly: no context line may differ.

    Raises:
        ParameterError: a hunk's lines are not in the source, or more than once, or after those of a later hunk.
    """
    text = source.read_text(encoding="utf-8").splitlines()
    done: list[str] = []
    for line, old, new in _hunks(diff, name):
        places = [i for i in range(len(text) - len(old) + 1) if text[i : i + len(old)] == old]
        if len(places) != 1:
            stage = shown(source)
            absent = "".join(f"; it has no line {text_line!r}" for text_line in old if text_line not in text)
            raise ParameterError(
                f"lever {name}, hunk at line {line}: wanted its {len(old)} lines once in {stage}, below those of the "
                f"hunk before, got them {len(places)} times{absent}. What works: a "
                f"copy of {stage} as it is now in build/levers/{name}.cu, the change made in it, and "
                f"git diff --no-index {stage} build/levers/{name}.cu | sed '1,2d; s|^+++ .*|+++ b/{stage}|', below the "
                f"header of kernels/levers/{name}.patch"
            )
        done += text[: places[0]] + new
        text = text[places[0] + len(old) :]
    return "\n".join([*done, *text]) + "\n"
