"""Tables of tuning results: the choices, the fastest variants, the effect of each tunable, and every variant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from flashlab.core.paths import DATA
from flashlab.kernels import peers, registry
from flashlab.measure import tuned
from flashlab.measure.tune import Items, Key, items
from flashlab.query.rows import grouped
from flashlab.record import store
from flashlab.record.schema import ChoiceRow, Tuning
from flashlab.show import tables

Trial = Mapping[str, Any]
"""One variant for one key, from `trials`."""
_STAGES = {**registry.RUNGS, **registry.OFF_LADDER}
"""Every stage, by id."""


def trials(records: Iterable[Tuning]) -> list[Trial]:
    """Every variant on record, once per problem: the record with the most samples, and of those the newest.

    Each has `key`, `parameters`, `status`, `reason`, `median_us`, `speedup` (time of the stage's defaults over its own,
    from the run with the most samples; None without either), `samples`, `run`, `commit` and `dirty`.
    """
    of_stages = (record for record in records if record.stage not in peers.PEERS)
    by_run = grouped(of_stages, lambda record: (record.run, Key(record.stage, record.problem)))
    best: dict[tuple[Key, Items], Trial] = {}
    for (_, key), of_run in sorted(by_run.items(), key=lambda item: item[0][0]):
        stage = _STAGES.get(key.stage)
        defaults = None if stage is None else stage.parameters(key.problem.head_dim)
        start = next((r.samples_of() for r in of_run if r.parameters == defaults and r.status == "ok"), None)
        for record in of_run:
            samples, place = record.samples_of(), (key, items(record.parameters))
            count = len(samples.time_us) if samples else 0
            if place not in best or count >= best[place]["samples"]:
                best[place] = {
                    "key": key,
                    **{name: getattr(record, name) for name in ("parameters", "status", "reason")},
                    "median_us": samples.median_us if samples else None,
                    "speedup": start.median_us / samples.median_us if start and samples else None,
                    **{"samples": count, "run": record.run, **record.source.model_dump()},
                }
    return list(best.values())


def worth(of_key: Sequence[Trial]) -> dict[tuple[str, ...], dict[tuple[int, ...], float | None]]:
    """By tunable and value, the best speed-up over the defaults of any variant with that value.

    None if no such variant has a speed-up. Tunables that changed only together are one key, with a value of each.
    Tunables with a single value tried are left out.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for trial in of_key for name in trial["parameters"]):
        values = [trial["parameters"].get(name) for trial in of_key]
        if len(set(values) - {None}) > 1:
            together.setdefault(tuple(map(values.index, values)), []).append(name)
    best_speeds: dict[tuple[str, ...], dict[tuple[int, ...], float | None]] = {}
    for names in map(tuple, together.values()):
        speeds: dict[tuple[int, ...], list[float]] = {}
        for trial in of_key:
            if names[0] in trial["parameters"]:
                value = tuple(trial["parameters"][name] for name in names)
                speeds.setdefault(value, []).extend(filter(None, [trial["speedup"]]))
        best_speeds[names] = {value: max(speeds[value], default=None) for value in sorted(speeds)}
    return best_speeds


def by_key(gpu_slug: str, data: Path = DATA) -> dict[Key, list[Trial]]:
    """The results of `trials` for a GPU, by stage and problem; may be empty."""
    trials_by_key = grouped(trials(store.records(gpu_slug, Tuning, data)), lambda trial: trial["key"])
    return {key: trials_by_key[key] for key in sorted(trials_by_key)}


def _text(parameters: Mapping[str, int], beside: Mapping[str, int] | None = None) -> str:
    """Tunables as text; with `beside`, only those that differ from it."""
    shown = {name: value for name, value in parameters.items() if beside is None or beside.get(name) != value}
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"


def winners_table(trials: Mapping[Key, Sequence[Trial]], *, rows: Iterable[ChoiceRow]) -> str:
    """A Markdown table of the fastest variant for every tuned problem, and its speed-up over the defaults.

    Args:
        trials: from `by_key`.
        rows: rows of the table of choices, from `tuned.rows`.
    """
    lines: list[list[tables.Cell]] = []
    for row in rows:
        if not row.variants:
            continue
        of_key = trials.get(Key(row.stage, row.problem), [])
        gains = [
            trial["speedup"]
            for trial in of_key
            if trial["parameters"] == row.parameters and trial["speedup"] is not None
        ]
        stage = _STAGES.get(row.stage)
        differs = _text(row.parameters, stage.parameters(row.problem.head_dim) if stage else None)
        gain = f"{gains[0]:.3f}" if gains else None
        lines.append([row.stage, row.problem.label, differs, gain, str(len(of_key)), row.run])
    header = ("stage", "problem", "changed tunables", "speed-up", "variants", "run")
    return tables.markdown(header, lines, left=3)


def choices_table(held: Sequence[tuned.Held]) -> str:
    """A Markdown table of the choice for every problem that torch's SDPA was timed on, the worst first."""

    def time_us(entry: tuned.Held) -> float | None:
        return entry.choice.time_us if entry.time_us is None and not entry.lender else entry.time_us

    def run(entry: tuned.Held) -> str:
        lent = f"not timed here: chosen by the records of {entry.lender}"
        return entry.run or (lent if entry.lender else "not in one process")

    lines: list[list[tables.Cell]] = [
        [
            entry.problem.label,
            entry.choice.stage.id,
            _text(entry.choice.parameters, entry.choice.stage.parameters(entry.problem.head_dim)),
            None if (own_us := time_us(entry)) is None else f"{own_us:.1f}",
            None if entry.peer_us is None else f"{entry.peer_us:.1f}",
            None if entry.ratio is None else f"{entry.ratio:.2f}",
            run(entry),
        ]
        for entry in held
    ]
    header = ("problem", "stage", "changed tunables", "µs", "SDPA, µs", "speed-up", "run")
    return f"{tuned.tally(held)}\n\n{tables.markdown(header, lines, left=3)}"


def left_out_table(kinds: Mapping[str, Sequence[tuned.LeftOut]]) -> str:
    """A Markdown table of how well problems left out of the table would be chosen for, by kind of stages."""
    lines: list[list[tables.Cell]] = []
    for kind, entries in kinds.items():
        slower = [entry.time_us / entry.least_us for entry in entries]
        off = [math.exp(abs(math.log(entry.choice.time_us / entry.time_us))) for entry in entries]
        if entries:
            worst = entries[slower.index(max(slower))]
            where = f"{worst.problem.label}: {worst.choice.stage.id}" if max(slower) > 1 else None
            numbers = (geometric_mean(slower), max(slower), geometric_mean(off))
            lines.append([kind, str(len(entries)), *(f"{number:.3f}" for number in numbers), where])
    header = ("stages", "problems", "time over the fastest", "at most", "prediction off by", "worst")
    return tables.markdown(header, lines) if lines else "*The table has no problem with several stages.*"


def levers_table(trials: Mapping[Key, Sequence[Trial]]) -> str:
    """Collapsed Markdown tables, one per key, of the best speed-up with each value of each tunable."""
    text: list[str] = []
    for key, of_key in trials.items():
        lines: list[list[tables.Cell]] = []
        for names, best in worth(of_key).items():
            # Some ran, but in no run with the defaults.
            ran = {tuple(trial["parameters"].get(name) for name in names) for trial in of_key if trial["median_us"]}
            values = [
                f"{' '.join(map(str, value))}: "
                + (f"{speed:.3f}" if speed else "not compared" if value in ran else "does not run")
                for value, speed in best.items()
            ]
            reached = [speed for speed in best.values() if speed is not None]
            spread = f"{100 * (max(reached) / min(reached) - 1):.1f} %" if reached else None
            lines.append([" ".join(names), ", ".join(values), spread])
        if lines:
            header = ("tunable", "value: best speed-up over the defaults", "range")
            text.append(tables.folded(f"{key.stage}, {key.problem.label}", tables.markdown(header, lines, left=2)))
    return tables.unsearched("\n\n".join(text))


def trials_table(trials: Mapping[Key, Sequence[Trial]]) -> str:
    """Collapsed Markdown tables, one per key, of every variant on record, the fastest first."""
    text: list[str] = []
    for key, of_key in trials.items():
        ordered = sorted(of_key, key=lambda trial: (-(trial["speedup"] or 0.0), trial["median_us"] or math.inf))
        lines: list[list[tables.Cell]] = [
            [
                _text(trial["parameters"]),
                None if trial["median_us"] is None else f"{trial['median_us']:.1f}",
                None if trial["speedup"] is None else f"{trial['speedup']:.3f}",
                str(trial["samples"]),
                trial["status"]
                if trial["status"] == "ok"
                else f"{trial['status']}: {tables.prose(trial['reason'][:160])}",
                trial["run"],
            ]
            for trial in ordered
        ]
        header = ("variant", "µs", "speed-up over the defaults", "samples", "status", "run")
        title = f"{key.stage}, {key.problem.label}: {len(of_key)} variants"
        text.append(tables.folded(title, tables.markdown(header, lines)))
    return tables.unsearched("\n\n".join(text))
