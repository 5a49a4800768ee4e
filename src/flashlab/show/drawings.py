"""Drawings of what the kernels do, from the constants of their sources: tiles, fragments, swizzles, schedules, bytes.

Sizes, counts and layouts come from `kernels.text`, at the defaults of a stage's tunables, for float16 and head dim 64.
Schedules are drawn from the order of the code; their lengths are not measured, and each caption says so. Those of
`timeline` are to scale: the cycle model says how long things take (experiments/timelines.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
NOT_TO_SCALE = "The order is that of the code; the lengths are not to scale."
_ARROW = {"arrowstyle": "->", "color": INK, "linewidth": 1.2}
TIMELINE_CYCLES: Mapping[Layout, int] = {"wide": 5000, "narrow": 2800}
"""That a timeline has room for."""
BANKS, BANK_BYTES = 32, 4
"""Of an SM's shared memory."""


class Span(NamedTuple):
    """A bar of a timeline."""

    row: int
    start: float
    stop: float
    words: str
    colour: str
    low: float = 0.0
    high: float = 1.0
    """How much of the row's height it fills, from where to where."""


def _constants(stage_id: str) -> dict[str, int]:
    return text.constants(registry.get(stage_id), HEAD_DIM)


def _bare(axes: Axes, x: tuple[float, float], y: tuple[float, float], *, equal: bool = False) -> None:
    """Axes without frame and ticks, y growing downwards."""
    axes.set_xlim(*x)
    axes.set_ylim(y[1], y[0])
    axes.set_axis_off()
    if equal:
        axes.set_aspect("equal")


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **look: Any) -> None:
    """A filled rectangle whose upper left corner is (x, y)."""
    from matplotlib.patches import Rectangle

    look = {"edgecolor": SURFACE, "linewidth": 1, "clip_on": False, **look}
    axes.add_artist(Rectangle((x, y), width, height, facecolor=colour, **look))


def _in(axes: Axes, x: float, y: float, words: object, **look: Any) -> None:
    axes.text(x, y, str(words), **{"ha": "center", "va": "center", "color": INK, **look})


def _panels(figure: Figure, layout: Layout, count: int, **what: Any) -> Sequence[Axes]:
    """Axes beside one another where there is width, else below one another."""
    shape = (1, count) if layout == "wide" else (count, 1)
    return list(figure.subplots(*shape, squeeze=False, **what).flat)


# --- 00 to 06: threads, tiles, copies ---------------------------------------------------------------------------------


def scalar() -> Chart:
    """What one thread of 00 works through."""
    one = _constants("00_naive")
    threads, keys, lit = one["THREADS"], 4, 1

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.1, 12.1), (-0.9, 6.3))
        _box(axes, 0, 2.1, 3.2, 0.9, ACCENT)
        _in(axes, 1.6, 2.55, "row of Q", color=PAPER)
        for key in range(keys):
            _box(axes, 4.4, 1.3 * key, 3.2, 0.9, STAGE if key == lit else FAINT)
            _in(axes, 6.0, 1.3 * key + 0.45, f"key {key}", color=PAPER if key == lit else INK)
        _in(axes, 6.0, 1.3 * keys + 0.2, "…")
        _box(axes, 8.8, 2.1, 3.2, 0.9, ACCENT)
        _in(axes, 10.4, 2.55, "row of O", color=PAPER)
        for x, words in ((1.6, "registers"), (6.0, "global memory"), (10.4, "registers")):
            _in(axes, x, -0.45, words, color=MUTED)
        axes.annotate("", (4.3, 1.3 * lit + 0.45), (3.3, 2.45), arrowprops=_ARROW)
        axes.annotate("", (8.7, 2.45), (7.7, 1.3 * lit + 0.45), arrowprops=_ARROW)
        _in(axes, 6.0, 6.1, f"per key {HEAD_DIM} × load, convert, multiply-add: the score", color=MUTED)

    return compose(
        draw,
        name="draw-scalar",
        heights=(2.4, 2.4),
        alt=f"One thread holds a row of Q and a row of the output in registers, {HEAD_DIM} elements each, and reads "
        "key after key from global memory; every multiply-add has a load and a conversion of its own.",
        caption=f"One of a block's {threads} threads in 00. Q and O lie in its registers; keys and values come from "
        "global memory one element at a time.",
    )


def loads() -> Chart:
    """Who loads what of a tile of K in 00 and in 01."""
    one = _constants("01_coalesced")
    chunk, threads, keys = one["CHUNK"], one["THREADS"], one["TILE_KV"]
    chunks, rows = HEAD_DIM // chunk, 8
    per_step = threads // chunks

    def draw(figure: Figure, layout: Layout) -> None:
        naive, tiled = _panels(figure, layout, 2)
        for axes, title in ((naive, "00: one element at a time"), (tiled, "01: 16 bytes a thread")):
            _bare(axes, (-1.2, HEAD_DIM + 0.5), (-3.0, rows * 4 + 4.6))
            axes.set_title(title)
            _in(axes, HEAD_DIM / 2, -1.2, f"a key: {HEAD_DIM} elements", color=MUTED)
        for row in range(rows):
            for d in range(HEAD_DIM):
                _box(naive, d, row * 4, 1, 3.2, STAGE if (row, d) == (0, 5) else GRID, linewidth=0.4)
            for c in range(chunks):
                thread = row * chunks + c
                _box(tiled, c * chunk, row * 4, chunk, 3.2, STAGE if thread < 32 else FAINT)
                _in(tiled, (c + 0.5) * chunk, row * 4 + 1.6, f"t{thread}", color=PAPER, fontsize="small")
        _in(naive, HEAD_DIM / 2, rows * 4 + 2.4, "all 32 lanes of a warp read the blue element:\none multiply-add each")
        _in(
            tiled,
            HEAD_DIM / 2,
            rows * 4 + 2.4,
            f"blue: one warp's load, {32 * 16} bytes in a row;\n{threads} threads take {per_step} keys at a time",
        )

    return compose(
        draw,
        name="draw-loads",
        heights=(2.7, 5.0),
        alt="Two grids of keys by elements. In 00 all lanes of a warp read the same element. In 01 thread t "
        "loads the "
        f"{chunk} elements of chunk t modulo {chunks} of key t divided by {chunks}, so a warp reads {32 * 16} "
        "consecutive bytes.",
        caption="How keys are read. Left, 00: each thread walks along a key, and a warp loads one element at a "
        "time. "
        f"Right, 01: the {threads} threads of a block copy {keys} keys into shared memory together, {chunk} elements "
        "each.",
    )


def tiles() -> Chart:
    """Which rows and keys a block works on, and where 05 keeps what."""
    one = _constants("05_wmma")
    rows, keys = one["TILE_Q"], one["TILE_KV"]

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.4, 11.2), (-0.9, 7.6), equal=True)
        for tile in range(4):
            look = STAGE if tile == 1 else FAINT
            _box(axes, 3.2 + 2 * tile, 0, 1.9, 1.5, look)
            _in(axes, 4.15 + 2 * tile, 0.75, "K" if tile == 1 else "", color=PAPER)
            _box(axes, 3.2 + 2 * tile, 5.2, 1.9, 1.5, look)
            _in(axes, 4.15 + 2 * tile, 5.95, "V" if tile == 1 else "", color=PAPER)
        _box(axes, 0, 2.1, 2.4, 2.6, ACCENT)
        _in(axes, 1.2, 3.4, f"Q\n{rows} rows", color=PAPER)
        _box(axes, 5.2, 2.1, 1.9, 1.1, PEER)
        _in(axes, 6.15, 2.65, "scores" if layout == "narrow" else "scores S", color=PAPER)
        _box(axes, 5.2, 3.6, 1.9, 1.1, PEER)
        _in(axes, 6.15, 4.15, "weights" if layout == "narrow" else "weights P", color=PAPER)
        _in(axes, 6.15, 3.4, "softmax", color=MUTED, fontsize="small")
        _box(axes, 8.6, 2.1, 2.4, 2.6, ACCENT)
        _in(axes, 9.8, 3.4, "output O\nregisters" if layout == "narrow" else "output O\nin registers", color=PAPER)
        _in(axes, 7.0, -0.5, f"keys in tiles of {keys}, one after another", color=MUTED)
        _in(axes, 7.0, 7.2, "values of the same keys", color=MUTED)
        for start, end in (((2.45, 3.0), (5.1, 2.65)), ((5.3, 1.5), (5.9, 2.05)), ((7.15, 4.15), (8.5, 3.6))):
            axes.annotate("", end, start, arrowprops=_ARROW)
        axes.annotate("", (8.5, 4.3), (6.7, 5.15), arrowprops=_ARROW)

    return compose(
        draw,
        name="draw-tiles",
        heights=(4.0, 2.9),
        alt=f"A block has {rows} rows of Q. For each tile of {keys} keys it computes scores from Q and K, makes "
        "weights "
        "of them by the softmax, and adds weights times V to the output, which stays in registers.",
        caption=f"One block's work in 05: {rows} query rows meet one tile of {keys} keys after another. Blue and "
        "orange lie "
        "in shared memory, the output stays in the registers from the first tile to the last.",
    )


def pairs() -> Chart:
    """Which elements an instruction of 02 multiplies, and where their sum goes."""
    one = _constants("02_half2")
    terms, lit = one["FLUSH_TERMS"], 1
    width = 2.4 * terms

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.1, width), (-0.9, 8.4))
        for y, words in ((0.0, "Q, in registers"), (2.2, "K, as it lies in shared memory")):
            axes.text(0, y - 0.15, words, color=MUTED, fontsize="small", va="bottom")
            for d in range(2 * terms):
                of_pair = d // 2 == lit
                x = 2.4 * (d // 2) + d % 2
                _box(axes, x, y, 1, 1.1, (STAGE, ACCENT)[d % 2] if of_pair else GRID)
                _in(axes, x + 0.5, y + 0.55, d, color=PAPER if of_pair else MUTED, fontsize="small")
        middle = 2.4 * lit + 1
        axes.annotate("", (middle, 4.6), (middle, 3.4), arrowprops=_ARROW)
        axes.text(middle + 0.4, 4.0, "one HFMA2", va="center", color=INK)
        for half, (colour, words) in enumerate(((STAGE, "even"), (ACCENT, "odd"))):
            _box(axes, middle - 2.4 + 2.4 * half, 4.7, 2.4, 1.1, colour)
            _in(axes, middle - 1.2 + 2.4 * half, 5.25, words, color=PAPER)
        axes.text(middle + 2.8, 5.25, f"two sums in 16 bits, {terms} terms each", va="center", color=MUTED)
        axes.annotate("", (middle, 7.1), (middle, 5.9), arrowprops=_ARROW)
        _box(axes, middle - 2.4, 7.2, 4.8, 1.1, PEER)
        _in(axes, middle, 7.75, "score", color=PAPER)
        axes.text(middle + 2.8, 7.75, "one sum in 32 bits", va="center", color=MUTED)

    return compose(
        draw,
        name="draw-pairs",
        heights=(2.9, 2.7),
        alt=f"{2 * terms} elements of Q above {2 * terms} of K, in pairs of neighbours. One HFMA2 multiplies elements "
        f"{2 * lit} and {2 * lit + 1}, and adds to two sums in 16 bits, of even and of odd elements. After {terms} "
        "terms each, both are added to the score in 32 bits.",
        caption=f"The QK GEMM of 02: one instruction multiplies elements {2 * lit} and {2 * lit + 1} of a row of Q by "
        f"those of a key. After {terms} pairs both sums go to the 32-bit score and begin again at zero.",
    )


def sharing() -> Chart:
    """Who owns what of scores and output in 02 and in 03."""
    one = _constants("03_warp_rows")
    rows, keys, lanes, lane = one["ROWS_PER_WARP"], one["TILE_KV"], one["WARP"], 5
    mine = [key for key in range(keys) if key % lanes == lane]
    columns = [2 * lane + 2 * lanes * pair + half for pair in range(one["LANE_PAIRS"]) for half in (0, 1)]
    panels: Sequence[tuple[str, str, int, Callable[[int, int], bool]]] = (
        ("02: a thread has a row", "scores", keys, lambda row, column: row == lane),
        ("03: a lane has keys", "scores", keys, lambda row, column: column in mine),
        ("03: then columns", "output", HEAD_DIM, lambda row, column: column in columns),
    )

    def draw(figure: Figure, layout: Layout) -> None:
        for axes, (title, what, width, owned) in zip(_panels(figure, layout, 3), panels, strict=True):
            _bare(axes, (-0.5, width + 0.5), (-0.3, rows + 2.2))
            axes.set_title(title)
            for row in range(rows):
                _box(axes, 0, row, width, 0.86, GRID, linewidth=0)
                for column in range(width):
                    if owned(row, column):
                        _box(axes, column, row, 1, 0.86, STAGE, linewidth=0)
            _in(axes, width / 2, rows + 1.2, f"{what}: {rows} rows by {width}", color=MUTED)

    return compose(
        draw,
        name="draw-sharing",
        heights=(2.4, 4.6),
        alt=f"Three grids of {rows} rows. In 02 one thread owns one row of the scores. In 03 lane {lane} owns keys "
        f"{' and '.join(map(str, mine))} of every row of its warp, and then output columns "
        f"{' and '.join(map(str, columns))}.",
        caption=f"What one thread owns (blue): in 02 a row; in 03 every {lanes}nd key of {rows} rows, and then "
        f"{len(columns)} columns of their output.",
    )


def trip() -> Chart:
    """The way of a score through shared memory in 04 and 05."""
    sizes = {one.name: one.size for one in text.shared_memory(registry.get("05_wmma"), HEAD_DIM)}
    steps = (
        ("QK GEMM", 0, STAGE),
        (f"S: {sizes['S']:,} bytes", 1, PEER),
        ("softmax", 0, STAGE),
        (f"P: {sizes['P']:,} bytes", 1, PEER),
        ("PV GEMM", 0, STAGE),
    )

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.1, 10.6), (-0.5, 3.0))
        axes.text(0, -0.15, "registers", color=MUTED, va="bottom")
        axes.text(0, 2.95, "shared memory", color=MUTED, va="bottom")
        for place, (words, row, colour) in enumerate(steps):
            x = 2.1 * place
            _box(axes, x, 1.7 * row, 2.0, 0.9, colour)
            _in(
                axes,
                x + 1.0,
                1.7 * row + 0.45,
                words if layout == "wide" else words.replace(": ", "\n").replace("bytes", "B"),
                color=PAPER,
            )
            if place:
                start, end = ((x - 0.6, 0.95), (x + 0.5, 1.65)) if row else ((x - 0.6, 1.65), (x + 0.5, 0.95))
                axes.annotate("", end, start, arrowprops=_ARROW)

    return compose(
        draw,
        name="draw-trip",
        heights=(2.0, 2.1),
        alt=f"Scores leave the QK GEMM for shared memory, {sizes['S']:,} bytes a block, come back for the "
        "softmax, and "
        f"leave again as weights, {sizes['P']:,} bytes, for the PV GEMM.",
        caption="The way of a tile's scores where WMMA hides the layout of its fragments, with the bytes that a "
        "block of "
        "05 has for them. 04 does the same, with scalar arithmetic in place of the last step.",
    )


def factors() -> Chart:
    """How a row's factor meets its row of the output in 05, whatever the layout of a fragment is."""
    size, row, column = _constants("05_wmma")["WMMA_TILE"], 5, 9

    def draw(figure: Figure, layout: Layout) -> None:
        output, factor = _panels(figure, layout, 2)
        for axes, title in ((output, "output: accumulators"), (factor, "factors: equal columns")):
            _bare(axes, (-0.2, size + 0.2), (-0.2, size + 1.9), equal=True)
            axes.set_title(title)
            for y in range(size):
                for x in range(size):
                    lit, same = (y, x) == (row, column), y == row and axes is factor
                    _box(axes, x, y, 1, 1, STAGE if lit else FAINT if same else GRID, linewidth=0.5)
                    if axes is factor:
                        _in(axes, x + 0.5, y + 0.5, y, color=PAPER if lit else MUTED, fontsize=6)
            said = "number: the row that the factor is of" if axes is factor else "blue: element i of a lane"
            _in(axes, size / 2, size + 1.2, said, color=MUTED)

    return compose(
        draw,
        name="draw-factors",
        heights=(3.6, 6.6),
        alt=f"Two grids of {size} by {size}: the output's accumulators, and a tile that has row r's factor in every "
        "column of row r. Element i of a lane lies in the same place of both.",
        caption=f"Rescaling in 05. A fragment of the output and one of the factors are of the same type, {size} × "
        f"{size}, so element i of a lane is of the same row in both; where in that row does not matter, because its "
        "factors are all equal.",
    )


def _lanes(
    axes: Axes,
    rows: Sequence[str],
    spans: Iterable[Span],
    *,
    end: float,
    height: float = 0.62,
    letter: float = 0.0,
) -> None:
    """A timeline: named rows, and spans. Words that would not fit at `letter` of time for each letter are left out."""
    _bare(axes, (0, end), (-0.6, len(rows) - 0.1))
    for row, name in enumerate(rows):
        axes.text(0, row - 0.33, name, ha="left", va="bottom", color=MUTED, fontsize="small")
        axes.plot([0, end], [row + height / 2] * 2, color=GRID, linewidth=0.8, zorder=0)
    for row, start, stop, words, colour, low, high in spans:
        left, right = max(start, 0.0), min(stop, end)
        if left < right and low < high:
            top, share = row - 0.25 + (1 - high) * height, (high - low) * height
            _box(axes, left, top, right - left, share, colour, linewidth=1 if high - low == 1 else 0)
            if words and right - left > max(0.9, letter * len(words)):
                _in(axes, (left + right) / 2, top + share / 2, words, color=PAPER, fontsize="small")


def pipeline() -> Chart:
    """Copies and arithmetic of a block in 05 and in 06."""
    stages, count, copy, work = _constants("06_cp_async")["PIPELINE_STAGES"], 4, 1.6, 2.4

    def spans(ring: int) -> list[Span]:
        found, free, copied, done = [], 0.0, 0.0, [0.0] * count
        for tile in range(count):
            # A tile's buffer is free once the tile that it held before is used up.
            start = max(copied, done[tile - ring] if tile >= ring else 0.0)
            copied = start + copy
            begin = max(copied, free)
            free = done[tile] = begin + work
            found += [Span(0, start, copied, f"tile {tile}", ACCENT), Span(1, begin, free, f"tile {tile}", STAGE)]
        return found

    def draw(figure: Figure, layout: Layout) -> None:
        before, after = list(figure.subplots(2, 1))
        end = max(span[2] for span in spans(1))
        for axes, ring, title in ((before, 1, "05: one buffer"), (after, stages, f"06: a ring of {stages} buffers")):
            _lanes(axes, ("copies from global memory", "tensor cores and softmax"), spans(ring), end=end)
            axes.set_title(title)

    return compose(
        draw,
        name="draw-pipeline",
        heights=(2.9, 3.1),
        alt=f"Timelines. With one buffer each copy waits until the tile before is used up. With {stages} buffers "
        "the next "
        "tile is copied while this one is multiplied, and only the first copy is waited for.",
        caption=f"Copies and arithmetic of one block. With {stages} buffers a copy runs beside the arithmetic of "
        "the tile "
        f"before. {NOT_TO_SCALE}",
    )


# --- 07 and 08: fragments and banks -----------------------------------------------------------------------------------


def lane_of(row: int, column: int, row_lanes: int) -> int:
    """The lane that holds an element of a 16 × 8 accumulator of mma.sync: two columns, four lanes a row."""
    return row % 8 * row_lanes + column // 2 % row_lanes


def fragment() -> Chart:
    """Which lane holds which score after mma.sync, and where the same registers stand in the next one."""
    one = _constants("07_mma_registers")
    rows, columns, lanes = one["MMA_M"], one["MMA_N"], one["ROW_LANES"]
    chosen = 5

    def draw(figure: Figure, layout: Layout) -> None:
        first, second = (
            _panels(figure, layout, 2, width_ratios=[1, 1]) if layout == "wide" else _panels(figure, layout, 2)
        )
        for axes, title, note in (
            (first, "S: two accumulators", "columns 0 to 7 and 8 to 15 of the scores"),
            (second, "P: first operand of the PV GEMM", "the same registers, rounded and packed"),
        ):
            _bare(axes, (-0.2, 2 * columns + 0.5), (-1.2, rows + 0.2), equal=True)
            axes.set_title(title)
            _in(axes, columns, -0.6, note, color=MUTED, fontsize="small")
            for row in range(rows):
                for column in range(2 * columns):
                    lane = lane_of(row, column, lanes)
                    gap = 0.3 if axes is first and column >= columns else 0.0
                    colour = STAGE if lane == chosen else GRID
                    _box(axes, column + gap, row, 1, 1, colour, linewidth=0.5)
                    if layout == "wide" or lane == chosen:
                        look = {"color": PAPER if lane == chosen else MUTED, "fontsize": 6}
                        _in(axes, column + gap + 0.5, row + 0.5, lane, **look)

    return compose(
        draw,
        name="draw-fragment",
        heights=(3.9, 6.6),
        alt=f"A grid of {rows} rows by {2 * columns} columns, each cell with the lane that holds it. Lane "
        f"{chosen} holds two "
        f"neighbouring columns of rows {chosen // lanes} and {chosen // lanes + 8} in each block of {columns}. "
        "The first "
        "operand of the next product has the same lanes in the same places.",
        caption=f"Lane numbers over a warp's scores: {lanes} lanes share a row, and lane {chosen} (blue) holds "
        "two columns of "
        "two rows in every block of 8. The next product wants its first operand in exactly these places, so "
        "probabilities do not move.",
    )


def bank_of(row: int, chunk: int, *, row_bytes: int, swizzle: bool, rows: int, chunk_bytes: int) -> int:
    """The first of the banks that a chunk of a row of shared memory lies in."""
    place = chunk ^ row % rows if swizzle else chunk
    return (row * row_bytes + place * chunk_bytes) // BANK_BYTES % BANKS


def conflicts(**layout: Any) -> int:
    """How many wavefronts reading one chunk of 8 rows takes: the most rows that meet in one bank."""
    banks = [bank_of(row, 0, **layout) for row in range(layout["rows"])]
    return max(banks.count(bank) for bank in banks)


def swizzle_layouts() -> dict[str, dict[str, Any]]:
    """Shared memory of K without padding, with that of 07, and swizzled as in 08, as `bank_of` takes it."""
    padded, one = _constants("07_mma_registers"), _constants("08_swizzle")
    common = {"rows": one["MATRIX"], "chunk_bytes": one["CHUNK"] * 2}
    return {
        "rows as they are": {"row_bytes": HEAD_DIM * 2, "swizzle": False, **common},
        f"07: {padded['PADDING'] * 2} bytes of padding": {
            "row_bytes": padded["STRIDE"] * 2,
            "swizzle": False,
            **common,
        },
        "08: swizzled": {"row_bytes": one["STRIDE"] * 2, "swizzle": bool(one["SWIZZLE"]), **common},
    }


def swizzle() -> Chart:
    """Where the chunks of 8 rows lie in the banks, before and after."""
    layouts = swizzle_layouts()
    rows = next(iter(layouts.values()))["rows"]
    chunks, chosen = HEAD_DIM // 8, 2

    def draw(figure: Figure, layout: Layout) -> None:
        for axes, (title, what) in zip(_panels(figure, layout, len(layouts)), layouts.items(), strict=True):
            _bare(axes, (-0.1, BANKS + 0.1), (-1.6, rows + 1.4))
            axes.set_title(title)
            for row in range(rows):
                for chunk in range(chunks):
                    bank = bank_of(row, chunk, **what)
                    lit = chunk == chosen
                    _box(axes, bank, row, 4, 1, STAGE if lit else GRID, linewidth=0.8)
                    _in(axes, bank + 2, row + 0.5, chunk, color=PAPER if lit else MUTED, fontsize="small")
            most = conflicts(**what)
            for bank in range(0, BANKS, 8):
                name = "bank 0" if bank == 0 else str(bank)
                axes.text(bank, -0.2, name, color=MUTED, fontsize="small", va="bottom")
            said = f"{most} rows in one bank: {most} passes" if most > 1 else "every row in another bank: one pass"
            _in(axes, BANKS / 2, rows + 0.8, said, color=LOSS if most > 1 else ACCENT)

    counts = "; ".join(f"{title}: {conflicts(**what)}" for title, what in layouts.items())
    return compose(
        draw,
        name="draw-swizzle",
        heights=(2.7, 6.9),
        alt=f"Eight rows of a tile over 32 banks, with chunk {chosen} of each row marked. Passes that reading it "
        "takes: "
        f"{counts}.",
        caption="Eight rows of K over the 32 banks of shared memory; the numbers are chunks of 16 bytes. "
        "`ldmatrix` reads one "
        f"chunk of eight rows at once, here chunk {chosen}. Padding and the swizzle both avoid the conflict; the "
        "swizzle needs no memory for it.",
    )


# --- 09 to 13: warpgroups ---------------------------------------------------------------------------------------------


def wgmma() -> Chart:
    """A warpgroup's tile in 09: rows of four warps, columns of one instruction."""
    one = _constants("09_wgmma")
    rows, keys, warps = one["WGMMA_ROWS"], one["TILE_KV"], one["WARPGROUP_WARPS"]
    steps = HEAD_DIM // one["WGMMA_STEP"]

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.2, 13.4), (-1.2, 7.9), equal=True)
        _box(axes, 4.4, 0, 8.8, 1.7, STAGE)
        _in(axes, 8.8, 0.85, f"K, {keys} keys, shared memory", color=PAPER)
        _box(axes, 0, 2.2, 3.8, 4.6, STAGE)
        _in(axes, 1.9, 4.5, f"Q, {rows} rows\nshared\nmemory", color=PAPER)
        for warp in range(warps):
            _box(axes, 4.4, 2.2 + warp * 4.6 / warps, 8.8, 4.6 / warps, ACCENT)
            _in(axes, 8.8, 2.2 + (warp + 0.5) * 4.6 / warps, f"warp {warp}: {rows // warps} rows of S", color=PAPER)
        _in(axes, 8.8, 7.3, f"registers: {rows * keys // 128} scores a thread", color=MUTED)
        _in(axes, 6.6, -0.7, f"one QK GEMM: {steps} instructions m{rows}n{keys}k{one['WGMMA_STEP']}", color=MUTED)

    return compose(
        draw,
        name="draw-wgmma",
        heights=(3.6, 2.5),
        alt=f"Four warps of a warpgroup hold {rows} by {keys} scores in registers, {rows // warps} rows each. Q "
        "and K are "
        "read from shared memory by the instruction.",
        caption=f"One warpgroup's QK GEMM in 09. Four warps issue {steps} `wgmma` instructions together; both "
        "operands stay in "
        "shared memory, and no thread loads a fragment.",
    )


def timeline(
    stage_id: str, rows: Sequence[str], spans: Sequence[Span], *, alt: str, caption: str, **source: Any
) -> Chart:
    """What goes on on an SM, in cycles from 0 on; every stage's timeline has the same scale.

    Args:
        source: provenance and data files of the lengths.
    """
    looks = {"QK GEMM": STAGE, "PV GEMM": ACCENT, "softmax": PEER}

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        end = TIMELINE_CYCLES[layout]
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


def ring() -> Chart:
    """Producer, ring and consumers of 10, with the barriers between them."""
    one = _constants("10_warp_specialized")
    stages, consumers, keys = one["PIPELINE_STAGES"], one["NUM_CONSUMERS"], one["TILE_KV"]

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.1, 12.1), (-0.9, 5.4))
        _box(axes, 0, 1.3, 3.0, 2.4, ACCENT)
        _in(axes, 1.5, 2.5, f"producer\n{one['PRODUCER_REGISTERS']} registers\na thread", color=PAPER)
        for stage in range(stages):
            _box(axes, 4.7, stage * 4.8 / stages, 2.4, 4.8 / stages, STAGE)
            _in(axes, 5.9, (stage + 0.5) * 4.8 / stages, f"stage {stage}\n{keys} keys", color=PAPER)
        for consumer in range(consumers):
            _box(axes, 8.9, consumer * 4.8 / consumers, 3.1, 4.8 / consumers, PEER)
            words = f"consumer {consumer}\n{one['CONSUMER_REGISTERS']} registers\na thread"
            _in(axes, 10.45, (consumer + 0.5) * 4.8 / consumers, words, color=PAPER)
        for x, words in ((3.0, "TMA"), (7.1, "full")):
            axes.annotate("", (x + 1.65, 2.0), (x + 0.05, 2.0), arrowprops=_ARROW)
            _in(axes, x + 0.85, 1.6, words, fontsize="small")
            axes.annotate("", (x + 0.05, 3.0), (x + 1.65, 3.0), arrowprops=_ARROW)
            _in(axes, x + 0.85, 3.4, "empty", fontsize="small")
        _in(axes, 5.9, -0.5, "ring of K and V in shared memory", color=MUTED)

    return compose(
        draw,
        name="draw-ring",
        heights=(2.6, 2.6),
        alt=f"A producer fills a ring of {stages} stages by TMA loads. Full barriers tell {consumers} consumers "
        "that a tile "
        "has come; empty barriers tell the producer that all of them are done with it.",
        caption=f"A block of 10: one producer warpgroup, {stages} pipeline stages of {keys} keys each for K and V, "
        f"{consumers} consumer warpgroups of {one['WGMMA_ROWS']} rows. An arrow is an mbarrier or a copy.",
    )


def early() -> Chart:
    """One tile of a consumer in 13 and in 14."""
    one = _constants("14_stale_max")
    share = one["BEFORE_PV"] / one["NUM_SCORES"]
    gemm, search, powers, rounding = 1.6, 1.9, 4.0, 1.2

    def tile(has_search: bool) -> list[Span]:
        spans = [Span(0, 0.0, gemm, "QK", STAGE), Span(0, gemm, 2 * gemm, "PV before", ACCENT)]
        at = gemm
        if has_search:
            spans.append(Span(1, at, at + search, "maximum", LOSS))
            at += search
        spans.append(Span(1, at, at + powers, "exponentials", PEER))
        spans.append(Span(1, at + powers, at + powers + rounding, "round", FAINT))
        return spans

    def draw(figure: Figure, layout: Layout) -> None:
        end = gemm + search + powers + rounding + 0.1
        for axes, has_search, title in zip(
            list(figure.subplots(2, 1)),
            (True, False),
            ("13: the tile's own maximum", "14: an old maximum"),
            strict=True,
        ):
            _lanes(axes, ("tensor cores", "softmax of the same warpgroup"), tile(has_search), end=end)
            axes.set_title(title)
        axes.axvline(gemm + share * powers, 0.05, 0.5, color=INK, linewidth=1.2)

    return compose(
        draw,
        name="draw-early",
        heights=(2.7, 2.9),
        alt="One tile of a warpgroup. In 13 the search for the maximum stands between the QK GEMM and the "
        "exponentials; in "
        "14 the exponentials start when the scores are there.",
        caption="One tile of one consumer. The search for the maximum, with its shuffles, leaves the path. The "
        "black line is "
        f"where the source of 14 waits for the PV GEMM: after {one['BEFORE_PV']} of {one['NUM_SCORES']} "
        "exponentials of a "
        f"thread. {NOT_TO_SCALE}",
    )


def joint() -> Chart:
    """The end of a work tile in 12 and in 13."""
    last, first = Span(0, 0.0, 1.6, "last PV", ACCENT), "first QK"
    before = (last, Span(1, 1.6, 4.2, "round, write", PEER), Span(0, 4.2, 5.8, first, STAGE))
    store = Span(1, 2.7, 5.0, "TMA store", FAINT)
    after = (last, Span(1, 1.6, 2.7, "round", PEER), store, Span(0, 2.7, 4.3, first, STAGE))

    def draw(figure: Figure, layout: Layout) -> None:
        names = ("tensor cores, one consumer", "its output")
        for axes, spans, title in zip(
            list(figure.subplots(2, 1)),
            (before, after),
            ("12: the warps write the output", "13: a TMA store does"),
            strict=True,
        ):
            _lanes(axes, names, spans, end=6.2)
            axes.set_title(title)

    return compose(
        draw,
        name="draw-joint",
        heights=(2.7, 2.9),
        alt="The end of a work tile. In 12 a consumer rounds and writes its output before the next QK GEMM. In "
        "13 it rounds, "
        "starts a TMA store that runs on by itself, and issues the next QK GEMM.",
        caption="Between two work tiles, for one consumer; the others' GEMMs run meanwhile. In 13 the next work "
        "tile is waited "
        f"for under the last PV GEMM, and the store runs beside the next QK GEMM. {NOT_TO_SCALE}",
    )


def waves() -> Chart:
    """Causal work tiles on a few SMs: a block each in waves, and persistent blocks that take the longest first."""
    one = _constants("12_persistent")
    problem = Problem.parse(FIRST_SHAPE, mask="causal")
    rows, keys, sms, heads = one["TILE_Q"], one["TILE_KV"], 6, 3
    per_head = [-(-min((tile + 1) * rows, problem.q_len) // keys) for tile in range(-(-problem.q_len // rows))]
    arriving, longest = per_head * heads, sorted(per_head * heads, reverse=True)

    def assigned(lengths: Sequence[int], start_up: float) -> tuple[list[tuple[int, float, float, int]], float]:
        free = [(0.0, sm) for sm in range(sms)]
        heapq.heapify(free)
        spans = []
        for length in lengths:
            when, sm = heapq.heappop(free)
            spans.append((sm, when + start_up, when + start_up + length, length))
            heapq.heappush(free, (when + start_up + length, sm))
        return spans, max(when for when, _ in free)

    (before, first_end), (after, last_end) = assigned(arriving, 1.0), assigned(longest, 0.0)

    def draw(figure: Figure, layout: Layout) -> None:
        for axes, spans, end, title in zip(
            list(figure.subplots(2, 1)),
            (before, after),
            (first_end, last_end),
            ("11: a block for each tile of Q, in order", "12: blocks stay and take the longest first"),
            strict=True,
        ):
            _bare(axes, (0, first_end * 1.02), (-0.2, sms + 0.1))
            axes.set_title(title)
            for sm, start, stop, length in spans:
                _box(axes, start, sm, stop - start, 0.86, STAGE, alpha=0.35 + 0.65 * length / max(per_head))
                if stop - start > 4:
                    _in(axes, (start + stop) / 2, sm + 0.43, length, color=PAPER, fontsize="small")
            axes.axvline(end, color=LOSS, linewidth=1.4)

    return compose(
        draw,
        name="draw-waves",
        heights=(3.3, 3.9),
        alt=f"Work tiles of {heads} causal heads on {sms} SMs. In order and with a start-up for each block the "
        "last ends at "
        f"{first_end:g} units; handed out longest first without start-ups at {last_end:g}.",
        caption=f"Causal work tiles of {rows} rows, {heads} heads of {problem.q_len:,} tokens, on {sms} SMs (a "
        "GPU has many more). "
        f"The number is a work tile's count of K/V tiles of {keys} keys, which is also its length here. Red: the "
        "end. Modelled: "
        "a start-up of one tile for each block in 11, none in 12.",
    )


# --- 12 to 16: shared memory, references, ones ------------------------------------------------------------------------


def bytes_of_block() -> Chart:
    """Shared memory of 16's block in bytes."""
    stage = registry.get("16_ones_column")
    members = [one for one in text.shared_memory(stage, HEAD_DIM) if one.kind == "element"]
    rest = sum(one.size for one in text.shared_memory(stage, HEAD_DIM) if one.kind != "element")
    limit = _constants(stage.id)["BLOCK_SMEM_BYTES"]
    colours = {"Q": ACCENT, "K": STAGE, "V": PEER, "ones": LOSS, "O": FAINT}

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (0, limit * 1.02), (-0.9, 2.4))
        for one in members:
            for place in range(one.count):
                part = one.size / one.count
                _box(axes, one.offset + place * part, 0, part, 1, colours[one.name])
                if part > limit / 20:
                    _in(axes, one.offset + (place + 0.5) * part, 0.5, f"{one.name}{place}", color=PAPER)
            if one.size > limit / 20 or layout == "wide":
                high = one.name == "ones"
                axes.text(
                    one.offset,
                    -0.45 if high else 1.3,
                    f"{one.name}\n{one.size:,}" if not high else f"ones {one.size:,}",
                    color=MUTED,
                    fontsize="small",
                    va="top" if not high else "center",
                )
        end = members[-1].offset + members[-1].size
        _box(axes, end, 0, limit - end, 1, GRID)
        _in(axes, (end + limit) / 2, 0.5, "free" if layout == "wide" else "", color=MUTED)

    total = members[-1].offset + members[-1].size + rest
    listed = ", ".join(f"{one.name} {one.size:,} bytes at {one.offset:,}" for one in members)
    return compose(
        draw,
        name="draw-smem",
        heights=(1.7, 1.9),
        alt=f"Shared memory of a block: {listed}; mbarriers and work tiles {rest} bytes; {limit:,} bytes may be used.",
        caption="Shared memory of one block of 16 in bytes: two stages of Q, three of K and of V, the ones, and "
        "the output on its "
        f"way out. Mbarriers and work tiles take {rest} bytes more; {total:,} of {limit:,} are used.",
    )


_WAITING: Mapping[str, tuple[str, str]] = {
    "Q_full": ("the TMA load of Q, by its bytes", "consumers; the warps that fetch K and V"),
    "Q_empty": ("each consumer warp, and a K/V warp", "the warp that fetches Q"),
    "work_known": ("the warp that fetches Q, at head dim 256", "the warps that fetch K and V, there"),
    "end_near": ("the warp that fetches K and V", "the warp that fetches Q"),
    "K_full": ("the TMA load of K, by its bytes", "consumers, before the QK GEMM"),
    "K_empty": ("each consumer warp, after the QK GEMM", "the warp that fetches K and V"),
    "V_full": ("the TMA load of V, by its bytes", "consumers, before the PV GEMM"),
    "V_empty": ("each consumer warp, after the PV GEMM", "the warp that fetches K and V"),
}


def barriers() -> str:
    """The mbarriers of 16: who arrives, who waits, how many arrivals end a phase, how many there are."""
    stage = registry.get("16_ones_column")
    counts = text.arrivals(stage, HEAD_DIM)
    lines = [
        (code(one.name), *_WAITING[one.name], counts[one.name], one.count)
        for one in text.shared_memory(stage, HEAD_DIM)
        if one.kind == "ptx::Mbarrier"
    ]
    return markdown(("mbarrier", "who arrives", "who waits", "arrivals a phase", "how many"), lines, left=3)


_SCORES = (3.0, 1.0, 4.5, 2.0, 9.0, 14.0, 20.5, 12.0, 24.0, 18.0)
"""A made-up row: the largest score of each tile in powers of two."""


def reference() -> Chart:
    """What a growing row of scores does to 14's and 15's reference."""
    old, new = _constants("14_stale_max"), _constants("15_renormalize")
    limits = {"14": old["SUM_LIMIT"].bit_length() - 1, "15": new["SUM_LIMIT"].bit_length()}
    start = {"14": _SCORES[0], "15": _SCORES[0] + new["HEADROOM"]}

    def walked(which: str) -> tuple[list[float], list[int]]:
        at, path, events = start[which], [], []
        for tile, score in enumerate(_SCORES):
            if score - at >= limits[which]:
                events.append(tile)
                at = score if which == "14" else at + (int(score - at) - new["SETTLED"])
            path.append(at)
        return path, events

    def draw(figure: Figure, layout: Layout) -> None:
        panels = _panels(figure, layout, 2, sharey=True)
        for axes, (which, title, event) in zip(
            panels,
            (("14", "14: recompute", "tile computed again"), ("15", "15: move the reference", "moved by 2ⁿ")),
            strict=True,
        ):
            path, events = walked(which)
            tiles = range(len(_SCORES))
            top = [at + limits[which] for at in path]
            axes.fill_between(tiles, path, top, step="post", color=FAINT, alpha=0.3, linewidth=0)
            axes.step(tiles, path, where="post", color=STAGE, linewidth=1.8)
            axes.plot(tiles, _SCORES, "o", color=INK, markersize=5)
            for tile in events:
                axes.plot([tile], [_SCORES[tile]], "o", color=LOSS, markersize=9, fillstyle="none")
                axes.annotate(event, (tile, _SCORES[tile]), (-8, 6), textcoords="offset points", ha="right", color=LOSS)
            axes.set_title(title)
            axes.set_xlabel("tile")
            axes.set_xticks(list(tiles))
            axes.set_ylim(-2, 44)
            axes.text(
                0.1,
                limits[which] + start[which] - 0.6,
                "range of a 16-bit sum",
                color=MUTED,
                fontsize="small",
                va="top",
            )
            axes.text(3.3, start[which] - 0.8, "reference", color=STAGE, fontsize="small", va="top")
        panels[0].set_ylabel("powers of two")

    return compose(
        draw,
        name="draw-reference",
        heights=(2.9, 5.0),
        alt="Scores of a row by tile, the reference they are compared with, and the range above it that a 16-bit "
        "sum holds. "
        "Where a score leaves the range, 14 computes the tile again and 15 moves the reference.",
        caption="A made-up row whose scores grow. Dots: a tile's largest score; blue: the reference; shaded: how "
        "far above it "
        f"a sum may lie in float16 (2^{limits['14']} in 14, just below 2^{limits['15']} in 15). Where a dot "
        "leaves the shade, 14 "
        "computes the tile again, and 15 multiplies by a power of two.",
    )


def ones() -> Chart:
    """V with its column of ones in 16."""
    one = _constants("16_ones_column")
    keys, columns, extra = one["TILE_KV"], HEAD_DIM, one["ONES"]

    def draw(figure: Figure, layout: Layout) -> None:
        (axes,) = _panels(figure, layout, 1)
        _bare(axes, (-0.2, 13.2), (-0.7, 5.2), equal=True)
        _box(axes, 0, 1.2, 3.2, 2.4, PEER)
        _in(axes, 1.6, 2.4, f"P\n64 × {keys}", color=PAPER)
        _in(axes, 3.6, 2.4, "·", fontsize="large")
        _box(axes, 4.0, 0.4, 3.2, 4.0, STAGE)
        _in(axes, 5.6, 2.4, f"V\n{keys} × {columns}", color=PAPER)
        _box(axes, 7.25, 0.4, 0.55, 4.0, LOSS)
        _in(axes, 7.53, 2.4, "1\n1\n1\n1", color=PAPER)
        _in(axes, 8.3, 2.4, "=", fontsize="large")
        _box(axes, 8.8, 1.2, 3.2, 2.4, ACCENT)
        _in(axes, 10.4, 2.4, f"O\n64 × {columns}", color=PAPER)
        _box(axes, 12.05, 1.2, 0.55, 2.4, LOSS)
        _in(axes, 12.33, 2.4, "Σ", color=PAPER)
        _in(axes, 7.53, 4.75, f"{extra} columns of ones", color=MUTED)
        _in(axes, 12.0, 4.0, "sums of P", color=MUTED)

    return compose(
        draw,
        name="draw-ones",
        heights=(2.6, 1.6),
        alt=f"P times V, with {extra} columns of ones beside V, gives the output and, in {extra} more columns, "
        "each row's sum of "
        "the rounded P.",
        caption=f"The PV GEMM of 16: {extra} columns of ones stand beside V, the fewest that the instruction's N "
        "can grow by, so N "
        f"is {one['O_COLUMNS']}, and the output's last columns are the sums of the rounded probabilities.",
    )


DRAWINGS: Mapping[str, Callable[[], Chart]] = {
    "tiles": tiles,
    "scalar": scalar,
    "loads": loads,
    "pairs": pairs,
    "sharing": sharing,
    "trip": trip,
    "factors": factors,
    "pipeline": pipeline,
    "fragment": fragment,
    "swizzle": swizzle,
    "wgmma": wgmma,
    "ring": ring,
    "waves": waves,
    "joint": joint,
    "early": early,
    "reference": reference,
    "ones": ones,
    "smem": bytes_of_block,
}
"""Each by the name that the journey takes it in by."""
