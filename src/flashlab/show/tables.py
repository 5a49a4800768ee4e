"""Markdown tables drawn from records: what a page or a notebook shows in numbers."""

from __future__ import annotations

import difflib
import html
import math
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from flashlab.build import sass
from flashlab.build.compiler import Cubin
from flashlab.build.sass import Instruction
from flashlab.core.errors import CompileError, NoDataError
from flashlab.core.inputs import KINDS, NORMAL, TRAINED
from flashlab.core.paths import DATA
from flashlab.kernels import peers, registry
from flashlab.query import roofline, select
from flashlab.query.select import Results
from flashlab.record.checks import CheckRow
from flashlab.record.store import (
    Cache,
    Ceiling,
    CubinFields,
    Measurement,
    Regime,
    Samples,
    Sanitized,
    StageCounters,
    StageProfile,
    Status,
    Verdict,
    cycles_per_score,
    flat,
    power_w,
)
from flashlab.record.store import runs as recorded_runs
from flashlab.run.emulator import Actor, Counter, Place, Report

Cell = str | int | float | None

_STATUS_WORDS: Mapping[Status, str] = {
    "ok": "ok",
    "wrong": "wrong result",
    "unsupported": "not for this problem",
    "missing": "not installed",
    "crashed": "crashed",
    "timeout": "timed out",
    "error": "error",
}


_HELD_BACK: Mapping[str, str] = {
    "sw_power_cap": "power limit",
    "hw_power_brake": "power brake",
    "sw_thermal": "temperature",
    "hw_thermal": "temperature",
    "hw_slowdown": "hardware slowdown",
}
"""NVML's reasons for holding a clock back, for people; others keep NVML's name."""
NO_REPORT = "*There is nothing to say of its accesses: it did not run.*"
_LONG = 48
"""Characters from which a cell is prose: on a phone it keeps a width to read it at."""


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: `digits` significant ones, never in powers of ten, thousands apart; a dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 99.97 has three significant digits as 100
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{min(decimals, 6)}f}"


def held_back(reasons: Iterable[str]) -> str:
    """NVML's reasons for a lower clock, for people; `nothing` where there was none."""
    return ", ".join(_HELD_BACK.get(why, why) for why in reasons) or "nothing"


def tiny(value: float | None) -> str:
    """An error for people, in powers of ten; a dash for None."""
    return "–" if value is None else f"{value:.2e}"


def peer_title(name: str) -> str:
    """A peer's name for people; the name itself where the registry no longer has it."""
    peer = peers.PEERS.get(name)
    return peer.title if peer else name


def title(row: Measurement) -> str:
    """A row's name for people."""
    return f"`{row.name}`" if row.kind == "stage" else peer_title(row.name)


def beside_title(row: Measurement) -> str:
    """The name of a library that is shown in another element type than the rows around it."""
    return f"{peer_title(row.name)} ({row.problem.dtype})"


def lacks(name: str, dtype: str) -> str:
    """Why a library has no time in an element type, for people."""
    peer = peers.PEERS.get(name)
    return f"the wheel ({peer.wheel}) lacks {dtype}" if peer and peer.wheel else f"it does not take {dtype}"


def beside_note(
    rows: Sequence[Measurement], beside: Iterable[Measurement], regime: Regime = "burst", cache: Cache = "hot"
) -> str:
    """What must be said where `rows` and those of `Results.beside` stand together; empty where there are none."""
    late = {row.name for row in select.elsewhere(rows, regime, cache)}
    own = [row for row in rows if row.kind == "peer" and row.name not in late]
    best = max((select.rate(row, regime, cache) or 0.0 for row in own), default=0.0)
    said = []
    for row in beside:
        rate = select.rate(row, regime, cache)
        if rate is None:
            continue
        dtype = rows[0].problem.dtype
        verdict = f"faster than any in {dtype} there" if rate > best else f"no faster than the best in {dtype} there"
        said.append(
            f"{peer_title(row.name)} stands here in {row.problem.dtype}, at the same shape in the same session: "
            f"{lacks(row.name, dtype)}. Its {number(rate)} TFLOP/s are {verdict}. Percentages keep to one element type."
        )
    return " ".join(said)


def elsewhere_note(rows: Sequence[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """What must be said where libraries of a later session stand among `rows`; empty where there are none."""
    late = [peer_title(row.name) for row in select.elsewhere(rows, regime, cache)]
    return f"Of a later session than the stages, perhaps on another GPU: {', '.join(late)}." if late else ""


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    shown = html.unescape(re.sub(r"<[^>]+>", "", text))
    return f'<span class="prose">{text}</span>' if len(shown) >= _LONG and not text.startswith("[") else text


def markdown(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, the others right."""
    lines = [
        "| " + " | ".join(title.replace("|", "\\|") for title in header) + " |",
        "|" + "|".join(":--" if i < left else "--:" for i in range(len(header))) + "|",
    ]
    for row in rows:
        cells = [number(c) if isinstance(c, float) else "–" if c is None else str(c) for c in row]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def rates(
    rows: Sequence[Measurement],
    *,
    beside: Sequence[Measurement] = (),
    regime: Regime = "burst",
    cache: Cache = "hot",
) -> str:
    """Every row of one problem: rate, time, spread, gain over its parent, share of the fastest library; or why not.

    Args:
        beside: as `Results.beside` gives them; they have no share.
    """
    by_name = {row.name: row for row in rows}
    peer = select.fastest_peer(rows, regime, cache)
    best = select.rate(peer, regime, cache) if peer else None
    lines: list[list[Cell]] = []
    for row in select.with_beside(rows, beside):
        facts = flat(row, regime, cache)
        other = row in beside
        rate = select.rate(row, regime, cache)
        if rate is None:
            why = _STATUS_WORDS[row.status] if row.status != "ok" else "not taken"
            lines.append([title(row), why, None, None, None, None, None])
            continue
        stage = registry.RUNGS.get(row.name)
        parent = select.rate(by_name[stage.parent], regime, cache) if stage and stage.parent in by_name else None
        samples = row.samples_of(regime, cache)
        lines.append(
            [
                beside_title(row) if other else title(row),
                rate,
                samples.median_us if samples else None,
                samples.cv_percent if samples else None,
                facts["samples"] if isinstance(facts["samples"], int) else None,
                number(rate / parent) if parent else None,
                f"{number(100 * rate / best)} %" if best and not other else None,
            ]
        )
    header = ("", "TFLOP/s", "median, µs", "std dev, %", "samples", "× parent", "of best library")
    notes = (beside_note(rows, beside, regime, cache), elsewhere_note(rows, regime, cache))
    return markdown(header, lines) + "".join(f"\n*{note}*\n" for note in notes if note)


def dead_ends(rows: Sequence[Measurement], shown: Iterable[str]) -> str:
    """Rows of one problem, those named `shown` in bold: time, rate, rate over the dead end's parent, error; or why not.

    `rows` as `results.dead_ends` gives them.
    """
    by_name = {row.name: row for row in rows}
    peer = select.fastest_peer(rows)
    best = select.rate(peer) if peer else None
    lines: list[list[Cell]] = []
    for row in rows:
        name = f"**{title(row)}**" if row.name in shown else title(row)
        error = tiny(row.verdict.max_abs_error) if row.verdict else None
        rate = select.rate(row)
        if rate is None:
            lines.append([name, _STATUS_WORDS[row.status], None, None, None, error])
            continue
        dead_end = registry.DEAD_ENDS.get(row.name.partition("[")[0])
        parent = by_name.get(dead_end.parent) if dead_end and dead_end.parent else None
        base = select.rate(parent) if parent else None
        samples = row.samples_of()
        lines.append(
            [
                name,
                samples.median_us if samples else None,
                rate,
                number(rate / base) if base else None,
                f"{number(100 * rate / best)} %" if best else None,
                error,
            ]
        )
    return markdown(("", "median, µs", "TFLOP/s", "× parent", "of best library", "largest error"), lines)


def branches(found: Mapping[str, Sequence[Instruction]]) -> str:
    """Jumps and accesses to shared and local memory in machine code, by a kernel's name."""
    lines: list[list[Cell]] = []
    for name, instructions in found.items():
        jumps = sass.branches(instructions)
        local = sum(sass.classify(one) == "local" for one in instructions)
        lines.append(
            [
                f"`{name}`",
                jumps.predicated,
                jumps.predicated_exits,
                jumps.in_subroutines,
                sass.shared_memory(instructions),
                local,
            ]
        )
    header = (
        "",
        "branches under a condition",
        "exits under one",
        "in subroutines",
        "on shared memory",
        "on local memory",
    )
    return markdown(header, lines)


def states(rows: Sequence[Measurement]) -> str:
    """Rates in each regime and cache state that one of the rows was measured in, and what held the clock back."""
    lines: list[list[Cell]] = []
    for row in rows:
        if row.status != "ok":
            continue
        sustained = row.samples_of("sustained", "hot")
        conditions = sustained.conditions if sustained else None
        lines.append(
            [
                title(row),
                *(select.rate(row, *state) for state in select.STATES),
                held_back(conditions.throttle_reasons) if conditions else None,
            ]
        )
    header = (
        "",
        "burst, hot L2, TFLOP/s",
        "burst, cold L2, TFLOP/s",
        "sustained, TFLOP/s",
        "sustained: clock held back by",
    )
    kept = [column for column in range(len(header)) if any(line[column] is not None for line in lines) or not column]
    return markdown([header[column] for column in kept], [[line[column] for column in kept] for line in lines])


def costs(rows: Sequence[Measurement], *, titled: bool = False) -> str:
    """What a call costs whatever the clock is: cycles a score, power and energy, burst and sustained; and clocks.

    `titled` puts the problem above it, for a page with several.
    """
    lines: list[list[Cell]] = []
    for row in rows:
        if row.status != "ok":
            continue
        burst, sustained = row.samples_of("burst", "hot"), row.samples_of("sustained", "hot")
        energy = sustained.conditions.energy_j_per_call if sustained and sustained.conditions else None
        power = power_w(sustained)
        lines.append(
            [
                title(row),
                *(_cycles(row, samples) for samples in (burst, sustained)),
                *(_clock(samples.call_clock_mhz if samples else ()) for samples in (burst, sustained)),
                _clock(burst.sm_clock_mhz if burst else ()),
                number(power) if power else None,
                energy * 1e3 if energy else None,
            ]
        )
    header = (
        "",
        "SM clocks a score, burst",
        "sustained",
        "MHz in the calls, burst",
        "sustained",
        "MHz after them, burst",
        "sustained: power, W",
        "mJ a call",
    )
    return (f"**{rows[0].problem.problem().label}**\n\n" if titled and rows else "") + markdown(header, lines)


def _cycles(row: Measurement, samples: Samples | None) -> str | None:
    cycles = cycles_per_score(samples, row.problem.problem(), row.gpu.sm_count) if samples else None
    return None if cycles is None else number(cycles)


def _clock(clocks_mhz: Sequence[float]) -> str | None:
    return number(median(clocks_mhz), 4) if clocks_mhz else None


def against(found: Iterable[select.AgainstPeers]) -> str:
    """Our best stage against the best library of the same element type, problem by problem."""
    lines: list[list[Cell]] = []
    for one in found:
        burst, sustained = one.burst, one.sustained
        best, alike, named, *under_load = map(_times, one.ratios)
        lines.append(
            [
                one.problem.label,
                _with_worst(best, burst),
                *(alike, named, _with_worst(under_load[0], sustained), *under_load[1:]),
                f"`{burst.stage}` {number(one.problem.tflops(burst.stage_us))}" if burst else one.reason,
                _percent(burst.stage_percent_of_peak if burst else None),
                f"{short_title(burst.peer)} {number(one.problem.tflops(burst.peer_us))}" if burst else None,
                _percent(burst.peer_percent_of_peak if burst else None),
            ]
        )
    alone = f"over {' and '.join('FA3' if name == 'fa3' else short_title(name) for name in select.NAMED_PEERS)}"
    header = (
        "problem",
        "burst, over the best library",
        "log-sum-exp alike",
        alone,
        "sustained, over the best library",
        "log-sum-exp alike",
        alone,
        "stage, TFLOP/s",
        "of peak",
        "library, TFLOP/s",
        "of peak",
    )
    return markdown(header, lines)


def against_inputs(found: Iterable[select.AgainstPeers], regime: Regime = "burst") -> str:
    """The ratios of the suite `peers` by kind of inputs, a row a kind: the worst first, `trained` beside `normal`.

    Below one, where the library is faster, a ratio is bold; that of the worst layer of `trained` stands beside it.

    Raises:
        NoDataError: none was measured on inputs that are not normal.
    """
    columns = {(problem.shape, problem.mask, problem.dtype): problem.label for problem in select.MAIN}
    contests: dict[str, dict[str, select.Contest]] = {}
    for one in found:
        column = columns.get((one.problem.shape, one.problem.mask, one.problem.dtype))
        contest = one.burst if regime == "burst" else one.sustained
        if contest and column:
            contests.setdefault(one.problem.inputs, {})[column] = contest
    if not contests.keys() - {NORMAL}:
        raise NoDataError(
            f"No {regime} ratios on inputs that are not normal are on record for this GPU yet: "
            f"`flashlab bench --suite inputs{' --sustained 5' if regime == 'sustained' else ''}` makes them."
        )
    words = [label.split() for label in columns.values()]
    common = [word for word in words[0] if all(word in others for others in words)]
    header = (
        f"{' '.join(common)}, {regime}",
        *(" ".join(word for word in label if word not in common) for label in words),
    )
    lines = []
    worst = {kind: min(_worst(one) for one in of_kind.values()) for kind, of_kind in contests.items()}
    for kind in _worst_first(worst):
        cells: list[Cell] = []
        for contest in map(contests[kind].get, columns.values()):
            said = _with_worst(_times(contest.ratio), contest) if contest else None
            cells.append(f"**{said}**" if contest and _worst(contest) < 1 else said)
        lines.append([f"`{kind}`", *cells])
    return markdown(header, lines)


def _worst(contest: select.Contest) -> float:
    return min(contest.ratio, contest.worst_ratio or contest.ratio)


def _with_worst(ratio: str | None, contest: select.Contest | None) -> str | None:
    """A ratio, with that of the worst layer where the inputs have layers."""
    if contest is None or contest.worst_ratio is None:
        return ratio
    return f"{ratio}, {_times(contest.worst_ratio)} on layer {contest.worst_layer}"


def _worst_first(worst: Mapping[str, float]) -> list[str]:
    """Kinds of inputs by their worst ratio, the two that are people's own side by side where the worse of them is."""
    pair = {kind for kind in (NORMAL, TRAINED) if kind in worst}
    together = min(worst[kind] for kind in pair) if pair else 0.0
    return sorted(worst, key=lambda kind: (together if kind in pair else worst[kind], kind in pair, worst[kind]))


def accuracy(found: Iterable[select.Accuracy]) -> str:
    """Errors by implementation and kind of inputs, over FlashAttention-3's, or -4's where the wheel lacks the type.

    For each element type how many times the reference's error it is at the worst of head dims and masks, the kind first
    where a stage is worst; then every error, problem by problem.

    Raises:
        NoDataError: there are none on inputs that are not normal.
    """
    by_dtype: dict[str, dict[str, list[select.Accuracy]]] = {}
    for one in found:
        by_dtype.setdefault(one.problem.dtype, {}).setdefault(one.problem.inputs, []).append(one)
    parts = [_accuracy_of(dtype, kinds) for dtype, kinds in by_dtype.items() if kinds.keys() != {NORMAL}]
    if not parts:
        raise NoDataError(
            "No errors by kind of inputs are on record for this GPU yet: `flashlab bench --suite inputs` makes them."
        )
    return "\n".join(parts)


def _accuracy_of(dtype: str, kinds: Mapping[str, Sequence[select.Accuracy]]) -> str:
    """The table of one element type, and below it every error."""
    # What was checked on one kind alone is not to be compared over kinds.
    counts = Tally(name for same in kinds.values() for name in dict.fromkeys(n for one in same for n in one.errors))
    names = [name for name, count in counts.items() if count > 1 or len(kinds) == 1]
    titles = [f"`{name}`" if name in registry.STAGES else short_title(name) for name in names]

    def worst(kind: str, name: str) -> tuple[float, ...]:
        """Both errors over the reference's; empty where it was not checked."""
        pairs = [one.over_reference(name) for one in kinds[kind] if name in one.errors]
        return tuple(map(max, zip(*pairs, strict=True)))

    def height(kind: str) -> float:
        return max((times for name in names if name in registry.STAGES for times in worst(kind, name)), default=0.0)

    order = sorted(kinds, key=height, reverse=True)
    over = dict.fromkeys(short_title(one.reference) for same in kinds.values() for one in same)
    table = markdown(
        (f"{dtype}: error over that of {' or '.join(over)}, RMS · largest", *titles),
        [[f"`{kind}`", *(" · ".join(map(_multiple, worst(kind, name))) or None for name in names)] for kind in order],
    )
    every: list[list[Cell]] = []
    for kind in order:
        for one in kinds[kind]:
            where = f"D{one.problem.head_dim} {one.problem.mask}"
            for name, shown in zip(names, titles, strict=True):
                if name in one.errors:
                    (rms, largest), (rms_over, largest_over) = (
                        one.errors[name],
                        map(_multiple, one.over_reference(name)),
                    )
                    every.append([f"`{kind}`", where, shown, tiny(rms), rms_over, tiny(largest), largest_over])
    header = ("inputs", "problem", "", "RMS error", "over its", "largest error", "over its")
    lines = markdown(header, every, left=3).splitlines()
    return f'{table}\n??? abstract "{dtype}: every error"\n\n' + "".join(f"    {line}\n" for line in lines)


def _multiple(times: float) -> str:
    return "∞" if math.isinf(times) else f"×{number(times)}"


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"×{number(ratio)}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{number(value)} %"


def short_title(peer: str) -> str:
    """A library's name without what stands in brackets."""
    return peer_title(peer).split(" (")[0]


def lengths(
    shown: Results,
    *,
    head_dim: int,
    mask: str,
    dtype: str = "float16",
    regime: Regime = "burst",
    stage_ids: Sequence[str] | None = None,
) -> str:
    """TFLOP/s at each sequence length, and as a percentage of the measured peak of the tensor cores where it is known.

    Libraries that lack the element type stand in their own (`Results.beside`).

    Raises:
        NoDataError: fewer than two lengths were measured.
    """
    problems = select.of_lengths(shown, head_dim=head_dim, mask=mask, dtype=dtype, regime=regime)
    peak = shown.ceilings.get(f"tensor_{dtype}")
    cells: dict[str, dict[int, str]] = {}
    names: dict[str, None] = {}
    for problem in problems:
        rows = shown.rows(problem, stage_ids=stage_ids)
        for row in (*rows, *shown.beside(problem)):
            other = row.problem.dtype != dtype
            name = beside_title(row) if other else title(row)
            rate = select.rate(row, regime)
            if rate:
                names.setdefault(name)
                share = f" ({number(100 * rate / peak.value, 2)} %)" if peak and not other else ""
                cells.setdefault(name, {})[problem.q_len] = f"{number(rate)}{share}"
    counts = [problem.q_len for problem in problems]
    return markdown(
        (f"D{head_dim}, {mask}, {dtype}, {regime}: TFLOP/s", *(f"S{count}" for count in counts)),
        [(name, *(cells[name].get(count) for count in counts)) for name in _stages_first(names)],
    )


def _stages_first(names: Iterable[str]) -> list[str]:
    listed = list(names)
    ladder = [f"`{stage_id}`" for stage_id in registry.RUNGS]
    return [name for name in ladder if name in listed] + [name for name in listed if name not in ladder]


_WARP_STATES: Mapping[str, str] = {
    "selected": "issued",
    "not_selected": "ready, another warp issued",
    "wait": "fixed wait",
    "gmma": "wgmma",
    "barrier": "barrier or end of wgmma",
    "math_pipe_throttle": "unit busy",
    "short_scoreboard": "shared memory or exponentials",
    "long_scoreboard": "global memory or mbarrier",
    "mio_throttle": "shared-memory queue",
    "lg_throttle": "global-memory queue",
    "no_instruction": "instruction cache",
    "imc_miss": "constant cache",
    "branch_resolving": "branch",
    "dispatch_stall": "dispatch",
    "membar": "memory barrier",
    "sleeping": "sleep",
    "drain": "stores at the end",
    "tex_throttle": "texture queue",
}
"""Nsight Compute's warp states, for people; others keep its name.

On Hopper a warp that waits at an mbarrier counts as one that waits for global memory, and one that waits for its
products to be done as one at a barrier: the samples of lines that do nothing else say so.
"""


def profiles(found: Iterable[StageProfile]) -> str:
    """How busy units and issue slots were in one launch of each stage, and what its warps spent their time on."""

    lines: list[list[Cell]] = [
        [
            f"`{one.stage}`",
            ", ".join(
                f"{_WARP_STATES.get(name, name)} {number(share, 2)} %" for name, share in list(one.states.items())[:3]
            )
            or None,
            _percent(one.tensor_percent),
            _percent(one.exp_percent),
            _percent(one.fma_percent),
            _percent(one.alu_percent),
            _percent(one.issue_percent),
        ]
        for one in found
    ]
    header = (
        "",
        "where warps spent their time",
        "tensor pipe",
        "exponential unit",
        "FP32",
        "integer, max",
        "issue slots",
    )
    return markdown(header, lines, left=2)


_OCCUPANCY_LIMITS: Mapping[str, str] = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "threads",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}


def occupancy(found: Iterable[StageProfile]) -> str:
    """Warps that could reside and did, and how threads went to memory, in one launch of each stage.

    Shared memory is named only where nothing else holds back as much: the driver takes from the L1 cache what the
    blocks need that fit otherwise, so that its limit equals the lowest other one in nearly every launch.
    """

    def limit(one: StageProfile) -> str | None:
        blocks = {words: one.metrics[name] for name, words in _OCCUPANCY_LIMITS.items() if name in one.metrics}
        lowest = [words for words, value in blocks.items() if value == min(blocks.values())]
        return ", ".join([words for words in lowest if words != "shared memory"] or lowest) or None

    return markdown(
        (
            "",
            "held back by",
            "registers a thread",
            "occupancy, theoretical",
            "achieved",
            "wavefronts of shared memory, 10⁶",
            "bank conflicts",
            "sectors a load",
        ),
        [
            (
                f"`{one.stage}`",
                limit(one),
                one.metrics.get("launch__registers_per_thread"),
                _percent(one.warps_percent_limit),
                _percent(one.warps_percent),
                None if one.shared_wavefronts is None else one.shared_wavefronts / 1e6,
                _percent(one.conflict_percent),
                one.load_sectors,
            )
            for one in found
        ],
        left=2,
    )


def traffic(found: Iterable[StageProfile]) -> str:
    """Bytes that crossed device memory and L2 in one launch of each stage, beside what was counted from its tiles."""

    def cells(counted: float, measured: float | None) -> list[Cell]:
        ratio = None if measured is None else f"×{number(measured / counted)}"
        return [counted / 1e6, None if measured is None else measured / 1e6, ratio]

    lines: list[list[Cell]] = []
    for one in found:
        problem = one.problem.problem()
        in_l2 = roofline.l2_bytes(problem, one.tile_q)
        lines.append(
            [
                f"`{one.stage}`",
                *cells(float(problem.compulsory_bytes), one.dram_bytes),
                *cells(in_l2, one.l2_bytes),
            ]
        )
    header = ("", "DRAM counted, MB", "measured", "ratio", "L2 counted, MB", "measured", "ratio")
    return markdown(header, lines)


def hot_lines(found: Iterable[StageProfile], *, lines: int = 5, pages: str | None = None) -> str:
    """The source lines at which the warps of each stage were sampled most often, and in which states.

    Args:
        found: one launch of each stage.
        lines: how many of each.
        pages: folder of the stages' pages, to link them; None for no links.

    Raises:
        NoDataError: samples of none were traced to lines.
    """
    rows: list[list[Cell]] = []
    for one in found:
        total = sum(one.samples.values())
        for position, line in enumerate(one.lines[:lines]):
            name = f"`{one.stage}`" if pages is None else f"[`{one.stage}`]({pages}{one.stage}.md)"
            states = ", ".join(
                f"{_WARP_STATES.get(state, state)} {number(100 * count / line.total, 2)} %"
                for state, count in list(line.samples.items())[:3]
            )
            where = f'<code class="place">{html.escape(line.file)}:{line.line}</code>'
            rows.append(
                [
                    "" if position else name,
                    f"{where}<br>{_code(line.text)}",
                    states,
                    f"{number(100 * line.total / total, 2)} %",
                ]
            )
    if not rows:
        raise NoDataError("wanted profiles whose samples were traced to source lines, found none")
    return markdown(
        ("", "line", "where its warps were", "of all samples"),
        rows,
        left=3,
    )


def untimed(rows: Iterable[Measurement]) -> str:
    """Rows without a time and why; empty where every row has one."""
    found: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.status != "ok":
            key = (title(row), _STATUS_WORDS[row.status], row.reason)
            found[key] = found.get(key, 0) + 1
    if not found:
        return ""
    return markdown(("", "status", "reason", "problems"), [(*key, count) for key, count in found.items()], left=3)


def resources(cubins: Mapping[str, CubinFields | None]) -> str:
    """What each kernel takes of an SM, from the machine code that was launched."""
    return markdown(
        (
            "",
            "registers a thread",
            "spilled bytes, stored / loaded",
            "threads a block",
            "shared memory a block, B",
            "blocks an SM",
        ),
        [
            (
                f"`{label}`",
                cubin.registers,
                f"{cubin.spill_store_bytes} / {cubin.spill_load_bytes}",
                cubin.threads,
                f"{cubin.dynamic_smem_bytes + cubin.static_smem_bytes:,}",
                cubin.blocks_per_sm,
            )
            for label, cubin in cubins.items()
            if cubin
        ],
    )


def launched(rows: Iterable[Measurement]) -> str:
    """Resources of the kernels behind the recorded times."""
    return resources({row.name: row.cubin for row in rows if row.kind == "stage"})


def verdicts(rows: Iterable[Measurement]) -> str:
    """What the checker said of each row."""
    lines: list[list[Cell]] = []
    for row in rows:
        verdict = row.verdict
        if verdict is None:
            lines.append([title(row), _STATUS_WORDS[row.status], None, None, None, None, None])
            continue
        lines.append(
            [
                title(row),
                "passed" if verdict.passed else f"rejected: {verdict.reason}",
                tiny(verdict.max_abs_error),
                tiny(verdict.max_abs_limit),
                tiny(verdict.rms_error),
                tiny(verdict.rms_limit),
                tiny(verdict.lse_error),
            ]
        )
    return markdown(("", "verdict", "largest error", "limit", "RMS error", "limit", "log-sum-exp error"), lines, left=2)


def inputs() -> str:
    """The kinds of inputs, and what each does to scores."""
    return markdown(("kind", "Q, K and V"), [(f"`{kind.name}`", kind.title) for kind in KINDS.values()], left=2)


def machine(shown: Results) -> str:
    """The GPU that was measured, and its host.

    Raises:
        NoDataError: machine.json is missing or damaged.
    """
    if shown.machine is None:
        raise NoDataError(f"wanted data/{shown.gpu}/machine.json, found none that can be read")
    gpu = shown.machine.gpu
    facts: dict[str, Cell] = {
        "GPU": gpu.name,
        "Compute capability": ".".join(map(str, gpu.compute_capability)),
        "SMs": gpu.sm_count,
        "Highest SM clock": f"{number(gpu.max_sm_clock_mhz, 4)} MHz",
        "Memory": f"{number(gpu.memory_bytes / 2**30)} GiB",
        "L2 cache": f"{number(gpu.l2_bytes / 2**20)} MiB",
        "Power limit": f"{number(gpu.power_limit_w)} W",
        "Driver": gpu.driver,
        "Fingerprint of this one": f"`{gpu.fingerprint}`",
    }
    facts.update(
        {
            f"Host {name.removesuffix('_gib').replace('_', ' ')}": f"{value} GiB" if name.endswith("_gib") else value
            for name, value in shown.machine.host.items()
        }
    )
    return markdown(("measured on", ""), facts.items(), left=2)


def chips(shown: Results, data: Path = DATA) -> str:
    """Every GPU that runs were made on: fingerprint, dates, runs, rows, and what is shown of them.

    Raises:
        NoDataError: there are no runs.
    """
    found: dict[str, list[Measurement | Ceiling]] = {}
    for run in recorded_runs(shown.gpu, data):
        for row in run.records:
            found.setdefault(row.gpu.fingerprint, []).append(row)
    problems = {problem: {row.gpu.fingerprint for row in rows} for problem, rows in shown.problems.items()}

    def told(fingerprint: str) -> str | None:
        mine = [problem for problem, theirs in problems.items() if fingerprint in theirs]
        if not mine:
            return None
        parts = [f"**the ladder**, {shown.first.label}"] if shown.first is not None and shown.first in mine else []
        if others := len(mine) - len(parts):
            parts.append(f"{others} {'other ' if parts else ''}problem{'' if others == 1 else 's'}")
        return " and ".join(parts)

    lines: list[tuple[Cell, ...]] = []
    for fingerprint, rows in sorted(found.items(), key=lambda item: item[1][0].run):
        runs = sorted({row.run for row in rows})
        dates = dict.fromkeys((select.date(runs[0]), select.date(runs[-1])))
        lines.append((f"`{fingerprint}`", " to ".join(dates), told(fingerprint), len(runs), len(rows)))
    return markdown(("GPU", "date", "shown on these pages", "runs", "rows"), lines, left=3)


def software(shown: Results) -> str:
    """Software versions of the newest run that is shown."""
    rows = [row for rows in shown.problems.values() for row in rows] + list(shown.ceilings.values())
    newest = max(rows, key=lambda row: row.run)
    return markdown(("package", "version"), sorted(newest.software.items()), left=2)


def compiled(cubins: Sequence[Cubin | CompileError], labels: Sequence[tuple[str, str]]) -> str:
    """Registers a thread of each kernel on each architecture, and what spills.

    Args:
        labels: (stage id, architecture) of each of `cubins`.
    """
    archs = list(dict.fromkeys(arch for _, arch in labels))
    names = list(dict.fromkeys(name for name, _ in labels))
    cells: dict[tuple[str, str], str] = {}
    for label, cubin in zip(labels, cubins, strict=True):
        if isinstance(cubin, CompileError):
            cells[label] = "refused"
            continue
        spilled = cubin.resources.spill_store_bytes + cubin.resources.spill_load_bytes
        cells[label] = f"{cubin.resources.registers}{f' + {spilled} B spilled' if spilled else ''}"
    return markdown(
        ("registers a thread", *archs), [(f"`{n}`", *(cells.get((n, arch)) for arch in archs)) for n in names]
    )


def mixes(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Instructions of each class in each kernel; classes that no kernel has are left out."""
    kinds = [kind for kind in sass.CLASSES if any(mix.get(kind) for mix in counts.values())]
    return markdown(
        ("class", *(f"`{name}`" for name in counts)),
        [(k.replace("_", " "), *(m.get(k) for m in counts.values())) for k in kinds],
    )


def classes(groups: Mapping[str, Sequence[str]]) -> str:
    """What each class of instructions holds, and the group that charts show it in."""
    of = {kind: group for group, kinds in groups.items() for kind in kinds}
    return markdown(
        ("class", "in charts", "what it holds"),
        [(k.replace("_", " "), of.get(k, "–"), meaning) for k, meaning in sass.CLASSES.items()],
        left=3,
    )


def placement(shown: Results) -> str:
    """Where each full problem stands under the roof that bounds it: the tensor cores or, said so, device memory.

    Raises:
        NoDataError: no bandwidth or no tensor-core ceiling was measured.
    """
    copy, first = shown.ceilings.get("copy"), shown.first
    tensor = shown.ceilings.get(f"tensor_{first.dtype}") if first else None
    if copy is None or tensor is None or first is None:
        raise NoDataError(
            f"wanted the ceilings copy and tensor of {shown.gpu}, found {', '.join(shown.ceilings) or 'none'}. "
            "`flashlab bench --ceilings` makes them"
        )
    lines: list[list[Cell]] = []
    for problem, rows in shown.problems.items():
        if problem.dtype != first.dtype or problem.mask != "full":
            continue
        place = roofline.place(problem, compute_tflops=tensor.value, bandwidth_tb_s=copy.value)
        roof = place.attainable_tflops
        bound = "" if place.bound == "compute" else " (memory)"
        line: list[Cell] = [problem.sizes, place.intensity, f"{number(roof)}{bound}"]
        for row in (select.fastest_stage(rows), select.fastest_peer(rows)):
            rate = select.rate(row) if row else None
            name = title(row).split(" (")[0] if row else None
            line += [name, rate, f"{number(100 * rate / roof)} %"] if rate else [None, None, None]
        lines.append(line)
    return markdown(
        (
            f"{first.dtype}, full",
            "operations a byte",
            "roof, TFLOP/s",
            "fastest stage",
            "TFLOP/s",
            "of roof",
            "fastest library",
            "TFLOP/s",
            "of roof",
        ),
        lines,
    )


def check_record(lines: Sequence[Mapping[str, Any]]) -> str:
    """What a comparison on record holds, as a sentence."""
    count = len(lines)
    stage_count = len({line["stage"] for line in lines})
    problems = len({str(line["problem"]) for line in lines})
    layouts = sorted({str(line["layout"]) for line in lines})
    drawn = any("/" in layout for layout in layouts)
    through = f"{len(layouts)} random layouts" if drawn else f"the layouts {', '.join(layouts)}"
    passed = sum(line["status"] == "ok" for line in lines)
    apart = sum(line["status"] == "unsupported" for line in lines)
    return (
        f"{lines[0]['gpu']['name']}, {lines[0]['time'][:10]}: {count:,} comparisons of {stage_count} stages, over "
        f"{problems:,} problems in {through}. {passed:,} passed, "
        f"{count - passed - apart:,} failed, {apart:,} were not for the stage."
    )


def sanitized(found: Sequence[Sanitized]) -> str:
    """What each of compute-sanitizer's tools found in each stage: a sentence, and a table of errors in launches."""
    first = found[0]
    tools = list(dict.fromkeys(record.tool for record in found))
    by_stage: dict[str, dict[str, Sanitized]] = {}
    for record in found:
        by_stage.setdefault(record.stage, {})[record.tool] = record

    def cell(record: Sanitized | None) -> str:
        if record is None:
            return "–"
        if not record.finished:
            return "not finished"
        elsewhere = f", {record.elsewhere} elsewhere" if record.elsewhere else ""
        return f"{record.errors} in {record.launches}{elsewhere}"

    lines = [(f"`{stage}`", *(cell(of_tool.get(tool)) for tool in tools)) for stage, of_tool in by_stage.items()]
    clean = "Nothing was found." if all(record.clean for record in found) else "Something was found."
    return (
        f"{first.gpu.name}, {first.time[:10]}, {first.version}. {clean} Errors, in so many launches:\n\n"
        f"{markdown(('stage', *tools), lines)}"
    )


def excerpt(instructions: Sequence[Instruction], opcode: str, *, lines: int = 16) -> str:
    """Machine code from the densest stretch of instructions whose opcode starts with `opcode`, as a code block."""
    starts = range(max(1, len(instructions) - lines + 1))
    best = max(starts, key=lambda i: sum(x.opcode.startswith(opcode) for x in instructions[i : i + lines]))
    text = "\n".join(f"{x.address:06x}  {x.text}" for x in instructions[best : best + lines])
    return f"```text\n{text}\n```\n"


def judged(verdicts: Mapping[str, Verdict]) -> str:
    """What the checker says of outputs at hand."""
    return markdown(
        ("output", "verdict", "why", "largest error", "limit"),
        [
            (name, "passed" if v.passed else "rejected", v.reason or "–", tiny(v.max_abs_error), tiny(v.max_abs_limit))
            for name, v in verdicts.items()
        ],
        left=3,
    )


def checks(lines: Iterable[Mapping[str, Any]]) -> str:
    """Comparisons over hostile lengths and layouts, summed up a stage."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_stage.setdefault(str(line["stage"]), []).append(line)
    return markdown(
        ("", "comparisons", "passed", "not for this stage", "failed", "first failure"),
        [
            (
                f"`{stage}`",
                len(found),
                sum(line["status"] == "ok" for line in found),
                sum(line["status"] == "unsupported" for line in found),
                len(failed := [line for line in found if line["status"] not in ("ok", "unsupported")]),
                str(failed[0]["reason"]) if failed else None,
            )
            for stage, found in by_stage.items()
        ],
    )


def emulated(rows: Iterable[CheckRow], seconds: Mapping[str, float]) -> str:
    """Runs on the CPU, summed up a stage.

    Args:
        seconds: how long each stage's runs took, by its id.
    """
    by_stage: dict[str, list[CheckRow]] = {}
    for row in rows:
        by_stage.setdefault(row.stage, []).append(row)
    table = markdown(
        ("", "schedules", "runs", "passed", "findings", "seconds"),
        [
            (
                f"`{stage}`",
                ", ".join(dict.fromkeys(row.schedule for row in found)),
                len(found),
                sum(row.status == "ok" for row in found),
                sum(len(row.findings) for row in found),
                seconds.get(stage),
            )
            for stage, found in by_stage.items()
        ],
        left=2,
    )
    failed = [
        (f"`{row.stage}`", row.problem.label, row.schedule, row.reason)
        for found in by_stage.values()
        for row in found
        if row.status not in ("ok", "unsupported")
    ]
    if failed:
        table += "\n" + markdown(("what failed", "problem", "schedule", "why"), failed, left=4)
    return table


def agreement(lines: Iterable[Mapping[str, Any]]) -> str:
    """Chip and emulator on the same inputs (`results.emulated_checks`), summed up a stage."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_stage.setdefault(str(line["stage"]), []).append(line)
    table: list[list[Cell]] = []
    for stage, found in by_stage.items():
        said = [line["emulator"] for line in found]
        apart = [pair["agreement"] for pair in said if pair["agreement"] is not None]
        shares = [
            verdict["max_abs_error"] / verdict["max_abs_limit"]
            for verdict in apart
            if verdict["max_abs_error"] is not None and verdict["max_abs_limit"]
        ]
        table.append(
            [
                f"`{stage}`",
                len(found),
                sum(line["status"] == "ok" for line in found),
                sum(pair["verdict"] is not None and pair["verdict"]["passed"] for pair in said),
                sum(verdict["passed"] for verdict in apart),
                f"{number(100 * max(shares))} %" if shares else None,
            ]
        )
    header = ("", "inputs", "chip passed", "emulator passed", "agree", "largest difference, of its limit")
    failed = [
        (f"`{stage}`", line["emulator"]["shape"], line["emulator"]["reason"])
        for stage, found in by_stage.items()
        for line in found
        if line["emulator"]["status"] != "ok"
    ]
    return markdown(header, table) + (
        "\n" + markdown(("what failed", "shape", "why"), failed, left=3) if failed else ""
    )


@dataclass(frozen=True, kw_only=True)
class _Metrics:
    """What the emulator counts of one kind of access, and Nsight Compute's names for it."""

    space: str
    access: str
    kind: str
    passes: Literal["sectors", "wavefronts"]
    requests_metric: str
    passes_metric: str


_METRICS: Mapping[str, _Metrics] = {
    "global loads": _Metrics(
        space="global",
        access="read",
        kind="plain",
        passes="sectors",
        requests_metric="smsp__sass_inst_executed_op_global_ld",
        passes_metric="smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld",
    ),
    "global stores": _Metrics(
        space="global",
        access="write",
        kind="plain",
        passes="sectors",
        requests_metric="smsp__sass_inst_executed_op_global_st",
        passes_metric="smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st",
    ),
    "cp.async": _Metrics(
        space="global",
        access="read",
        kind="async copy",
        passes="sectors",
        requests_metric="smsp__sass_inst_executed_op_ldgsts",
        passes_metric="smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts",
    ),
    "shared loads": _Metrics(
        space="shared",
        access="read",
        kind="plain",
        passes="wavefronts",
        requests_metric="smsp__sass_inst_executed_op_shared_ld",
        passes_metric="smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld",
    ),
    "ldmatrix": _Metrics(
        space="shared",
        access="read",
        kind="matrix",
        passes="wavefronts",
        requests_metric="smsp__sass_inst_executed_op_ldsm",
        passes_metric="smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm",
    ),
    "shared stores": _Metrics(
        space="shared",
        access="write",
        kind="plain",
        passes="wavefronts",
        requests_metric="smsp__sass_inst_executed_op_shared_st",
        passes_metric="smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st",
    ),
}
"""Nsight Compute counts these by patched instructions; what the hardware's own counters add is arbitration."""


def counted(report: Report, line: StageCounters) -> dict[str, tuple[int, int, int, int]]:
    """For each kind of access: the emulator's requests and Nsight Compute's, the emulator's passes and the other's.

    Kinds that neither saw, or that this version of Nsight Compute has no metric for, are left out.
    """
    found: dict[str, tuple[int, int, int, int]] = {}
    for what, metrics in _METRICS.items():
        ours = [
            counter
            for counter in report.counters
            if (counter.space, counter.access, counter.kind) == (metrics.space, metrics.access, metrics.kind)
        ]
        requests, passes = (
            line.metrics.get(f"{name}.sum") for name in (metrics.requests_metric, metrics.passes_metric)
        )
        if requests is None or passes is None:
            continue
        mine = sum(counter.requests for counter in ours), sum(getattr(counter, metrics.passes) for counter in ours)
        if any((*mine, requests, passes)):
            found[what] = (mine[0], round(requests), mine[1], round(passes))
    return found


def _ratio(ours: int, theirs: int) -> str:
    if ours == theirs:
        return "equal"
    return f"×{number(ours / theirs)}" if theirs else "–"


def counters(compared: Mapping[str, Mapping[str, tuple[int, int, int, int]]]) -> str:
    """The emulator's counters beside Nsight Compute's.

    Args:
        compared: by stage, as `counted` gives them.
    """
    table: list[list[Cell]] = []
    for stage, found in compared.items():
        for what, (requests, their_requests, passes, their_passes) in found.items():
            table.append(
                [
                    f"`{stage}`",
                    what.replace(" ", "\N{NO-BREAK SPACE}"),
                    f"{requests:,}",
                    f"{their_requests:,}",
                    _ratio(requests, their_requests),
                    _METRICS[what].passes,
                    f"{passes:,}",
                    f"{their_passes:,}",
                    _ratio(passes, their_passes),
                ]
            )
    header = (
        "",
        "access",
        "requests, emulator",
        "Nsight Compute",
        "ratio",
        "passes",
        "emulator",
        "Nsight Compute",
        "ratio",
    )
    return markdown(header, table, left=2)


def _code(text: str) -> str:
    """Source for a table's cell: a code span whose characters no Markdown reads as its own."""
    return f"<code>{''.join(c if c.isalnum() or c in ' .,:;=+-/()' else f'&#{ord(c)};' for c in text)}</code>"


def _line_of(place: Place) -> str:
    """File and line, short enough to keep in view: `05_wmma.cu:120`."""
    frame = place.frame
    return f'<code class="place">{html.escape(frame.file.name)}:{frame.line}</code>' if frame else "unknown"


def _source_of(place: Place) -> str:
    frame = place.frame
    return _code(frame.text) if frame and frame.text else ""


_ACCESSES: Mapping[str, str] = {
    "read": "reads",
    "write": "writes",
    "atomic": "updates",
    "async read": "has it read",
    "async write": "has it written",
}


def findings(report: Report | None) -> str:
    """What the detector found, with the source of both accesses; a sentence where it found nothing or did not run."""
    if report is None:
        return NO_REPORT
    if not report.findings:
        if report.status != "ok":
            return "*Up to where it stopped, the detector found nothing.*"
        return "*No race, no uninitialised read, no access out of bounds: the detector found nothing.*"
    table: list[list[Cell]] = []
    for finding in report.findings:
        where = ", ".join(filter(None, (f"{finding.space} memory", finding.array)))
        times = f", {finding.count:,} times" if finding.count > 1 else ""
        actors: list[Actor] = [actor for actor in (finding.first, finding.second) if actor]
        for position, actor in enumerate(actors):
            table.append(
                [
                    "" if position else f"**{finding.kind}**, {where}{times}",
                    f"thread\N{NO-BREAK SPACE}{actor.thread} {_ACCESSES.get(actor.access, actor.access)}",
                    f"{_line_of(actor.place)}<br>{_source_of(actor.place)}",
                ]
            )
        if not actors:
            table.append([f"**{finding.kind}**, {where}{times}", None, None])
    return markdown(("finding", "first seen", "at"), table, left=3)


@dataclass(kw_only=True)
class _Asked:
    """What one line of source asked of one memory."""

    place: Place
    passes: int = 0
    ideal: int = 0


_Line = tuple[str, str, int, str]


def _per_line(
    counters: Iterable[Counter], space: str, passes: Callable[[Counter], tuple[int, int]]
) -> dict[tuple[_Line, int], _Asked]:
    """By source text, access, kind and width, and how many such lines came before: what survives an edit elsewhere."""
    lines: dict[tuple[str, int, _Line], _Asked] = {}
    for counter in counters:
        frame = counter.place.frame
        if counter.space != space or frame is None:
            continue
        line = (counter.access, counter.kind, counter.bytes, frame.text)
        asked = lines.setdefault((frame.file.name, frame.line, line), _Asked(place=counter.place))
        took, ideal = passes(counter)
        asked.passes += took
        asked.ideal += ideal
    seen: Tally[_Line] = Tally()
    found: dict[tuple[_Line, int], _Asked] = {}
    # The kernel's own file first, then the headers.
    for (_, _, line), asked in sorted(lines.items(), key=lambda item: (item[0][0].endswith("h"), item[0])):
        found[line, seen[line]] = asked
        seen[line] += 1
    return found


def _asked_of(
    space: str,
    passes: Callable[[Counter], tuple[int, int]],
    name: str,
    reports: Mapping[str, Report | None],
) -> str:
    sides = {title: _per_line(report.counters, space, passes) for title, report in reports.items() if report}
    if not sides:
        return NO_REPORT
    keys = list(dict.fromkeys(key for side in sides.values() for key in side))
    if not keys:
        return f"*No line asks anything of {space} memory.*"
    table: list[list[Cell]] = []
    for key in keys:
        (access, kind, width, _), _ = key
        shown = next(side[key] for side in sides.values() if key in side)
        how = {"matrix": "matrix ", "async copy": "copy, "}.get(kind, "") + access
        cells: list[Cell] = [_line_of(shown.place), _source_of(shown.place), f"{how}, {width} B a lane"]
        cells += [part for side in sides.values() for part in _asked_cells([side[key]] if key in side else [])]
        table.append(cells)
    table.append(["in all", None, None, *(c for side in sides.values() for c in _asked_cells(list(side.values())))])
    header = ["line", "source", "access"]
    for title in sides:
        header += [f"{title}: {name}" if len(reports) > 1 else name, "over ideal"]
    return markdown(header, table, left=3)


def _asked_cells(asked: Sequence[_Asked]) -> tuple[Cell, Cell]:
    took, ideal = sum(one.passes for one in asked), sum(one.ideal for one in asked)
    return (f"{took:,}", f"×{number(took / ideal, 2)}") if ideal else (None, None)


def conflicts(reports: Mapping[str, Report | None]) -> str:
    """Shared memory's wavefronts, line by line, and how many times what they would be without bank conflicts.

    Args:
        reports: by name, runs to stand side by side; the same line of source is one row.
    """
    return _asked_of("shared", lambda counter: (counter.wavefronts, counter.ideal_wavefronts), "wavefronts", reports)


def sectors(reports: Mapping[str, Report | None]) -> str:
    """Global memory's 32-byte sectors, line by line, and how many times what side-by-side bytes would take.

    Args:
        reports: as for `conflicts`.
    """
    return _asked_of("global", lambda counter: (counter.sectors, counter.ideal_sectors), "sectors", reports)


def diff(before: Path, after: Path) -> str:
    """What turns one file into another, as a code block; a sentence where nothing does."""
    old, new = (path.read_text(encoding="utf-8").splitlines() for path in (before, after))
    lines = list(difflib.unified_diff(old, new, before.name, after.name, n=2, lineterm=""))
    if not lines:
        return "*The two files are the same: no line is changed.*"
    return "```diff\n" + "\n".join(lines) + "\n```\n"


def ceilings(shown: Results) -> str:
    """Measured limits of a GPU.

    Raises:
        NoDataError: none was measured.
    """
    if not shown.ceilings:
        raise NoDataError(
            f"wanted measured ceilings of {shown.gpu}, found none. `flashlab bench --ceilings` makes them"
        )
    return markdown(
        ("ceiling", "how", "value", "unit", "std dev, %"),
        [
            (f"`{c.name}`", c.how, c.value, c.unit.replace("us", "µs"), c.samples.cv_percent)
            for c in shown.ceilings.values()
        ],
        left=2,
    )


MEASUREMENT_COLUMNS: Mapping[str, str] = {
    "run": "id of the run: UTC start time and commit",
    "time": "when the row was recorded, UTC",
    "gpu": "product name of the GPU",
    "gpu_fingerprint": "first 12 hex digits of the sha256 of its UUID",
    "kind": "stage (a kernel of this lab) or peer (a library)",
    "name": "stage id or peer name",
    "layout": "dimensions of Q, K, V in memory: bhsd (heads before length) or bshd",
    "lse": "true where a log-sum-exp was written too, false where not; empty where that is not known",
    "shape": "BxHxSxD, or BxHxHkvxSqxSkxD where heads or lengths differ",
    "dtype": "element type of Q, K, V and O",
    "mask": "full or causal (bottom-right aligned)",
    "inputs": "what Q, K and V held: normal, or another kind that `flashlab bench --inputs` takes",
    "layer": "of trained inputs, the layer of the model; empty for other kinds",
    "status": "ok, wrong, unsupported, missing, crashed, timeout or error; only ok has times",
    "reason": "why there is no time; empty when ok",
    "regime": "burst (idle gaps, clock between calls at its maximum) or sustained (continuous, power-limited)",
    "cache": "hot (calls back to back) or cold (L2 overwritten before every call)",
    "samples": "number of samples",
    "calls": "calls between the two timing events of one sample",
    "median_us": "median time of one call, microseconds",
    "cv_percent": "standard deviation over mean, percent; std dev in the tables",
    "tflops": "rate at the median time; 4·B·H·Sq·Sk·D operations, half for a square causal mask",
    "sm_clock_mhz": "median SM clock right after the samples, without their load; empty where not recorded",
    "call_clock_mhz": "median of the mean SM clock over each sample's calls; empty where not recorded",
    "cycles_per_score": "clocks of one SM a score: SM clock over the calls, times SMs, times time, over scores",
    "power_w": "power under sustained load, W; empty for bursts",
    "energy_j_per_call": "joules a call from NVML's energy counter; empty for bursts",
    "max_abs_error": "absolute error against the float64 oracle, in the band of rows nearest its limit",
    "max_abs_limit": "the limit it was held to",
    "overall_max_error": "largest absolute error over all rows that were compared; empty in older records",
    "overall_rms_error": "root-mean-square error over all rows that were compared; empty in older records",
    "registers": "registers a thread, from the machine code; empty for peers",
    "dynamic_smem_bytes": "dynamic shared memory a block, bytes; empty for peers",
    "blocks_per_sm": "resident blocks an SM, from the driver; empty for peers",
    "cubin_sha256": "digest of the machine code that ran; empty for peers",
    "commit": "full hash of the code that made the row",
    "dirty": "true where the tree differed from that commit",
}
"""Columns of measurements.csv: one line a row, regime and cache state, or one line where there is no time."""

SAMPLE_COLUMNS: Mapping[str, str] = {
    name: MEASUREMENT_COLUMNS[name]
    for name in ("run", "kind", "name", "lse", "shape", "dtype", "mask", "inputs", "layer", "regime", "cache")
} | {
    "index": "position of the sample, from 0, in the order taken",
    "time_us": "time of one call, microseconds",
    "sm_clock_mhz": "SM clock right after the sample, without its load; empty where not recorded",
    "call_clock_mhz": "mean SM clock over the sample's calls; empty where not recorded",
}
"""Columns of samples.csv: one line a sample."""


def measurement_lines(rows: Iterable[Measurement]) -> list[dict[str, object]]:
    """Lines of measurements.csv."""
    lines: list[dict[str, object]] = []
    for row in rows:
        problem = row.problem.problem()
        common: dict[str, object] = {
            "run": row.run,
            "time": row.time,
            "gpu": row.gpu.name,
            "gpu_fingerprint": row.gpu.fingerprint,
            "kind": row.kind,
            "name": row.name,
            "layout": row.layout,
            "lse": row.lse,
            "shape": problem.shape,
            "dtype": problem.dtype,
            "mask": problem.mask,
            "inputs": problem.inputs,
            "status": row.status,
            "reason": row.reason,
            "max_abs_error": row.verdict.max_abs_error if row.verdict else None,
            "max_abs_limit": row.verdict.max_abs_limit if row.verdict else None,
            "overall_max_error": row.verdict.overall_max_error if row.verdict else None,
            "overall_rms_error": row.verdict.overall_rms_error if row.verdict else None,
            "registers": row.cubin.registers if row.cubin else None,
            "dynamic_smem_bytes": row.cubin.dynamic_smem_bytes if row.cubin else None,
            "blocks_per_sm": row.cubin.blocks_per_sm if row.cubin else None,
            "cubin_sha256": row.cubin.sha256 if row.cubin else None,
            "commit": row.source.commit,
            "dirty": row.source.dirty,
        }
        timed: list[dict[str, object]] = [
            {
                "layer": s.layer,
                "regime": s.regime,
                "cache": s.cache,
                "samples": len(s.time_us),
                "calls": s.calls,
                "median_us": s.median_us,
                "cv_percent": s.cv_percent,
                "tflops": problem.tflops(s.median_us),
                "sm_clock_mhz": median(s.sm_clock_mhz) if s.sm_clock_mhz else None,
                "call_clock_mhz": median(s.call_clock_mhz) if s.call_clock_mhz else None,
                "cycles_per_score": cycles_per_score(s, problem, row.gpu.sm_count),
                "power_w": power_w(s),
                "energy_j_per_call": s.conditions.energy_j_per_call if s.conditions else None,
            }
            for s in row.samples
        ]
        lines += [{name: (common | values).get(name) for name in MEASUREMENT_COLUMNS} for values in timed or [{}]]
    return lines


def sample_lines(rows: Iterable[Measurement]) -> list[dict[str, object]]:
    """Lines of samples.csv."""
    return [
        {
            "run": row.run,
            "kind": row.kind,
            "name": row.name,
            "lse": row.lse,
            "shape": row.problem.problem().shape,
            "dtype": row.problem.dtype,
            "mask": row.problem.mask,
            "inputs": row.problem.inputs,
            "layer": s.layer,
            "regime": s.regime,
            "cache": s.cache,
            "index": index,
            "time_us": time_us,
            "sm_clock_mhz": s.sm_clock_mhz[index] if s.sm_clock_mhz else None,
            "call_clock_mhz": s.call_clock_mhz[index] if s.call_clock_mhz else None,
        }
        for row in rows
        for s in row.samples
        for index, time_us in enumerate(s.time_us)
    ]
