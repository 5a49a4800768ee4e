"""Drawings of what the kernels do, from the constants of their sources: tiles, fragments, swizzles, schedules, bytes.

Sizes, counts and layouts come from `kernels.text`, at the defaults of a stage's tunables, for float16 and head dim 64.
Schedules follow the order of the code; their lengths are not measured, as each caption states. Those of `timeline`
are to scale, with lengths from the cycle model (experiments/timelines.py).

A drawing is a function that draws on a figure and returns the values of the placeholders in its texts; drawings.toml
has the texts and the heights of both layouts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashlab.core.paths import table
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import registry, text
from flashlab.show.charts import (
    ACCENT,
    FAINT,
    GRID,
    INK,
    LOSS,
    MUTED,
    PAPER,
    PEER,
    STAGE,
    SURFACE,
    Chart,
    Layout,
    compose,
)
from flashlab.show.tables import code, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD_DIM = 64
_ARROW = {"arrowstyle": "->", "color": INK, "linewidth": 1.2}
TIMELINE_CYCLES: Mapping[Layout, int] = {"wide": 5000, "narrow": 2800}
"""Cycles that a timeline covers."""
BANKS, BANK_BYTES = 32, 4
"""Banks of an SM's shared memory, and bytes per bank."""
Facts = Mapping[str, object]
"""Values of the placeholders in a drawing's texts."""


class Span(NamedTuple):
    """A bar of a timeline."""

    row: int
    start: float
    stop: float
    words: str
    colour: str
    low: float = 0.0
    high: float = 1.0
    """The part of the row's height that it fills, from `low` to `high`."""


def _constants(stage_id: str) -> dict[str, int]:
    return text.constants(registry.get(stage_id), HEAD_DIM)


def _bare(axes: Axes, x: tuple[float, float], y: tuple[float, float], *, equal: bool = False, title: str = "") -> Axes:
    """Axes without frame and ticks, y growing downwards."""
    axes.set(xlim=x, ylim=y[::-1])
    axes.set_axis_off()
    if title:
        axes.set_title(title)
    if equal:
        axes.set_aspect("equal")
    return axes


def _sheet(figure: Figure, x: tuple[float, float], y: tuple[float, float], *, equal: bool = False) -> Axes:
    """All of a figure as bare axes."""
    return _bare(figure.subplots(), x, y, equal=equal)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, words: object = "", **look: Any
) -> None:
    """A filled rectangle whose upper left corner is (x, y), with words in its middle."""
    from matplotlib.patches import Rectangle

    edge: dict[str, Any] = {"edgecolor": SURFACE, "linewidth": 1, "clip_on": False, "in_layout": False}
    edge |= {name: look.pop(name) for name in ("linewidth", "alpha") if name in look}
    axes.add_artist(Rectangle((x, y), width, height, facecolor=colour, **edge))
    if words != "":
        _in(axes, x + width / 2, y + height / 2, words, **{"color": PAPER, **look})


def _in(axes: Axes, x: float, y: float, words: object, **look: Any) -> None:
    axes.text(x, y, str(words), **{"ha": "center", "va": "center", "color": INK, **look})


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops=_ARROW)


def _panels(figure: Figure, layout: Layout, count: int, **what: Any) -> Sequence[Axes]:
    """Axes side by side in the wide layout, else one below the other."""
    shape = (1, count) if layout == "wide" else (count, 1)
    return list(figure.subplots(*shape, squeeze=False, **what).flat)


# --- 00 to 06: threads, tiles, copies ---------------------------------------------------------------------------------


def scalar(figure: Figure, layout: Layout) -> Facts:
    """The work of one thread in 00."""
    keys, lit = 4, 1
    axes = _sheet(figure, (-0.1, 12.1), (-0.9, 6.3))
    _box(axes, 0, 2.1, 3.2, 0.9, ACCENT, "row of Q")
    for key in range(keys):
        colours = (STAGE, PAPER) if key == lit else (FAINT, INK)
        _box(axes, 4.4, 1.3 * key, 3.2, 0.9, colours[0], f"key {key}", color=colours[1])
    _in(axes, 6.0, 1.3 * keys + 0.2, "…")
    _box(axes, 8.8, 2.1, 3.2, 0.9, ACCENT, "row of O")
    for x, words in ((1.6, "registers"), (6.0, "global memory"), (10.4, "registers")):
        _in(axes, x, -0.45, words, color=MUTED)
    _arrow(axes, (3.3, 2.45), (4.3, 1.3 * lit + 0.45))
    _arrow(axes, (7.7, 1.3 * lit + 0.45), (8.7, 2.45))
    _in(axes, 6.0, 6.1, f"per key {HEAD_DIM} × load, convert, multiply-add: the score", color=MUTED)
    return _constants("00_naive")


def loads(figure: Figure, layout: Layout) -> Facts:
    """How threads load a tile of K in 00 and in 01."""
    constants = _constants("01_coalesced")
    chunk, threads, rows = constants["CHUNK"], constants["THREADS"], 8
    chunks = HEAD_DIM // chunk
    naive, tiled = _panels(figure, layout, 2)
    for axes, title in ((naive, "00: one element at a time"), (tiled, "01: 16 bytes per thread")):
        _bare(axes, (-1.2, HEAD_DIM + 0.5), (-3.0, rows * 4 + 4.6), title=title)
        _in(axes, HEAD_DIM / 2, -1.2, f"a key: {HEAD_DIM} elements", color=MUTED)
    for row in range(rows):
        for d in range(HEAD_DIM):
            _box(naive, d, row * 4, 1, 3.2, STAGE if (row, d) == (0, 5) else GRID, linewidth=0.4)
        for c in range(chunks):
            thread = row * chunks + c
            colour = STAGE if thread < 32 else FAINT
            _box(tiled, c * chunk, row * 4, chunk, 3.2, colour, f"t{thread}", fontsize="small")
    steps = f"{threads} threads take {threads // chunks} keys at a time"
    _in(naive, HEAD_DIM / 2, rows * 4 + 2.4, "all 32 lanes of a warp read the blue element:\none multiply-add each")
    _in(tiled, HEAD_DIM / 2, rows * 4 + 2.4, f"blue: one warp's load, {32 * 16} bytes in a row;\n{steps}")
    return constants | {"chunks": chunks, "warp_bytes": 32 * 16}


def tiles(figure: Figure, layout: Layout) -> Facts:
    """The rows and keys of a block, and where 05 stores its operands."""
    constants, wide = _constants("05_wmma"), layout == "wide"
    axes = _sheet(figure, (-0.4, 11.2), (-0.9, 7.6), equal=True)
    for tile in range(4):
        for y, name in ((0, "K"), (5.2, "V")):
            _box(axes, 3.2 + 2 * tile, y, 1.9, 1.5, STAGE if tile == 1 else FAINT, name if tile == 1 else "")
    _box(axes, 0, 2.1, 2.4, 2.6, ACCENT, f"Q\n{constants['TILE_Q']} rows")
    _box(axes, 5.2, 2.1, 1.9, 1.1, PEER, "scores S" if wide else "scores")
    _box(axes, 5.2, 3.6, 1.9, 1.1, PEER, "weights P" if wide else "weights")
    _in(axes, 6.15, 3.4, "softmax", color=MUTED, fontsize="small")
    _box(axes, 8.6, 2.1, 2.4, 2.6, ACCENT, "output O\nin registers" if wide else "output O\nregisters")
    _in(axes, 7.0, -0.5, f"keys in tiles of {constants['TILE_KV']}, one after another", color=MUTED)
    _in(axes, 7.0, 7.2, "values of the same keys", color=MUTED)
    for start, end in (((2.45, 3.0), (5.1, 2.65)), ((5.3, 1.5), (5.9, 2.05)), ((7.15, 4.15), (8.5, 3.6))):
        _arrow(axes, start, end)
    _arrow(axes, (6.7, 5.15), (8.5, 4.3))
    return constants


def pairs(figure: Figure, layout: Layout) -> Facts:
    """The elements that an instruction of 02 multiplies, and their accumulators."""
    terms, lit = _constants("02_half2")["FLUSH_TERMS"], 1
    axes = _sheet(figure, (-0.1, 2.4 * terms), (-0.9, 8.4))
    for y, words in ((0.0, "Q, in registers"), (2.2, "K, in shared memory")):
        axes.text(0, y - 0.15, words, color=MUTED, fontsize="small", va="bottom")
        for d in range(2 * terms):
            colours = ((STAGE, ACCENT)[d % 2], PAPER) if d // 2 == lit else (GRID, MUTED)
            _box(axes, 2.4 * (d // 2) + d % 2, y, 1, 1.1, colours[0], d, color=colours[1], fontsize="small")
    middle = 2.4 * lit + 1
    _arrow(axes, (middle, 3.4), (middle, 4.6))
    axes.text(middle + 0.4, 4.0, "one HFMA2", va="center", color=INK)
    for half, (colour, words) in enumerate(((STAGE, "even"), (ACCENT, "odd"))):
        _box(axes, middle - 2.4 + 2.4 * half, 4.7, 2.4, 1.1, colour, words)
    axes.text(middle + 2.8, 5.25, f"two sums in 16 bits, {terms} terms each", va="center", color=MUTED)
    _arrow(axes, (middle, 5.9), (middle, 7.1))
    _box(axes, middle - 2.4, 7.2, 4.8, 1.1, PEER, "score")
    axes.text(middle + 2.8, 7.75, "one sum in 32 bits", va="center", color=MUTED)
    return {"terms": terms, "elements": 2 * terms, "first": 2 * lit, "second": 2 * lit + 1}


def sharing(figure: Figure, layout: Layout) -> Facts:
    """Ownership of scores and output in 02 and in 03."""
    constants = _constants("03_warp_rows")
    rows, keys, lanes, lane = constants["ROWS_PER_WARP"], constants["TILE_KV"], constants["WARP"], 5
    mine = [key for key in range(keys) if key % lanes == lane]
    columns = [2 * lane + 2 * lanes * pair + half for pair in range(constants["LANE_PAIRS"]) for half in (0, 1)]
    panels: Sequence[tuple[str, str, int, Callable[[int, int], bool]]] = (
        ("02: a thread has a row", "scores", keys, lambda row, column: row == lane),
        ("03: a lane has keys", "scores", keys, lambda row, column: column in mine),
        ("03: then columns", "output", HEAD_DIM, lambda row, column: column in columns),
    )
    for axes, (title, what, width, owned) in zip(_panels(figure, layout, 3), panels, strict=True):
        _bare(axes, (-0.5, width + 0.5), (-0.3, rows + 2.2), title=title)
        for row in range(rows):
            _box(axes, 0, row, width, 0.86, GRID, linewidth=0)
            for column in range(width):
                if owned(row, column):
                    _box(axes, column, row, 1, 0.86, STAGE, linewidth=0)
        _in(axes, width / 2, rows + 1.2, f"{what}: {rows} rows by {width}", color=MUTED)
    listed = {name: " and ".join(map(str, some)) for name, some in (("keys", mine), ("columns", columns))}
    return constants | listed | {"lane": lane, "owned": len(columns)}


def trip(figure: Figure, layout: Layout) -> Facts:
    """The path of a score through shared memory in 04 and 05."""
    sizes = {member.name: member.size for member in text.shared_memory(registry.get("05_wmma"), HEAD_DIM)}
    steps = ("QK GEMM", f"S: {sizes['S']:,} bytes", "softmax", f"P: {sizes['P']:,} bytes", "PV GEMM")
    axes = _sheet(figure, (-0.1, 10.6), (-0.5, 3.0))
    axes.text(0, -0.15, "registers", color=MUTED, va="bottom")
    axes.text(0, 2.95, "shared memory", color=MUTED, va="bottom")
    for place, words in enumerate(steps):
        x, row = 2.1 * place, place % 2
        text_ = words if layout == "wide" else words.replace(": ", "\n").replace("bytes", "B")
        _box(axes, x, 1.7 * row, 2.0, 0.9, PEER if row else STAGE, text_)
        if place:
            ends = ((x - 0.6, 0.95), (x + 0.5, 1.65)) if row else ((x - 0.6, 1.65), (x + 0.5, 0.95))
            _arrow(axes, *ends)
    return sizes


def factors(figure: Figure, layout: Layout) -> Facts:
    """How 05 applies a row's factor to its row of the output, for any layout of a fragment."""
    size, row, column = _constants("05_wmma")["WMMA_TILE"], 5, 9
    output, factor = _panels(figure, layout, 2)
    for axes, title in ((output, "output: accumulators"), (factor, "factors: equal columns")):
        _bare(axes, (-0.2, size + 0.2), (-0.2, size + 1.9), equal=True, title=title)
        for y in range(size):
            for x in range(size):
                lit, same = (y, x) == (row, column), y == row and axes is factor
                colour, words = STAGE if lit else FAINT if same else GRID, y if axes is factor else ""
                _box(axes, x, y, 1, 1, colour, words, linewidth=0.5, color=PAPER if lit else MUTED, fontsize=6)
        said = "number: row of the factor" if axes is factor else "blue: element i of a lane"
        _in(axes, size / 2, size + 1.2, said, color=MUTED)
    return {"size": size}


def _lanes(axes: Axes, rows: Sequence[str], spans: Iterable[Span], *, end: float, letter: float = 0.0) -> None:
    """A timeline of named rows and spans. Labels wider than their span, at `letter` per character, are left out."""
    height = 0.62
    _bare(axes, (0, end), (-0.6, len(rows) - 0.1))
    for row, name in enumerate(rows):
        axes.text(0, row - 0.33, name, ha="left", va="bottom", color=MUTED, fontsize="small")
        axes.plot([0, end], [row + height / 2] * 2, color=GRID, linewidth=0.8, zorder=0)
    for row, start, stop, words, colour, low, high in spans:
        left, right = max(start, 0.0), min(stop, end)
        if left < right and low < high:
            top, share = row - 0.25 + (1 - high) * height, (high - low) * height
            said = words if right - left > max(0.9, letter * len(words)) else ""
            look = {"linewidth": 1 if high - low == 1 else 0, "fontsize": "small"}
            _box(axes, left, top, right - left, share, colour, said, **look)


def _before_and_after(
    figure: Figure, rows: Sequence[str], timelines: Mapping[str, Sequence[Span]], *, end: float
) -> None:
    """Two timelines, one below the other, by their titles."""
    for axes, (title, spans) in zip(figure.subplots(len(timelines), 1), timelines.items(), strict=True):
        _lanes(axes, rows, spans, end=end)
        axes.set_title(title)


def pipeline(figure: Figure, layout: Layout) -> Facts:
    """Copies and arithmetic of a block in 05 and in 06."""
    stages, count, copy, work = _constants("06_cp_async")["PIPELINE_STAGES"], 4, 1.6, 2.4

    def spans(ring: int) -> list[Span]:
        drawn, free, copied, done = [], 0.0, 0.0, [0.0] * count
        for tile in range(count):
            # A tile's buffer is free once the tile that it held before is used up.
            start = max(copied, done[tile - ring] if tile >= ring else 0.0)
            copied = start + copy
            begin = max(copied, free)
            free = done[tile] = begin + work
            drawn += [Span(0, start, copied, f"tile {tile}", ACCENT), Span(1, begin, free, f"tile {tile}", STAGE)]
        return drawn

    timelines = {"05: one buffer": spans(1), f"06: a ring of {stages} buffers": spans(stages)}
    rows = ("copies from global memory", "tensor cores and softmax")
    _before_and_after(figure, rows, timelines, end=max(span.stop for span in spans(1)))
    return {"stages": stages}


# --- 07 and 08: fragments and banks -----------------------------------------------------------------------------------


def lane_of(row: int, column: int, row_lanes: int) -> int:
    """The lane that holds an element of a 16 × 8 accumulator of mma.sync: two columns, four lanes a row."""
    return row % 8 * row_lanes + column // 2 % row_lanes


def fragment(figure: Figure, layout: Layout) -> Facts:
    """The lane that holds each score after mma.sync, and the same registers as operand of the next one."""
    constants = _constants("07_mma_registers")
    rows, columns, lanes, chosen = constants["MMA_M"], constants["MMA_N"], constants["ROW_LANES"], 5
    first, second = _panels(figure, layout, 2)
    for axes, title, note in (
        (first, "S: two accumulators", "columns 0 to 7 and 8 to 15 of the scores"),
        (second, "P: first operand of the PV GEMM", "the same registers, rounded and packed"),
    ):
        _bare(axes, (-0.2, 2 * columns + 0.5), (-1.2, rows + 0.2), equal=True, title=title)
        _in(axes, columns, -0.6, note, color=MUTED, fontsize="small")
        for row in range(rows):
            for column in range(2 * columns):
                lane = lane_of(row, column, lanes)
                gap = 0.3 if axes is first and column >= columns else 0.0
                colours = (STAGE, PAPER) if lane == chosen else (GRID, MUTED)
                words = lane if layout == "wide" or lane == chosen else ""
                look = {"linewidth": 0.5, "color": colours[1], "fontsize": 6}
                _box(axes, column + gap, row, 1, 1, colours[0], words, **look)
    own = chosen // lanes
    return constants | {"columns": 2 * columns, "chosen": chosen, "upper": own, "lower": own + 8}


def bank_of(row: int, chunk: int, *, row_bytes: int, swizzle: bool, rows: int, chunk_bytes: int) -> int:
    """The first bank of a chunk of a shared-memory row."""
    place = chunk ^ row % rows if swizzle else chunk
    return (row * row_bytes + place * chunk_bytes) // BANK_BYTES % BANKS


def conflicts(**layout: Any) -> int:
    """Wavefronts for reading one chunk of 8 rows: the maximum number of rows in one bank."""
    banks = [bank_of(row, 0, **layout) for row in range(layout["rows"])]
    return max(banks.count(bank) for bank in banks)


def swizzle_layouts() -> dict[str, dict[str, Any]]:
    """Layouts of K in shared memory for `bank_of`: without padding, padded as in 07, and swizzled as in 08."""
    padded, swizzled = _constants("07_mma_registers"), _constants("08_swizzle")
    rows: dict[str, dict[str, Any]] = {
        "no padding": {"row_bytes": HEAD_DIM * 2, "swizzle": False},
        f"07: {padded['PADDING'] * 2} bytes of padding": {"row_bytes": padded["STRIDE"] * 2, "swizzle": False},
        "08: swizzled": {"row_bytes": swizzled["STRIDE"] * 2, "swizzle": bool(swizzled["SWIZZLE"])},
    }
    return {
        title: what | {"rows": swizzled["MATRIX"], "chunk_bytes": swizzled["CHUNK"] * 2} for title, what in rows.items()
    }


def swizzle(figure: Figure, layout: Layout) -> Facts:
    """The banks of the chunks of 8 rows, in each layout."""
    layouts, chosen = swizzle_layouts(), 2
    for axes, (title, what) in zip(_panels(figure, layout, len(layouts)), layouts.items(), strict=True):
        rows = what["rows"]
        _bare(axes, (-0.1, BANKS + 0.1), (-1.6, rows + 1.4), title=title)
        for row in range(rows):
            for chunk in range(HEAD_DIM // 8):
                colours = (STAGE, PAPER) if chunk == chosen else (GRID, MUTED)
                look = {"linewidth": 0.8, "color": colours[1], "fontsize": "small"}
                _box(axes, bank_of(row, chunk, **what), row, 4, 1, colours[0], chunk, **look)
        most = conflicts(**what)
        for bank in range(0, BANKS, 8):
            name = "bank 0" if bank == 0 else str(bank)
            axes.text(bank, -0.2, name, color=MUTED, fontsize="small", va="bottom")
        said = f"{most} rows in one bank: {most} passes" if most > 1 else "each row in its own bank: one pass"
        _in(axes, BANKS / 2, rows + 0.8, said, color=LOSS if most > 1 else ACCENT)
    counts = "; ".join(f"{title}: {conflicts(**what)}" for title, what in layouts.items())
    return {"chosen": chosen, "counts": counts}


# --- 09 to 13: warpgroups ---------------------------------------------------------------------------------------------


def wgmma(figure: Figure, layout: Layout) -> Facts:
    """A warpgroup's tile in 09: rows of four warps, columns of one instruction."""
    constants = _constants("09_wgmma")
    rows, keys, warps, step = (
        constants["WGMMA_ROWS"],
        constants["TILE_KV"],
        constants["WARPGROUP_WARPS"],
        constants["WGMMA_STEP"],
    )
    axes = _sheet(figure, (-0.2, 13.4), (-1.2, 7.9), equal=True)
    _box(axes, 4.4, 0, 8.8, 1.7, STAGE, f"K, {keys} keys, shared memory")
    _box(axes, 0, 2.2, 3.8, 4.6, STAGE, f"Q, {rows} rows\nshared\nmemory")
    for warp in range(warps):
        words = f"warp {warp}: {rows // warps} rows of S"
        _box(axes, 4.4, 2.2 + warp * 4.6 / warps, 8.8, 4.6 / warps, ACCENT, words)
    _in(axes, 8.8, 7.3, f"registers: {rows * keys // 128} scores per thread", color=MUTED)
    _in(axes, 6.6, -0.7, f"one QK GEMM: {HEAD_DIM // step} instructions m{rows}n{keys}k{step}", color=MUTED)
    return constants | {"steps": HEAD_DIM // step, "warp_rows": rows // warps}


def timeline(
    stage_id: str, rows: Sequence[str], spans: Sequence[Span], *, alt: str, caption: str, **source: Any
) -> Chart:
    """Activity of an SM over cycles; every stage's timeline has the same scale.

    Args:
        source: provenance and data files of the lengths.
    """
    looks = {"QK GEMM": STAGE, "PV GEMM": ACCENT, "softmax": PEER}

    def draw(figure: Figure, layout: Layout) -> None:
        axes, end = figure.subplots(), TIMELINE_CYCLES[layout]
        _lanes(axes, rows, spans, end=end, letter=70)
        for cycles in range(0, end + 1, 1000):
            axes.axvline(cycles, color=GRID, linewidth=0.8, zorder=-1)
            _in(axes, cycles, len(rows) - 0.35, f"{cycles:,}", color=MUTED, fontsize="small")
        _in(axes, 500, len(rows) - 0.35, "cycles", color=MUTED, fontsize="small")
        for name, colour in looks.items():
            axes.plot([], [], "s", color=colour, label=name)
        figure.legend(loc="outside upper left", ncols=len(looks), columnspacing=0.9, handletextpad=0.1)

    name = f"draw-timeline-{stage_id}"
    height = 0.6 + 0.5 * len(rows)
    return compose(draw, name=name, heights=(height, height), alt=alt, caption=caption, **source)


def ring(figure: Figure, layout: Layout) -> Facts:
    """Producer, ring and consumers of 10, with the barriers between them."""
    constants = _constants("10_warp_specialized")
    stages, consumers = constants["PIPELINE_STAGES"], constants["NUM_CONSUMERS"]
    axes = _sheet(figure, (-0.1, 12.1), (-0.9, 5.4))
    _box(axes, 0, 1.3, 3.0, 2.4, ACCENT, f"producer\n{constants['PRODUCER_REGISTERS']} registers\nper thread")
    for stage in range(stages):
        words = f"stage {stage}\n{constants['TILE_KV']} keys"
        _box(axes, 4.7, stage * 4.8 / stages, 2.4, 4.8 / stages, STAGE, words)
    for consumer in range(consumers):
        words = f"consumer {consumer}\n{constants['CONSUMER_REGISTERS']} registers\nper thread"
        _box(axes, 8.9, consumer * 4.8 / consumers, 3.1, 4.8 / consumers, PEER, words)
    for x, words in ((3.0, "TMA"), (7.1, "full")):
        _arrow(axes, (x + 0.05, 2.0), (x + 1.65, 2.0))
        _in(axes, x + 0.85, 1.6, words, fontsize="small")
        _arrow(axes, (x + 1.65, 3.0), (x + 0.05, 3.0))
        _in(axes, x + 0.85, 3.4, "empty", fontsize="small")
    _in(axes, 5.9, -0.5, "ring of K and V in shared memory", color=MUTED)
    return constants


def early(figure: Figure, layout: Layout) -> Facts:
    """One tile of a consumer in 13 and in 14."""
    constants = _constants("14_stale_max")
    gemm, search, powers, rounding = 1.6, 1.9, 4.0, 1.2

    def tile(searched: float) -> list[Span]:
        drawn = [Span(0, 0.0, gemm, "QK", STAGE), Span(0, gemm, 2 * gemm, "PV before", ACCENT)]
        at = gemm
        for length, words, colour in (
            (searched, "maximum", LOSS),
            (powers, "exponentials", PEER),
            (rounding, "round", FAINT),
        ):
            drawn.append(Span(1, at, at + length, words, colour))
            at += length
        return drawn

    timelines = {"13: the tile's own maximum": tile(search), "14: a stale maximum": tile(0.0)}
    rows = ("tensor cores", "softmax of the same warpgroup")
    _before_and_after(figure, rows, timelines, end=gemm + search + powers + rounding + 0.1)
    share = constants["BEFORE_PV"] / constants["NUM_SCORES"]
    figure.axes[-1].axvline(gemm + share * powers, 0.05, 0.5, color=INK, linewidth=1.2)
    return constants


def joint(figure: Figure, layout: Layout) -> Facts:
    """The end of a work tile in 12 and in 13."""
    last, first = Span(0, 0.0, 1.6, "last PV", ACCENT), "first QK"
    before = (last, Span(1, 1.6, 4.2, "round, write", PEER), Span(0, 4.2, 5.8, first, STAGE))
    store = Span(1, 2.7, 5.0, "TMA store", FAINT)
    after = (last, Span(1, 1.6, 2.7, "round", PEER), store, Span(0, 2.7, 4.3, first, STAGE))
    timelines = {"12: the warps write the output": before, "13: a TMA store writes it": after}
    _before_and_after(figure, ("tensor cores, one consumer", "its output"), timelines, end=6.2)
    return {}


def waves(figure: Figure, layout: Layout) -> Facts:
    """Causal work tiles on a few SMs: one block each in waves, and persistent blocks that take the longest first."""
    constants = _constants("12_persistent")
    problem = Problem.parse(FIRST_SHAPE, mask="causal")
    rows, keys, sms, heads = constants["TILE_Q"], constants["TILE_KV"], 6, 3
    per_head = [-(-min((tile + 1) * rows, problem.q_len) // keys) for tile in range(-(-problem.q_len // rows))]

    def assigned(lengths: Sequence[int], start_up: float) -> tuple[list[tuple[int, float, float, int]], float]:
        free = [(0.0, sm) for sm in range(sms)]
        heapq.heapify(free)
        spans = []
        for length in lengths:
            when, sm = heapq.heappop(free)
            spans.append((sm, when + start_up, when + start_up + length, length))
            heapq.heappush(free, (when + start_up + length, sm))
        return spans, max(when for when, _ in free)

    schedules = {
        "11: one block per tile of Q, in order": assigned(per_head * heads, 1.0),
        "12: persistent blocks, longest first": assigned(sorted(per_head * heads, reverse=True), 0.0),
    }
    first_end, last_end = (end for _, end in schedules.values())
    for axes, (title, (spans, end)) in zip(figure.subplots(2, 1), schedules.items(), strict=True):
        _bare(axes, (0, first_end * 1.02), (-0.2, sms + 0.1), title=title)
        for sm, start, stop, length in spans:
            look = {"alpha": 0.35 + 0.65 * length / max(per_head), "fontsize": "small"}
            _box(axes, start, sm, stop - start, 0.86, STAGE, length if stop - start > 4 else "", **look)
        axes.axvline(end, color=LOSS, linewidth=1.4)
    return constants | {
        "sms": sms,
        "heads": heads,
        "tokens": problem.q_len,
        "first_end": first_end,
        "last_end": last_end,
    }


# --- 12 to 17: shared memory, references, ones, masks -----------------------------------------------------------------


def smem(figure: Figure, layout: Layout) -> Facts:
    """Shared memory of a block of 16, in bytes."""
    stage, wide = registry.get("16_ones_column"), layout == "wide"
    members = [member for member in text.shared_memory(stage, HEAD_DIM) if member.kind == "element"]
    rest = sum(member.size for member in text.shared_memory(stage, HEAD_DIM) if member.kind != "element")
    limit = _constants(stage.id)["BLOCK_SMEM_BYTES"]
    colours = {"Q": ACCENT, "K": STAGE, "V": PEER, "ones": LOSS, "O": FAINT}
    axes = _sheet(figure, (0, limit * 1.02), (-0.9, 2.4))
    for member in members:
        part = member.size / member.count
        for place in range(member.count):
            words = f"{member.name}{place}" if part > limit / 20 else ""
            _box(axes, member.offset + place * part, 0, part, 1, colours[member.name], words)
        if member.size > limit / 20 or wide:
            y, gap, va = (-0.45, " ", "center") if member.name == "ones" else (1.3, "\n", "top")
            axes.text(member.offset, y, f"{member.name}{gap}{member.size:,}", color=MUTED, fontsize="small", va=va)
    end = members[-1].offset + members[-1].size
    _box(axes, end, 0, limit - end, 1, GRID, "free" if wide else "", color=MUTED)
    listed = ", ".join(f"{member.name} {member.size:,} bytes at {member.offset:,}" for member in members)
    return {"listed": listed, "rest": rest, "limit": limit, "total": end + rest}


_WAITING: Mapping[str, tuple[str, str]] = {
    "Q_full": ("the TMA load of Q, by its bytes", "consumers; the warps that fetch K and V"),
    "Q_empty": ("each consumer warp, and a K/V warp", "the warp that fetches Q"),
    "work_ready": ("the warp that fetches Q, at head dim 256", "the warps that fetch K and V, there"),
    "end_near": ("the warp that fetches K and V", "the warp that fetches Q"),
    "K_full": ("the TMA load of K, by its bytes", "consumers, before the QK GEMM"),
    "K_empty": ("each consumer warp, after the QK GEMM", "the warp that fetches K and V"),
    "V_full": ("the TMA load of V, by its bytes", "consumers, before the PV GEMM"),
    "V_empty": ("each consumer warp, after the PV GEMM", "the warp that fetches K and V"),
}


def barriers() -> str:
    """The mbarriers of 16: who arrives, who waits, arrivals per phase, and count."""
    stage = registry.get("16_ones_column")
    counts = text.arrivals(stage, HEAD_DIM)
    lines = [
        (code(member.name), *_WAITING[member.name], counts[member.name], member.count)
        for member in text.shared_memory(stage, HEAD_DIM)
        if member.kind == "ptx::Mbarrier"
    ]
    return markdown(("mbarrier", "who arrives", "who waits", "arrivals per phase", "count"), lines, left=3)


_SCORES = (3.0, 1.0, 4.5, 2.0, 9.0, 14.0, 20.5, 12.0, 24.0, 18.0)
"""A made-up row: the largest score of each tile, as a power of two."""


def reference(figure: Figure, layout: Layout) -> Facts:
    """The references of 14 and 15 for a row of growing scores."""
    old, new = _constants("14_stale_max"), _constants("15_renormalize")
    limits = {"14": old["SUM_LIMIT"].bit_length() - 1, "15": new["SUM_LIMIT"].bit_length()}
    start = {"14": _SCORES[0], "15": _SCORES[0] + new["HEADROOM"]}
    said = {"14": ("recompute", "tile recomputed"), "15": ("move the reference", "moved by 2ⁿ")}
    tiles = range(len(_SCORES))
    panels = _panels(figure, layout, 2, sharey=True)
    for axes, (which, (title, event)) in zip(panels, said.items(), strict=True):
        at, path, events = start[which], [], []
        for tile, score in enumerate(_SCORES):
            if score - at >= limits[which]:
                events.append(tile)
                at = score if which == "14" else at + (int(score - at) - new["SETTLED"])
            path.append(at)
        top = [at + limits[which] for at in path]
        axes.fill_between(tiles, path, top, step="post", color=FAINT, alpha=0.3, linewidth=0)
        axes.step(tiles, path, where="post", color=STAGE, linewidth=1.8)
        axes.plot(tiles, _SCORES, "o", color=INK, markersize=5)
        for tile in events:
            axes.plot([tile], [_SCORES[tile]], "o", color=LOSS, markersize=9, fillstyle="none")
            axes.annotate(event, (tile, _SCORES[tile]), (-8, 6), textcoords="offset points", ha="right", color=LOSS)
        axes.set_xticks(list(tiles))
        axes.set(title=f"{which}: {title}", xlabel="tile", ylim=(-2, 44))
        look: dict[str, Any] = {"fontsize": "small", "va": "top"}
        axes.text(0.1, limits[which] + start[which] - 0.6, "range of a 16-bit sum", color=MUTED, **look)
        axes.text(3.3, start[which] - 0.8, "reference", color=STAGE, **look)
    panels[0].set_ylabel("powers of two")
    return {"limit_14": limits["14"], "limit_15": limits["15"]}


def ones(figure: Figure, layout: Layout) -> Facts:
    """V with its column of ones in 16."""
    constants = _constants("16_ones_column")
    keys, columns = constants["TILE_KV"], HEAD_DIM
    axes = _sheet(figure, (-0.2, 13.2), (-0.7, 5.2), equal=True)
    _box(axes, 0, 1.2, 3.2, 2.4, PEER, f"P\n64 × {keys}")
    _in(axes, 3.6, 2.4, "·", fontsize="large")
    _box(axes, 4.0, 0.4, 3.2, 4.0, STAGE, f"V\n{keys} × {columns}")
    _box(axes, 7.25, 0.4, 0.55, 4.0, LOSS, "1\n1\n1\n1")
    _in(axes, 8.3, 2.4, "=", fontsize="large")
    _box(axes, 8.8, 1.2, 3.2, 2.4, ACCENT, f"O\n64 × {columns}")
    _box(axes, 12.05, 1.2, 0.55, 2.4, LOSS, "Σ")
    _in(axes, 7.53, 4.75, f"{constants['ONES']} columns of ones", color=MUTED)
    _in(axes, 12.0, 4.0, "sums of P", color=MUTED)
    return constants


def spans(figure: Figure, layout: Layout) -> Facts:
    """The tile on the diagonal in 17, and the spans in which each of a consumer's four warps compares columns."""
    constants = _constants("17_around_the_loop")
    keys, span, rows = constants["TILE_KV"], 32, constants["WARP_ROWS"]
    first = keys - constants["WGMMA_ROWS"]  # the key that the first row sees last
    axes = _sheet(figure, (-12, keys + 1), (-6, constants["WGMMA_ROWS"] + 1))
    for warp in range(constants["WGMMA_ROWS"] // rows):
        whole, seen = first + warp * rows + 1, first + (warp + 1) * rows
        _in(axes, -7, (warp + 0.5) * rows, f"warp {warp}", color=MUTED, fontsize="small")
        for left in range(0, keys, span):
            look = (
                (STAGE, "no comparison") if left + span <= whole else (LOSS, "compared") if left < seen else (GRID, "")
            )
            words = look[1] if layout == "wide" or look[0] == LOSS else ""
            _box(axes, left, warp * rows, span, rows, look[0], words, fontsize="small")
    axes.plot([first, keys], [0, constants["WGMMA_ROWS"]], color=INK, linewidth=1.6)
    for left in range(0, keys, span):
        _in(axes, left + span / 2, -3, f"keys {left} to {left + span - 1}", color=MUTED, fontsize="small")
    return constants | {"span": span}


_WORDS: Mapping[str, Mapping[str, Any]] = table(__file__)


def drawn(sketch: Callable[[Figure, Layout], Facts]) -> Chart:
    """A drawing with its texts."""
    words = _WORDS[sketch.__name__]
    facts: dict[str, object] = {"HEAD_DIM": HEAD_DIM}

    def draw(figure: Figure, layout: Layout) -> None:
        facts.update(sketch(figure, layout))

    heights = (words["wide"], words["narrow"])
    chart = compose(draw, name=f"draw-{sketch.__name__}", heights=heights, alt="", caption="")
    return chart.model_copy(update={part: words[part].format_map(facts) for part in ("alt", "caption")})


DRAWINGS: Mapping[str, Callable[[], Chart]] = {
    sketch.__name__: partial(drawn, sketch)
    for sketch in (
        *(tiles, scalar, loads, pairs, sharing, trip, factors, pipeline, fragment, swizzle, wgmma, ring, waves),
        *(joint, early, reference, ones, smem, spans),
    )
}
"""The drawings by the name under which the journey includes them."""
