"""Commands that read, verify, merge and compare records. They import no compiler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, say
from flashlab.core.errors import DamagedRecordError, NoDataError, OutputError, ParameterError
from flashlab.core.inputs import KINDS, NORMAL
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import SIZES, Cache, Problem, Regime, matching

if TYPE_CHECKING:
    from flashlab.record.schema import Measurement

NEAREST = 5
"""Recorded problems listed as the nearest ones if none matches."""
RUN_COLUMNS = {
    "name": lambda row: row["name"] + (", log-sum-exp on" if row["kind"] == "stage" and row["lse"] else ""),
    **{name: name for name in ("kind", "shape", "dtype", "mask", "features", "inputs")},
    **{name: name for name in ("median_us", "tflops", "cv_percent")},
    **{name: name for name in ("samples", "call_clock_mhz", "cycles_per_score", "energy_j_per_call")},
    "status": lambda row: row["status"] + (f": {row['reason']}" if row["status"] != "ok" else ""),
}
"""Columns of the table of a run."""


def results(
    *,
    gpu: opt.Gpu = None,
    shape: opt.Shape = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    window: opt.TheWindow = None,
    softcap: opt.TheSoftcap = 0.0,
    inputs: opt.Inputs = NORMAL,
    regime: Annotated[
        Regime | None, typer.Option(help="burst: short samples with gaps (default); sustained: power-limited.")
    ] = None,
    cache: Annotated[
        Cache | None,
        typer.Option(
            help="hot: calls back to back (default); cold: L2 overwritten before each; rotating: back to back, "
            "each on other K and V; step: in a CUDA graph, each behind another kernel."
        ),
    ] = None,
    against_peers: Annotated[
        bool,
        typer.Option("--against-peers", help="Compare the best stage with the best library of the same run instead."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify all record files, of every GPU without --gpu.")
    ] = False,
    data: opt.Data = DATA,
) -> None:
    """Show recorded times as the report does: per problem, the newest session that covers most of the ladder.

    Problems on which the ladder was not measured show what was: decoding, dead ends, windows and soft caps.
    """
    from flashlab.query import select
    from flashlab.query.rows import headline
    from flashlab.record import store
    from flashlab.record.schema import STEADY_S

    others = {"regime": regime, "cache": cache, "window": window, "softcap": softcap or None}
    if verify:
        narrower = {"shape": shape, "dtype": dtype, "mask": mask, "against-peers": against_peers, **others}
        narrower["inputs"] = inputs != NORMAL
        if given := " ".join(f"--{key}" for key, value in narrower.items() if value):
            raise ParameterError(f"--verify: wanted no options other than --gpu, --data and --json, got {given}")
        folders = store.folders(data) if gpu is None else ()
        _verify(folders or (store.require_runs(gpu, data),), data)
        return
    name = store.require_runs(gpu, data)
    kinds = kinds_in(inputs or NORMAL)
    if against_peers and (given := " ".join(f"--{key} {value}" for key, value in others.items() if value)):
        raise ParameterError(
            f"--against-peers: wanted no --regime, --cache, --window or --softcap, got {given}. It always shows both "
            "burst and sustained times with a hot L2; --shape, --dtype, --mask and --inputs work"
        )
    conditions = {"shape": Problem.parse(shape).shape if shape else None, "dtype": dtype, "mask": mask}

    if damaged := store.verify(name, data):
        say("\n".join(f"damaged: {damage}" for damage in damaged))
        say(f"Invalid lines are skipped; `flashlab repair {name}` repairs what it can")
    if against_peers:
        _against_peers(name, data, conditions, kinds)
        return
    asked = (f"--window {window}" if window else None, f"--softcap {softcap:g}" if softcap else None)
    what = " ".join(filter(None, (*conditions.values(), *asked, inputs)))
    rows = _rows(name, data, {**conditions, **opt.features(window, softcap)}, kinds, what)
    state: tuple[Regime, Cache] = (regime or "burst", cache or "hot")
    if (regime or cache) and not any(row.samples_of(*state) for row in rows):
        states = sorted({(samples.regime, samples.cache) for row in rows for samples in row.settled})
        works = "; ".join("--regime {} --cache {}".format(*known) for known in states)
        long = f" of at least {STEADY_S} s" * (state[0] == "sustained")
        raise NoDataError(
            f"wanted times with --regime {state[0]} --cache {state[1]}, found none{long} in these rows. "
            f"Shown: {works or 'none'}"
        )
    title = f"{name}, newest run {max(row.run for row in rows)}, {select.STATES.get(state, ', '.join(state))}"
    # Samples of a state may come from a different run of the session than the row.
    flat = [headline(row, *state) | {"run": select.origin(row, *state)[0]} for row in rows]
    answer(flat, RUN_COLUMNS, title=title)


def _rows(gpu: str, data: Path, conditions: Mapping[str, Any], kinds: Sequence[str], what: str) -> list[Measurement]:
    """The rows that the report shows for the matching problems, else those measured off the ladder.

    Raises:
        NoDataError: no problem matches; the message names `what` was asked for and the nearest problems.
    """
    from flashlab.query import select

    def problems(kinds: Sequence[str]) -> Iterator[Mapping[Problem, Sequence[Measurement]]]:
        yield select.load(gpu, data, kinds).problems
        yield select.beyond(gpu, data, kinds)

    for recorded in problems(kinds):
        asked = [
            candidate
            for candidate in recorded
            if all(value in (None, getattr(candidate, name)) for name, value in conditions.items())
        ]
        if asked:
            return [row for problem in asked for row in recorded[problem]]
    every = {problem: None for recorded in problems(tuple(KINDS)) for problem in recorded}
    near = sorted(every, key=lambda problem: _apart(problem, conditions, kinds))[:NEAREST]
    nearest = f". Nearest of {len(every)} recorded problems: {'; '.join(problem.label for problem in near)}"
    raise NoDataError(
        f"wanted rows of {what} on {gpu}, found none{nearest if near else ', and none of any other problem'}"
    )


def _apart(problem: Problem, conditions: Mapping[str, Any], kinds: Sequence[str]) -> float:
    """Distance of a recorded problem from the conditions: sum of |log2| of size ratios, plus 1 per other mismatch."""
    asked = {key: value for key, value in conditions.items() if key != "shape" and value is not None}
    of = Problem.parse(conditions["shape"] or problem.shape)
    far: float = sum(abs(math.log2(getattr(problem, name) / getattr(of, name))) for name in SIZES)
    unlike: int = sum(getattr(problem, key) != value for key, value in asked.items())
    return far + unlike + (problem.inputs not in kinds)


def _against_peers(gpu: str, data: Path, conditions: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Print the best stage and the best library, one row per problem."""
    from flashlab.query import contests

    pairs = [pair for pair in contests.against_peers(gpu, data, kinds) if matching([pair.problem], **conditions)]
    if not pairs:
        raise NoDataError(
            f"wanted matching problems on {', '.join(kinds)} inputs among the records of {gpu}, found none"
        )
    flat = [pair.flat() for pair in pairs]
    of_best = ("stage_median_us", "stage_percent_of_peak", "best_peer", "peer_median_us", "peer_percent_of_peak")
    answer(
        [{"problem": pair.problem.label, **row} for pair, row in zip(pairs, flat, strict=True)],
        {
            "problem": "problem",
            "stage": lambda row: row["best_stage"] or row["reason"],
            **dict(zip(("stage µs", "% of peak", "library", "library µs", "% of its peak"), of_best, strict=True)),
            "library": lambda row: f"{row['best_peer']} †" if row["not_timed"] else row["best_peer"],
            **{"ratio": "ratio", "with lse alike": "adjusted_ratio", "to fa3 or cuDNN": "against_named.burst.ratio"},
            **{"sustained ratio": "sustained.ratio", "with lse alike, sustained": "sustained.adjusted_ratio"},
            **{"to fa3 or cuDNN, sustained": "against_named.sustained.ratio", "worst layer": "worst_ratio"},
        },
        title=f"{gpu}, newest run {max(pair.run for pair in pairs)}: speed-up over the library (ratio of medians), on "
        "normally distributed inputs of unit scale unless a problem names others"
        + (
            "; †: a library that supports it was not timed (--json names it)"
            if any(row["not_timed"] for row in flat)
            else ""
        ),
        document=flat,
    )


def _verify(gpus: Sequence[str], data: Path) -> None:
    """Verify the record files of GPUs and report damage as an error."""
    from flashlab.record import store

    damage = [damaged for gpu in gpus for damaged in store.verify(gpu, data)]
    if as_json():
        answer(damage)
    if damage:
        lines = "\n  ".join(map(str, damage))
        raise DamagedRecordError(f"wanted sound records, found:\n  {lines}")
    for gpu in () if as_json() else gpus:
        typer.echo(f"data/{gpu} is sound: {store.extent(gpu, data)}")


def collect(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Data folders of other machines, or GPU folders inside them.")
    ],
    *,
    commit: Annotated[str, typer.Option(help="Only take runs of this commit.")] = "",
    data: opt.Data = DATA,
) -> None:
    """Import runs recorded on other machines, if all are complete, undamaged and of one commit; duplicates are skipped.

    A new GPU gets its own page in the next report.
    """
    from flashlab.record import collect as module

    collected = module.collect(folders, data.resolve(), commit=commit)
    columns = {
        "gpu": "gpu",
        "from": "folder",
        "taken": lambda result: len(result.taken),
        "known": lambda result: len(result.known),
    }
    answer(collected, columns)


def compare(
    before: Annotated[
        str, typer.Argument(metavar="A", help="Baseline: GPU folder, driver, commit or run; X+Y for both.")
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="Candidate, in the same form.")],
    *,
    every: Annotated[bool, typer.Option("--all", help="Also list times that did not change.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Write a chart of the ratios to this SVG file.")] = None,
    shape: opt.Shape = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    data: opt.Data = DATA,
) -> None:
    """Show which times changed between runs, commits, drivers or GPUs by more than the noise between machine starts.

    A ratio is the speed-up of B over A, in bursts with a hot L2, with its 95 % interval.
    """
    from flashlab.query import compare as module

    conditions = {"shape": Problem.parse(shape).shape if shape else None, "dtype": dtype, "mask": mask}
    comparison = module.compare(before, after, data, **conditions)
    rows = comparison.changes
    if chart is not None:
        from flashlab.show import charts

        try:
            chart.write_text(charts.changes(comparison).svg["wide"], encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"--chart: wanted a writable file in an existing folder, got {chart}: {error.strerror}"
            ) from error
        say(f"drawn in {chart}")
    columns = {
        **{"problem": "problem.label", "name": "name", "A µs": "before_us", "B µs": "after_us", "ratio": "ratio"},
        "interval": lambda change: f"{change.low:.3f}–{change.high:.3f}",
        **{"starts": "starts", "verdict": "verdict"},
    }
    changed = [change for change in rows if every or change.verdict != "same"]
    percent = comparison.noise_percent
    noise = "unknown, because no code was timed in two starts" if percent is None else f"{percent:.2f} %"
    document = {name: getattr(comparison, name) for name in ("sides", "differs", "noise_percent")}
    answer(
        changed,
        columns,
        title=f"{before} (A) and {after} (B); noise between starts {noise}",
        document=document | {"changes": [{k: v for k, v in vars(change).items() if k != "rows"} for change in changed]},
    )
    for name, (ours, theirs) in comparison.differs.items():
        say(f"{name}: {ours} → {theirs}")
    say(f"{len(rows) - sum(change.verdict == 'same' for change in rows)} of {len(rows)} times changed")


COMMANDS = {"results": results, "collect": collect, "compare": compare}
