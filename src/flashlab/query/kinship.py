"""Whether measurements on one GPU carry over to another; the facts are in kinships.toml."""

from __future__ import annotations

from collections.abc import Mapping

from flashlab.core.facts import Facts
from flashlab.core.paths import table


class Model(Facts):
    """A GPU model, as named by documents."""

    folder: str
    """Folder name under data/."""
    arch: str


class Kinship(Facts):
    """How measurements on one GPU carry over to another."""

    claimed: str
    """The model that a document names, a key of `MODELS`."""
    measured: str
    """Folder under data/ of the measured GPU."""
    same: str
    differs: str
    time: bool
    """Whether times carry over, unless device memory bounds them."""


_FACTS = table(__file__, "kinships")
MODELS: Mapping[str, Model] = {name: Model.model_validate(model) for name, model in _FACTS["models"].items()}
KINSHIPS: tuple[Kinship, ...] = tuple(map(Kinship.model_validate, _FACTS["kinships"]))
"""All known pairs; times of other pairs do not carry over."""


def kinship(claimed: str, measured: str) -> Kinship | None:
    """The entry for a claimed model and a measured GPU; None if there is none, or they are the same model."""
    return next((pair for pair in KINSHIPS if (pair.claimed, pair.measured) == (claimed, measured)), None)


def model_in(folder: str) -> str | None:
    """The model of a folder under data/; None if `MODELS` has none."""
    return next((name for name, model in MODELS.items() if model.folder == folder), None)


def times_carry_over(gpu: str, kin: str) -> tuple[bool, str]:
    """Whether times carry over between two GPUs, and why, as text.

    Args:
        gpu, kin: folders under data/ of the GPU without records and of the other one; entries apply in both directions.
    """
    pair = kinship(model_in(gpu) or gpu, kin) or kinship(model_in(kin) or kin, gpu)
    if pair is None:
        return False, f"The differences between {gpu} and {kin} are not known, so no time is predicted."
    carries = "so times carry over unless that bounds them" if pair.time else "so no time is predicted"
    return pair.time, f"Both have {pair.same}. They differ in {pair.differs}; {carries}."
