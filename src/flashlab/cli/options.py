"""Options shared by several commands: the name, type, help text and parser of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.inputs import ALL, KINDS
from flashlab.core.paths import DATA, require_checkout, slug
from flashlab.core.problem import UNLIMITED, DType, Mask

SHAPE_HELP = "BxHxSxD or BxHxHkvxSqxSkxD, e.g. 16x16x2048x64"
KINDS_HELP = f"Input distribution of Q, K and V: {', '.join(KINDS)}"
SOFTCAP_HELP = "Soft cap on scores, softcap·tanh(score/softcap); 0 disables it."
_COMMA = re.compile(r",(?![^\[]*\])")


def names_in(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names, ignoring commas inside brackets; None for None, empty for `none`.

    Raises:
        ParameterError: the list has no name, as when a shell variable is unset.
    """
    if text is None:
        return None
    names = [name.strip() for name in _COMMA.split(text) if name.strip()]
    if not names:
        raise ParameterError(f"wanted comma-separated names, or none, got {text!r}; omit the option for all")
    return [name for name in names if name != "none"]


def stages_in(text: str | None) -> list[str] | None:
    """Split a list of stages as `names_in` does, expanding each unique prefix to the full id.

    Raises:
        UnknownStageError: a prefix matches no stage, or several.
        ParameterError: the list has no name.
    """
    stage_ids: list[str] | None = _resolve(names_in(text))
    return stage_ids


def stages_or_libraries_in(text: str | None) -> list[str] | None:
    """Split a list as `names_in` does, expanding prefixes of stage ids and keeping all other names.

    Raises:
        UnknownStageError: a prefix matches several stages.
        ParameterError: the list has no name.
    """
    from flashlab.kernels.registry import OFF_LADDER, STAGES

    def known(name: str) -> str:
        prefix = name.partition("[")[0]
        return str(_resolve(name)) if any(stage_id.startswith(prefix) for stage_id in (*STAGES, *OFF_LADDER)) else name

    names = names_in(text)
    return None if names is None else list(map(known, names))


def sources(texts: Sequence[str] | None) -> dict[str, Path]:
    """Parse STAGE=FILE options into files by row name, `STAGE@STEM`.

    Raises:
        ParameterError: an option is not STAGE=FILE, its file does not exist, or two files of a stage share a stem.
        UnknownStageError: no such stage.
    """
    files: dict[str, Path] = {}
    for text in texts or ():
        stage_id, equals, file = text.partition("=")
        if not equals or not Path(file).is_file():
            raise ParameterError(f"source: wanted STAGE=FILE with an existing file, got {text!r}")
        name, copy = f"{_resolve(stage_id)}@{Path(file).stem}", Path(file).resolve()
        if files.setdefault(name, copy) != copy:
            raise ParameterError(f"source: wanted copies with different file names, got {files[name]} and {copy}")
    return files


def features(window: str | None, softcap: float) -> dict[str, Any]:
    """The fields `window` and `softcap` of a problem; with LEFT alone, the right side is unlimited.

    Raises:
        ParameterError: `window` is neither LEFT nor LEFT,RIGHT.
    """
    sides = [] if window is None else window.split(",")
    if len(sides) > 2 or not all(re.fullmatch(r"-?\d+", side) for side in sides):
        raise ParameterError(f"window: wanted LEFT or LEFT,RIGHT, in keys, got {window!r}")
    return {"window": tuple([*map(int, sides), UNLIMITED, UNLIMITED][:2]), "softcap": softcap}


def settling(sustained: float) -> None:
    """Refuse seconds of sustained load in which the clock does not settle.

    Raises:
        ParameterError: `sustained` is neither 0 nor at least `STEADY_S`.
    """
    from flashlab.record.schema import STEADY_S

    if not math.isfinite(sustained) or 0 < sustained < STEADY_S:
        wanted = f"0 or at least {STEADY_S} seconds, before which the clock still changes"
        raise ParameterError(f"--sustained: wanted {wanted}, got {sustained}. 5 works.")


def _complete(incomplete: str) -> list[str]:
    """Shell completions of a stage id, or of the last id in a comma-separated list."""
    from flashlab.kernels.registry import OFF_LADDER, STAGES

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + stage_id for stage_id in (*STAGES, *OFF_LADDER) if stage_id.startswith(last)]


def _resolve(value: Any) -> Any:
    """Expand a stage prefix, or each of a list, to the full id; None stays None."""
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


STAGE = _stage("Stage id or unique prefix; ID[NAME=VALUE,...] sets tunables.")
BARE_STAGE = _stage("Stage id or unique prefix.")
StageIds = Annotated[list[str] | None, _stage("Stage ids or unique prefixes; default: all.")]
Stages = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE[,STAGE]...",
        autocompletion=_complete,
        help="Stage ids, ID[NAME=VALUE,...], or none; default: the ladder.",
    ),
]
DeadEnds = Annotated[bool, typer.Option("--dead-ends", help="Include the dead ends; without named stages, only these.")]
Peers = Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Libraries, or none; default: all.")]
Source = Annotated[
    list[str] | None, typer.Option(metavar="STAGE=FILE", help="Edited copy of a stage's source; repeatable.")
]
Shape = Annotated[str | None, typer.Option(help=f"{SHAPE_HELP}.")]
Shapes = Annotated[list[str] | None, typer.Option(help=f"{SHAPE_HELP}; repeatable.")]
OneDType = Annotated[DType | None, typer.Option(help="Data type of Q, K and V; default: all.")]
TheDType = Annotated[DType, typer.Option(help="Data type of Q, K and V.")]
OneMask = Annotated[Mask | None, typer.Option(help="Mask; full means non-causal; default: both.")]
TheMask = Annotated[Mask, typer.Option(help="Mask; full means non-causal.")]
TheWindow = Annotated[
    str | None,
    typer.Option("--window", metavar="LEFT[,RIGHT]", help="Sliding window: keys visible to each side; -1: no limit."),
]
TheSoftcap = Annotated[float, typer.Option("--softcap", help=SOFTCAP_HELP, min=0)]
HeadDims = Annotated[list[int] | None, typer.Option(help="Head dim; default: all; repeatable.")]
TheInputs = Annotated[str, typer.Option("--inputs", metavar="KIND", help=f"{KINDS_HELP}.")]
Inputs = Annotated[str | None, typer.Option(metavar="KIND[,KIND]...", help=f"{KINDS_HELP}; or {ALL}.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Skip measurements on record here for the same machine code and libraries.")
]
Samples = Annotated[int | None, typer.Option(help="Target samples per implementation; default: the plan's.", min=2)]
Gpu = Annotated[
    str | None,
    typer.Option(callback=_folder, metavar="GPU", help="Folder under data/, e.g. nvidia-h200, or product name."),
]
TheGpu = Annotated[
    str,
    typer.Option(callback=_folder, help="GPU to show: folder under data/ or product name; default: this machine's."),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option("--gpu", callback=_folder, help="GPU for cells that name none; default: all available; repeatable."),
]
GpuNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="GPU", callback=_folder, help="Folders under data/ or product names; default: all."),
]
Arch = Annotated[str | None, typer.Option(callback=_known_arch, help="Architecture, e.g. sm_90a.")]
Archs = Annotated[
    list[str] | None, typer.Option(callback=_known_arch, help="Architecture, e.g. sm_90a; default: all; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be measured without measuring.")]
Device = Annotated[int, typer.Option(help="CUDA device index.", min=0)]
Data = Annotated[Path, typer.Option(callback=_of_checkout, help="Folder of recorded data.", show_default=False)]
Tables = Annotated[Path, typer.Option("--data", help="Folder of recorded data.", show_default=False)]
"""`Data` for a command that needs no records, or more of the checkout: a wheel ships the tables of choices only."""
