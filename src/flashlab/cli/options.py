"""The options that several commands share: one name, one type and one way to read each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.inputs import ALL, KINDS
from flashlab.core.paths import DATA, require_checkout, slug
from flashlab.core.problem import UNLIMITED, DType, Mask

SHAPE_HELP = "BxHxSxD or BxHxHkvxSqxSkxD, such as 16x16x2048x64"
KINDS_HELP = f"What Q, K and V hold: {', '.join(KINDS)}"
_COMMA = re.compile(r",(?![^\[]*\])")


def names_in(text: str | None) -> list[str] | None:
    """Names joined by commas, those in brackets left alone; None where none are given, empty for `none`.

    Raises:
        ParameterError: nothing but commas, as an unset variable of a shell leaves it.
    """
    if text is None:
        return None
    names = [name.strip() for name in _COMMA.split(text) if name.strip()]
    if not names:
        raise ParameterError(f"wanted names joined by commas, or none, got {text!r}; all without the option")
    return [name for name in names if name != "none"]


def stages_in(text: str | None) -> list[str] | None:
    """As `names_in`, of stages: a unique prefix becomes the full id.

    Raises:
        UnknownStageError, ParameterError: no stage begins so, or several do; nothing but commas.
    """
    stage_ids: list[str] | None = _resolve(names_in(text))
    return stage_ids


def stages_or_libraries_in(text: str | None) -> list[str] | None:
    """As `names_in`: a unique prefix of a stage's id becomes that id, and names that begin no id stay.

    Raises:
        UnknownStageError, ParameterError: several stages begin so; nothing but commas.
    """
    from flashlab.kernels.registry import OFF_LADDER, STAGES

    def known(name: str) -> str:
        prefix = name.partition("[")[0]
        return str(_resolve(name)) if any(stage_id.startswith(prefix) for stage_id in (*STAGES, *OFF_LADDER)) else name

    names = names_in(text)
    return None if names is None else list(map(known, names))


def sources(texts: Sequence[str] | None) -> dict[str, Path]:
    """Edited copies of stages, by the names of their rows.

    Raises:
        ParameterError: no STAGE=FILE, no such file, or two files of one name for a stage.
        UnknownStageError: no such stage.
    """
    files: dict[str, Path] = {}
    for text in texts or ():
        stage_id, equals, file = text.partition("=")
        if not equals or not Path(file).is_file():
            raise ParameterError(f"source: wanted STAGE=FILE with a file that exists, got {text!r}")
        name, copy = f"{_resolve(stage_id)}@{Path(file).stem}", Path(file).resolve()
        if files.setdefault(name, copy) != copy:
            raise ParameterError(f"source: wanted a stage's copies of different names, got {files[name]} and {copy}")
    return files


def features(window: str | None, softcap: float) -> dict[str, Any]:
    """Fields of a problem: LEFT alone leaves the keys after a query's own to the mask.

    Raises:
        ParameterError: no window.
    """
    sides = [] if window is None else window.split(",")
    if len(sides) > 2 or not all(re.fullmatch(r"-?\d+", side) for side in sides):
        raise ParameterError(f"window: wanted LEFT or LEFT,RIGHT in keys, got {window!r}")
    return {"window": tuple([*map(int, sides), UNLIMITED, UNLIMITED][:2]), "softcap": softcap}


def _complete(incomplete: str) -> list[str]:
    """The stages that a shell offers for the beginning of an id, or of the last of several joined by commas."""
    from flashlab.kernels.registry import OFF_LADDER, STAGES

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + stage_id for stage_id in (*STAGES, *OFF_LADDER) if stage_id.startswith(last)]


def _resolve(value: Any) -> Any:
    """The full id of a stage, or of each of several; None where none is given."""
    from flashlab.kernels.registry import resolve

    return list(map(resolve, value)) if isinstance(value, list | tuple) else value and resolve(value)


def _known_arch(value: Any) -> Any:
    from flashlab.kernels.registry import ARCHS

    given = value if isinstance(value, list | tuple) else (value,)
    refuse_unknown("arch", ARCHS, *(arch for arch in given if arch is not None))
    return value


def _folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_folder, value))
    name = slug(value or "")
    if value and not name:
        raise ParameterError(f"gpu: wanted a folder under data/, such as nvidia-h200, or a product name, got {value!r}")
    return None if value is None else name


def _of_checkout(data: Path) -> Path:
    if data == DATA:
        require_checkout("its records, or a folder of others after --data")
    return data


def _stage(help_text: str) -> Any:
    return typer.Argument(metavar="STAGE", callback=_resolve, autocompletion=_complete, help=help_text)


STAGE = _stage("A stage's id or a unique prefix of it; ID[NAME=VALUE] with values of its tunables.")
BARE_STAGE = _stage("A stage's id or a unique prefix of it.")
StageIds = Annotated[list[str] | None, _stage("Stage ids, or unique prefixes of them; all where none is given.")]
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE[,STAGE]...",
        autocompletion=_complete,
        help="Stage ids, or ID[NAME=VALUE], or none; the ladder if not given.",
    ),
]
DeadEnds = Annotated[
    bool, typer.Option("--dead-ends", help="The dead ends too; without named stages, in place of the ladder.")
]
Peers = Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Libraries, or none; all if not given.")]
Source = Annotated[
    list[str] | None, typer.Option(metavar="STAGE=FILE", help="An edited copy of a stage's kernel; may be repeated.")
]
Shape = Annotated[str | None, typer.Option(help=f"{SHAPE_HELP}.")]
Shapes = Annotated[list[str] | None, typer.Option(help=f"{SHAPE_HELP}; may be repeated.")]
OneDType = Annotated[DType | None, typer.Option(help="Element type; all if not given.")]
TheDType = Annotated[DType, typer.Option(help="Element type.")]
OneMask = Annotated[Mask | None, typer.Option(help="Mask; both if not given.")]
TheMask = Annotated[Mask, typer.Option(help="Mask.")]
TheWindow = Annotated[
    str | None,
    typer.Option("--window", metavar="LEFT[,RIGHT]", help="Keys to either side that a query sees; -1: all. Else none."),
]
TheSoftcap = Annotated[float, typer.Option("--softcap", help="What bounds scores; 0: nothing.", min=0)]
HeadDims = Annotated[list[int] | None, typer.Option(help="Head dim; all if not given; may be repeated.")]
TheInputs = Annotated[str, typer.Option("--inputs", metavar="KIND", help=f"{KINDS_HELP}.")]
Inputs = Annotated[str | None, typer.Option(metavar="KIND[,KIND]...", help=f"{KINDS_HELP}; or {ALL}.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Leave out what is on record here for the same machine code and libraries.")
]
Samples = Annotated[int | None, typer.Option(help="Samples of each to aim for; the plan's if not given.", min=2)]
Gpu = Annotated[
    str | None,
    typer.Option(callback=_folder, metavar="GPU", help="Folder under data/, such as nvidia-h200, or product name."),
]
TheGpu = Annotated[
    str,
    typer.Option(callback=_folder, help="Folder under data/ to show, or product name; the one at hand if not given."),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", callback=_folder, help="For cells that name no GPU; all that are there if not given. Repeatable."
    ),
]
GpuNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="GPU", callback=_folder, help="Folders under data/, or product names; all where none is given."
    ),
]
Arch = Annotated[str | None, typer.Option(callback=_known_arch, help="Architecture, such as sm_90a.")]
Archs = Annotated[
    list[str] | None, typer.Option(callback=_known_arch, help="Architecture, such as sm_90a; may be repeated.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and measure nothing.")]
Device = Annotated[int, typer.Option(help="CUDA device index.", min=0)]
Data = Annotated[Path, typer.Option(callback=_of_checkout, help="Folder of recorded data.", show_default=False)]
Tables = Annotated[Path, typer.Option("--data", help="Folder of recorded data.", show_default=False)]
"""As `Data`, of a command that wants no records: a wheel has the tables of choices."""
