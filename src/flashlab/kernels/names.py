"""Stages by name: a unique prefix of an id is enough, and a typo is answered with what was probably meant."""

from __future__ import annotations

import difflib
from itertools import product

from flashlab.core.errors import UnknownStageError
from flashlab.core.paths import KERNELS
from flashlab.kernels import registry


def known() -> tuple[str, ...]:
    """The ids of all stages, the ladder first."""
    return tuple(dict.fromkeys((*registry.STAGES, *registry.OFF_LADDER)))


def resolve(name: str) -> str:
    """The full id for an id or a unique prefix of one: `16` is `16_ones_column`. What stands in brackets is kept.

    Raises:
        UnknownStageError: no id begins so, or several do.
    """
    prefix, bracket, tunables = name.partition("[")
    ids = known()
    matches = [prefix] if prefix in ids else [stage_id for stage_id in ids if prefix and stage_id.startswith(prefix)]
    if len(matches) == 1:
        return matches[0] + bracket + tunables
    if matches:
        raise UnknownStageError(f"stage: wanted a unique prefix, got {prefix!r}, which begins {', '.join(matches)}")
    for folder, suffix in product(("", "decode/", "dead_ends/"), (".cu", ".py")):
        if (KERNELS / f"{folder}{prefix}{suffix}").is_file():
            raise UnknownStageError(f"stage: wanted an entry kernels/{folder}{prefix}.toml beside its source, got none")
    # Without its number too, which is what people misremember.
    titles = {stage_id.partition("_")[2]: stage_id for stage_id in registry.STAGES}
    near = difflib.get_close_matches(prefix, [*ids, *titles], n=3)
    meant = dict.fromkeys(titles.get(match, match) for match in near)
    raise UnknownStageError(
        f"stage: wanted one of {', '.join(registry.STAGES)}, got {prefix!r}."
        + (f" Did you mean {' or '.join(meant)}?" if meant else "")
        + f" Off the ladder: {', '.join(registry.OFF_LADDER)}"
    )
