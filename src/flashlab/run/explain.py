"""Explanation of the stage and tunables that `flashlab.attention` selects, as shown by `flashlab explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashlab.core.errors import NoDataError, ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.query.kinship import MODELS, model_in, times_carry_over
from flashlab.record import store
from flashlab.run import choice
from flashlab.run import gpu as devices
from flashlab.run.choice import Choice, Ranking, Table
from flashlab.run.plan import check_size, with_features


def explain(problem: Problem, *, gpu: str | None = None, arch: str | None = None, data: Path = DATA) -> dict[str, Any]:
    """Explain the selection for a problem on a GPU, which need not be present, with the two runners-up.

    The problem is normalised as in `flashlab.attention`: a side of the window that hides no key is dropped.

    Args:
        gpu: folder name under data/; default: this machine's GPU, else the main one.
        arch: architecture of a `gpu` that has no table and is not present.

    Returns:
        The document that `flashlab explain --json` prints.

    Raises:
        ShapeError: `flashlab.attention` does not support arrays of these sizes.
        UnsupportedError: no stage supports the problem on that GPU.
        NoDataError: no GPU is named or present, and none has a table.
        ParameterError: the architecture of `gpu` is unknown, `arch` contradicts it or has no `gpu`, or the soft cap is
            out of range.
        DamagedRecordError: a table cannot be read.
    """
    if arch is not None and gpu is None:
        raise ParameterError(f"arch: wanted --gpu too, whose architecture it is, got {arch} alone")
    check_size(problem)
    problem = with_features(problem, problem.window, problem.softcap)
    name, arch, sm_count = _device(gpu, arch, data)
    ranking = choice.rank(problem, name, arch, sm_count, data)
    kin = ranking.table.gpu if ranking.table is not None and ranking.table.gpu != name else None
    carries, differs = times_carry_over(name, kin) if kin else (True, "")
    lacking = _lacking(problem, name, ranking, data) if kin else ""
    if ranking.choices:
        chosen, *others = (flat(problem, taken, ranking.table, carries=carries) for taken in ranking.choices[:3])
        why = reason(problem, ranking, kin)
    else:
        # The fallback of `attention`; raises if no stage supports the problem.
        last = registry.best(problem, arch)
        chosen, others = {"stage": last.id, "parameters": last.parameters(problem.head_dim)}, []
        chosen |= {"predicted_us": None, "on_record": False}
        why = f"Nothing of head dim {problem.head_dim} is on record: the last rung that runs it."
    return {
        "gpu": name,
        "arch": arch,
        **problem.flat(),
        **chosen,
        "reason": why,
        "kin": kin,
        "lent": f"{name} has no {lacking}, so its nearest kin, {kin}, chooses. {differs}" if kin else "",
        "runners_up": others,
    }


def _lacking(problem: Problem, gpu: str, ranking: Ranking, data: Path) -> str:
    """Describe the records that a GPU lacks if the selection uses those of its kin."""
    table = choice.table(gpu, data)
    if table is None:
        return "table of choices"
    at_all = table.rows_of(ranking.choices[0].stage, problem.head_dim)
    return "time of that stage at that problem" if at_all else "records of that stage at that head dim"


def _device(gpu: str | None, arch: str | None, data: Path) -> tuple[str, str, int | None]:
    """Folder, architecture and number of SMs, None if unknown, of the GPU to explain a selection for."""
    here = devices.info() if devices.available() is None else None
    tables = [name for name in store.gpus(data) if choice.path_of(name, data).is_file()]
    others = {path.parent.name for path in data.glob(f"*/{choice.FILE}")} - {*tables}  # all of them, in a wheel
    tables += sorted(others, key=lambda other: (other != store.main_gpu(data), other))
    name = gpu or (here.slug if here else next(iter(tables), None))
    if name is None:
        raise NoDataError(
            f"wanted a GPU, or a table of choices under {data}, found neither. `flashlab tune` and `flashlab tuned` on "
            "a machine with an NVIDIA GPU make one."
        )
    known = here if here is not None and name == here.slug else choice.table(name, data)
    model = model_in(name)
    its = known.arch if known else MODELS[model].arch if model else arch
    if arch not in (None, its):
        raise ParameterError(f"arch: wanted {its}, which {name} is, or none, got {arch}")
    if its is None:
        raise ParameterError(
            f"gpu: wanted one with a table under {data} ({', '.join(tables) or 'none yet'}), or --arch too, got "
            f"{name!r}. Architectures: {', '.join(registry.ARCHS)}."
        )
    return name, its, known.sm_count if known else None


def predicted_us(chosen: Choice, table: Table | None) -> float:
    """Predicted time of a choice in µs: scaled from another problem, but at least the time of a launch."""
    return max(chosen.time_us, table.floor_us(chosen.stage.id) if table else 0.0)


def flat(problem: Problem, chosen: Choice, table: Table | None = None, *, carries: bool = True) -> dict[str, Any]:
    """The JSON form of a choice; without a predicted time unless times `carries` over."""
    return {
        "stage": chosen.stage.id,
        "parameters": dict(chosen.parameters),
        "predicted_us": predicted_us(chosen, table) if carries else None,
        "on_record": chosen.row.problem == problem and chosen.distance == 0,
        "time_from": chosen.row.problem.label,
        "run": chosen.row.run,
        "tuned_on": chosen.tuned_on.problem.label if chosen.tuned_on else None,
    }


def reason(problem: Problem, ranking: Ranking, kin: str | None = None) -> str:
    """Explain in a sentence or two why the first of a ranking is selected; `kin` is the GPU whose records were used."""
    first, *others = ranking.choices
    row = first.row
    taken = f"{row.time_us:.1f} µs {f'on {kin} ' if kin else ''}in run {row.run}"
    if row.problem == problem:
        text = f"On record at this problem, where {row.stage} took {taken}"
    else:
        sizes = choice.ratios(problem, row)
        kinds = {"mask": problem.mask == row.problem.mask, "type": problem.dtype == row.problem.dtype}
        same = [name for name, ratio in sizes.items() if ratio == 1] + [name for name, alike in kinds.items() if alike]
        other = [f"{ratio:.3g} times the {name}" for name, ratio in sizes.items() if ratio != 1]
        other += [f"another {name}" for name, alike in kinds.items() if not alike]
        facts = "; ".join([*([f"same {', '.join(same)}"] if same else []), *([", ".join(other)] if other else [])])
        text = f"Nearest problem on record: {row.problem.label} ({facts}), where {row.stage} took {taken}"
    if row.parameters != first.parameters:
        text += " with other tunables"
    measured = sum(other.row.problem == row.problem for other in ranking.choices)
    least_us = predicted_us(first, ranking.table)
    scaled = (other for other in others if other.time_us < first.time_us)
    faster = [other.stage.id for other in scaled if predicted_us(other, ranking.table) < least_us]
    text += f"; {'first' if faster else 'the least'} of {len(others) + 1} stages, {measured} of them timed there."
    if faster:
        text += f" {', '.join(faster)} may take less, but what says so is of other tunables or of a farther problem."
    if least_us > first.time_us:
        text += f" Scaled to this problem that is {first.time_us:.1f} µs, but no launch of {row.stage} on record took "
        text += f"less than {least_us:.1f} µs, which is predicted."
    return text
