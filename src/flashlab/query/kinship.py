"""What a measurement on one GPU says of another: the facts are in kinships.toml."""

from __future__ import annotations

from collections.abc import Mapping

from flashlab.core.facts import Facts
from flashlab.core.paths import table


class Model(Facts):
    """A GPU model as documents name it."""

    folder: str
    """Under data/."""
    arch: str


class Kinship(Facts):
    """What a measurement on one GPU says of another one."""

    claimed: str
    """The model that is spoken of, a name in `MODELS`."""
    measured: str
    """Folder under data/ of the one that was measured."""
    same: str
    differs: str
    time: bool
    """Whether a time carries over, where device memory does not bound it."""


_FACTS = table(__file__, "kinships")
MODELS: Mapping[str, Model] = {name: Model.model_validate(model) for name, model in _FACTS["models"].items()}
KINSHIPS: tuple[Kinship, ...] = tuple(map(Kinship.model_validate, _FACTS["kinships"]))
"""Of other pairs nothing is known, so that times do not carry over."""


def kinship(claimed: str, measured: str) -> Kinship | None:
    """What a GPU's records say of a claimed model; None where nothing is known of the pair, or it is that model."""
    return next((pair for pair in KINSHIPS if (pair.claimed, pair.measured) == (claimed, measured)), None)


def model_in(folder: str) -> str | None:
    """The name of the model whose records lie in a folder under data/; None where `MODELS` has none."""
    return next((name for name, model in MODELS.items() if model.folder == folder), None)


def times_carry_over(gpu: str, kin: str) -> tuple[bool, str]:
    """Whether the times of a GPU that another one's choices are taken from carry over, and why, for people.

    Args:
        gpu, kin: folders under data/ of the one that lacks records, and of the other; what is known of one claimed by
            the other holds both ways.
    """
    pair = kinship(model_in(gpu) or gpu, kin) or kinship(model_in(kin) or kin, gpu)
    if pair is None:
        return False, f"Nothing is known of how {gpu} and {kin} differ, so that no time is predicted."
    carries = "so times carry over where that does not bound them" if pair.time else "so no time is predicted"
    return pair.time, f"Both have {pair.same}. They differ in {pair.differs}; {carries}."
