"""The values of tunables that won on a GPU: data/<gpu>/tuned.json, which `flashlab tuned` makes from tuning records.

Looked up where nobody names a tunable: named values first, then this table for the GPU at hand, then a stage's
defaults. Nobody edits the file: tests hold it against the records it names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from flashlab.errors import DamagedRecordError
from flashlab.paths import DATA
from flashlab.problem import DType, Mask
from flashlab.stages import Stage

FILE = "tuned.json"


class Key(NamedTuple):
    """What a choice of tunables is made for."""

    stage: str
    head_dim: int
    mask: Mask
    dtype: DType


class Choice(NamedTuple):
    """The winner of one tuning."""

    parameters: Mapping[str, int]
    """Every tunable of the stage and its value."""
    run: str
    """The run of data/<gpu>/tuning whose record justifies it."""
    shapes: tuple[str, ...]
    """The problems that it was fastest on."""


def path_of(gpu: str, data: Path = DATA) -> Path:
    """The table of a GPU."""
    return data / gpu / FILE


def table(gpu: str, data: Path = DATA) -> Mapping[Key, Choice]:
    """Every choice for a GPU; empty where none has been made.

    Raises:
        DamagedRecordError: the file is no such table.
    """
    path = path_of(gpu, data)
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _read(path, stamp)


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> Mapping[Key, Choice]:
    try:
        entries = json.loads(path.read_bytes())
        return {
            Key(entry["stage"], int(entry["head_dim"]), entry["mask"], entry["dtype"]): Choice(
                {str(name): int(value) for name, value in entry["parameters"].items()},
                str(entry["run"]),
                tuple(entry["shapes"]),
            )
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRecordError(
            f"wanted a table of tunables in {path}, got {type(error).__name__}: {error}. `flashlab tuned` writes it "
            "anew from the tuning records."
        ) from error


def parameters(
    stage: Stage,
    gpu: str | None,
    *,
    head_dim: int,
    causal: bool,
    dtype: DType,
    overrides: Mapping[str, int] | None = None,
    data: Path = DATA,
) -> dict[str, int]:
    """Values of a stage's tunables that differ from its defaults, or may: `overrides` over the GPU's table.

    Where an element type was not tuned, the other one's choice serves: both have the same sizes. A choice that names
    other tunables than the stage has (it has changed since) counts for nothing.

    Args:
        stage: the stage.
        gpu: folder name under data/, None for a CPU, where nothing is tuned.
        head_dim, causal, dtype: of the problem.
        overrides: values that the caller names.
        data: folder of the records.

    Raises:
        DamagedRecordError: the table cannot be read.
    """
    found: dict[str, int] = {}
    if gpu is not None and stage.params:
        choices = table(gpu, data)
        mask: Mask = "causal" if causal else "full"
        for candidate in (dtype, *(other for other in stage.dtypes if other != dtype)):
            choice = choices.get(Key(stage.id, head_dim, mask, candidate))
            if choice is not None and choice.parameters.keys() == stage.params.keys():
                found = dict(choice.parameters)
                break
    return {**found, **(overrides or {})}
