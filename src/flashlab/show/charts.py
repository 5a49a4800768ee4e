"""Figures drawn from records: every one in a wide and a narrow layout, each recoloured for light and dark pages.

A `Chart` is what a figure is outside matplotlib: SVG text, an alternative text, a caption and where its numbers come
from. JupyterLab shows it by itself; report.py writes its variants beside the site.

Colours are Okabe and Ito's, which stay apart for every common colour blindness; shape or a label says the same again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from flashlab.core.errors import NoDataError
from flashlab.core.problem import STANDARD_SHAPES, Problem, suite
from flashlab.kernels import peers, registry
from flashlab.query import roofline as roofline_model
from flashlab.query import select
from flashlab.record.store import Cache, Measurement, Regime, StageProfile
from flashlab.show.tables import beside_note, beside_title, elsewhere_note, number, peer_title, short_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flashlab.query.select import AgainstPeers, Contest, Results

Layout = Literal["wide", "narrow"]
Theme = Literal["light", "dark"]
LAYOUTS: tuple[Layout, ...] = ("wide", "narrow")
THEMES: tuple[Theme, ...] = ("light", "dark")
MIME = "application/vnd.flashlab.chart+json"
"""A notebook output of this type is a whole `Chart`; report.py turns it into the page's figure."""

_INCHES: dict[Layout, float] = {"wide": 7.6, "narrow": 3.7}

INK, MUTED, GRID, SURFACE = "#1f2430", "#5b6472", "#d5dae1", "#fdfefe"
STAGE, PEER, ACCENT, LOSS, FAINT = "#0070b0", "#c65d00", "#007a5a", "#b3331a", "#9fb4c4"
_CATEGORIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#a89f2c", "#7a8290", "#b9c0ca")
_OF_LIBRARIES = ("#5f7fbf", "#8a6fd1", "#8c6d4f", "#6b8e23", "#3f8f8b", "#c98a5a", "#2aa7c4", "#b5569c", "#c0504d")
"""Where libraries stand beside so many stages that they need colours of their own."""
_DARK: dict[str, str] = {
    INK: "#e8ecf1",
    MUTED: "#a3adba",
    GRID: "#3a424e",
    STAGE: "#62b8ef",
    PEER: "#f5a04c",
    ACCENT: "#3fc79c",
    LOSS: "#ff8a6b",
    FAINT: "#5a7385",
}
_PAGE: dict[Theme, str] = {"light": "#ffffff", "dark": "#1e2229"}
"""A page's ground, for gaps between areas."""
PAPER = "#fefdfe"
"""Filled with the page's ground: inside a hollow mark and behind a label. (A fill of SURFACE is left out.)"""
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, ready to show."""

    name: str
    """File name stem, unique within a report."""
    alt: str
    """What a reader who does not see it needs to know."""
    caption: str
    """One sentence: what is drawn."""
    provenance: str
    """GPU, clocks, problem, regime, date, commit; empty where nothing was measured."""
    data_files: tuple[str, ...]
    """Raw data behind it, relative to data/."""
    svg: Mapping[Layout, str]
    """SVG in the light theme on a solid ground."""

    def themed(self, layout: Layout, theme: Theme) -> str:
        """The SVG for a page of that theme, with a transparent ground."""
        text = self.svg[layout].replace(f"fill: {SURFACE}", "fill: none")
        text = text.replace(SURFACE, _PAGE[theme]).replace(PAPER, _PAGE[theme])
        if theme == "dark":
            text = re.sub("|".join(_DARK), lambda match: _DARK[match[0]], text)
        return text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        whole = {
            "name": self.name,
            "alt": self.alt,
            "caption": self.caption,
            "provenance": self.provenance,
            "data_files": list(self.data_files),
            "svg": dict(self.svg),
        }
        return {
            "image/svg+xml": self.svg["wide"],
            "text/plain": f"{self.caption} {self.provenance}".strip(),
            MIME: whole,
        }

    @classmethod
    def from_mime(cls, payload: str | Mapping[str, Any]) -> Chart:
        """The chart in a notebook's output."""
        whole = dict(json.loads(payload) if isinstance(payload, str) else payload)
        whole["data_files"] = tuple(whole["data_files"])
        return cls(**whole)


def _settings(layout: Layout) -> Any:
    size = 9.5 if layout == "wide" else 8.8
    return {
        "svg.fonttype": "none",  # text stays text: sharp, small, in the reader's own font
        "svg.hashsalt": "flashlab",  # the same data gives the same bytes
        "font.family": "DejaVu Sans",  # wider than any system font, so what fits here fits there
        "font.size": size,
        "axes.labelsize": size,
        "axes.titlesize": size + 0.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "xtick.labelsize": size - 0.7,
        "ytick.labelsize": size,
        "legend.fontsize": size - 0.7,
        "legend.frameon": False,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.titlecolor": INK,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": INK,
        "axes.edgecolor": GRID,
        "axes.facecolor": "none",
        "figure.facecolor": SURFACE,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "patch.linewidth": 0,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
    }


def _chart(
    draw: Callable[[Figure, Layout], None],
    *,
    name: str,
    heights: Mapping[Layout, float],
    alt: str,
    caption: str,
    provenance: str = "",
    data_files: tuple[str, ...] = (),
) -> Chart:
    """Draw both layouts; `heights` in inches."""
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.figure import Figure

    svg: dict[Layout, str] = {}
    for layout in LAYOUTS:
        with sns.axes_style("white"), mpl.rc_context(rc=_settings(layout)):
            figure = Figure(figsize=(_INCHES[layout], heights[layout]), layout="constrained")
            draw(figure, layout)
            buffer = StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace("'DejaVu Sans'", _FONT)
        svg[layout] = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return Chart(name=name, alt=alt, caption=caption, provenance=provenance, data_files=data_files, svg=svg)


def size_px(svg: str) -> tuple[int, int]:
    """Width and height of an SVG of this module in CSS pixels."""
    width, height = (float(re.findall(rf'<svg[^>]*? {side}="([0-9.]+)pt"', svg)[0]) for side in ("width", "height"))
    return round(width * 4 / 3), round(height * 4 / 3)


def _label(row: Measurement) -> str:
    return row.name if row.kind == "stage" else peer_title(row.name)


def _spread(row: Measurement, regime: Regime, cache: Cache) -> tuple[float, float, float]:
    """Rate at the 95th percentile of the times, at the median, and at the 5th."""
    import numpy as np

    samples = row.samples_of(regime, cache)
    if samples is None:
        raise NoDataError(f"{row.name}: no {regime} {cache} samples")
    problem = row.problem.problem()
    slow, mid, fast = (problem.tflops(float(t)) for t in np.percentile(samples.time_us, (95, 50, 5)))
    return slow, mid, fast


def _height(rows: int, *, extra: float) -> dict[Layout, float]:
    """Inches for so many named rows (see `_name_rows`) and what stands above and below them."""
    return {"wide": extra + 0.27 * rows, "narrow": extra + 0.37 * rows}


def _name_rows(
    axes: Axes,
    positions: Sequence[float],
    names: Sequence[str],
    layout: Layout,
    *,
    bold: str | Sequence[str] | None = None,
    bars: bool = False,
) -> None:
    """Name the rows of a horizontal chart: beside them where there is width, above each where there is not."""
    strong = {bold} if isinstance(bold, str) else set(bold or ())
    room = 0.7 if layout == "wide" else 1.0
    axes.set_ylim(positions[-1] + 0.7, positions[0] - room)
    if layout == "wide":
        axes.set_yticks(positions, names)
        for tick, name in zip(axes.get_yticklabels(), names, strict=True):
            tick.set_fontweight("bold" if name in strong else "normal")
        return
    axes.set_yticks([])
    for y, name in zip(positions, names, strict=True):
        axes.annotate(
            name,
            (0, y),
            xycoords=("axes fraction", "data"),
            xytext=(0, 7 if bars else 5),
            textcoords="offset points",
            va="bottom",
            weight="bold" if name in strong else "normal",
        )


def _plain_log_ticks(axis: Any, layout: Layout = "wide") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > (3.5 if layout == "wide" else 1.6) else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _require_timed(rows: Sequence[Measurement], regime: Regime, cache: Cache) -> list[Measurement]:
    timed = [row for row in rows if row.samples_of(regime, cache)]
    if not timed:
        raise NoDataError(f"wanted at least one row with {regime} {cache} samples, found none among {len(rows)} rows")
    return timed


def ladder(
    rows: Sequence[Measurement],
    *,
    name: str = "ladder",
    beside: Sequence[Measurement] = (),
    highlight: str | None = None,
    regime: Regime = "burst",
    cache: Cache = "hot",
) -> Chart:
    """Every stage and every library at one problem, TFLOP/s on a logarithmic axis, with the 5th to 95th percentile.

    A logarithmic axis, because rates span orders of magnitude and equal steps then mean equal factors; marks rather
    than bars, because a bar's length would mean nothing there. Rows without a time stay, with the reason.

    Args:
        beside: as `Results.beside` gives them, shown hollow in place of the same libraries' rows without a time.

    Raises:
        NoDataError: no row has a time.
    """
    timed = _require_timed(rows, regime, cache)
    beside = [row for row in beside if row.samples_of(regime, cache)]
    hollow = {row.name for row in beside}
    lines = select.with_beside(rows, beside)
    rates = {row.name: _spread(row, regime, cache) for row in (*timed, *beside)}
    peer = select.fastest_peer(rows, regime, cache)
    stage = select.fastest_stage(rows, regime, cache)

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        low, high = min(r[0] for r in rates.values()), max(r[2] for r in rates.values())
        left, right = low / 1.7, high * (3.0 if layout == "wide" else 4.5)
        axes.set_xscale("log")
        axes.set_xlim(left, right)
        gap = 0.0
        positions: list[float] = []
        for index, row in enumerate(lines):
            if row.kind == "peer" and index and lines[index - 1].kind == "stage":
                gap = 0.6
            y = index + gap
            positions.append(y)
            colour = PEER if row.kind == "peer" else ACCENT if row.name == highlight else STAGE
            if row.name not in rates:
                axes.text(left * 1.06, y, f"{row.status}", va="center", color=MUTED, style="italic")
                continue
            slow, mid, fast = rates[row.name]
            axes.plot([left, mid], [y, y], color=GRID, linewidth=1.2, solid_capstyle="butt", zorder=1)
            axes.plot([slow, fast], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round", zorder=2)
            axes.plot(
                [mid],
                [y],
                marker="D" if row.kind == "peer" else "o",
                markersize=6,
                color=colour,
                markerfacecolor=PAPER if row.name in hollow else colour,
                markeredgewidth=1.4,
                zorder=3,
            )
            factor = ""
            parent = select.parent_of(row, rows)
            if parent is not None and parent.name in rates:
                factor = f"×{number(mid / rates[parent.name][1])}"
            bold = "bold" if row.name == highlight else "normal"
            axes.annotate(
                number(mid), (max(mid, fast), y), xytext=(7, 0), textcoords="offset points", va="center", weight=bold
            )
            if factor:
                axes.text(right, y, factor, va="center", ha="right", color=MUTED)
        if peer is not None:
            axes.axvline(rates[peer.name][1], color=PEER, linewidth=1, linestyle=(0, (3, 3)), alpha=0.8, zorder=0)
        axes.annotate(
            "× parent",
            (1, 1),
            xycoords="axes fraction",
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        names = [beside_title(row) if row.name in hollow else _label(row) for row in lines]
        _name_rows(axes, positions, names, layout, bold=highlight)
        _plain_log_ticks(axes.xaxis, layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("TFLOP/s, logarithmic")

    note = beside_note(rows, beside)
    best = (
        f"The fastest stage, {stage.name}, reaches {number(rates[stage.name][1])} TFLOP/s"
        if stage
        else "No stage has a time"
    )
    library = (
        f"the fastest library in {peer.problem.dtype}, {peer_title(peer.name)}, {number(rates[peer.name][1])}"
        if peer
        else "no library has a time"
    )
    return _chart(
        draw,
        name=name,
        heights=_height(len(rows) + 1, extra=0.65),
        alt=f"Throughput of {len(timed)} stages and libraries on a logarithmic axis. {best}; {library}."
        + (f" {note}" if note else ""),
        caption="Throughput of each stage (circles) and library (diamonds): median, with the 5th to 95th percentile as "
        f"a band, often narrower than the mark. The dashed line is the fastest library in {rows[0].problem.dtype}."
        + (f" Hollow: {note}" if note else "")
        + (f" {late}" if (late := elsewhere_note(rows, regime)) else ""),
        provenance=select.provenance(timed, regime, cache),
        data_files=select.run_files(timed),
    )


def waterfall(
    rows: Sequence[Measurement], *, name: str = "waterfall", regime: Regime = "burst", cache: Cache = "hot"
) -> Chart:
    """What each step multiplied: a bar from the parent's rate to the child's on a logarithmic axis.

    Raises:
        NoDataError: no stage and its parent both have times.
    """
    steps = [
        (row, select.rate(parent, regime, cache) or 0.0, select.rate(row, regime, cache) or 0.0)
        for row in rows
        if (parent := select.parent_of(row, rows))
        and select.rate(parent, regime, cache)
        and select.rate(row, regime, cache)
    ]
    if not steps:
        raise NoDataError("wanted a stage and its parent, both with times, found none")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_xscale("log")
        ends = [value for _, a, b in steps for value in (a, b)]
        axes.set_xlim(min(ends) / 1.6, max(ends) * (1.9 if layout == "wide" else 3.0))
        for y, (_, before, after) in enumerate(steps):
            gain = after >= before
            colour = STAGE if gain else LOSS
            axes.barh(y, after - before, left=before, height=0.5 if layout == "wide" else 0.36, color=colour, alpha=0.9)
            axes.annotate(
                f"×{number(after / before)}" + ("" if gain else " slower"),
                (max(before, after), y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
            if y:
                axes.plot([before, before], [y - 0.75, y - 0.25], color=MUTED, linewidth=0.8)
        _name_rows(axes, range(len(steps)), [row.name for row, _, _ in steps], layout, bars=True)
        _plain_log_ticks(axes.xaxis, layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("TFLOP/s, logarithmic")

    told = ", ".join(f"{row.name} ×{number(after / before)}" for row, before, after in steps)
    return _chart(
        draw,
        name=name,
        heights=_height(len(steps), extra=0.75),
        alt=f"What each step multiplied over its parent: {told}.",
        caption="What each step bought, from the parent's rate to the stage's: equal lengths are equal factors.",
        provenance=select.provenance([row for row, _, _ in steps], regime, cache),
        data_files=select.run_files([row for row, _, _ in steps]),
    )


def shape_label(problem: Problem) -> str:
    """A problem for a chart's axis: what differs between problems of a chart, on two lines."""
    heads = f"H{problem.q_heads}" if problem.q_heads == problem.kv_heads else f"H{problem.q_heads}/{problem.kv_heads}"
    length = f"S{problem.q_len}" if problem.q_len == problem.kv_len else f"S{problem.q_len}/{problem.kv_len}"
    return f"B{problem.batch} {heads}\n{length} D{problem.head_dim}"


def scaling(
    shown: Results,
    *,
    mask: str,
    dtype: str = "float16",
    name: str = "scaling",
    stage_ids: Sequence[str] | None = None,
    regime: Regime = "burst",
    cache: Cache = "hot",
) -> Chart:
    """Every shape at once: rate as a percentage of the fastest library at that shape.

    Raises:
        NoDataError: no problem of that mask and element type has a time.
    """
    problems = [
        p
        for p, rows in shown.problems.items()
        if p.mask == mask
        and p.dtype == dtype
        and (p.shape in STANDARD_SHAPES or p not in _OF_LENGTHS)
        and select.fastest_peer(rows, regime, cache) is not None
    ]
    if not problems:
        raise NoDataError(f"wanted {mask} {dtype} problems with a library's time on {shown.gpu}, found none")
    cells: dict[str, dict[Problem, float]] = {}
    used: list[Measurement] = []
    kinds: dict[str, str] = {}
    for problem in problems:
        rows = shown.rows(problem, stage_ids=stage_ids)
        best = select.fastest_peer(rows, regime, cache)
        top = select.rate(best, regime, cache) if best else None
        for row in rows:
            kinds[row.name] = row.kind
            value = select.rate(row, regime, cache)
            cells.setdefault(row.name, {})
            if value and top:
                cells[row.name][problem] = 100 * value / top
                used.append(row)
    stage_names = [name for name, kind in kinds.items() if kind == "stage" and cells[name]]
    peer_names = [name for name, kind in kinds.items() if kind == "peer" and cells[name]]
    names = stage_names + peer_names

    def draw(figure: Figure, layout: Layout) -> None:
        import numpy as np
        import seaborn as sns
        from matplotlib.colors import LinearSegmentedColormap

        table = np.array([[cells[name].get(problem, math.nan) for problem in problems] for name in names])
        ramp = LinearSegmentedColormap.from_list("rate", ["#f2f5f7", "#9cc9e6", "#2a7fb8", "#0b4a78"])
        axes: Axes = figure.subplots()
        sns.heatmap(
            table,
            ax=axes,
            cmap=ramp,
            vmin=0,
            vmax=100,
            annot=np.array(
                [["" if math.isnan(v) else f"{v:.0f}" if v >= 9.5 else f"{v:.1f}" for v in line] for line in table]
            ),
            fmt="",
            cbar=False,
            linewidths=1.5,
            linecolor=SURFACE,
            annot_kws={"size": 9 if layout == "wide" else 7.2},
        )
        axes.axhline(len(stage_names), color=MUTED, linewidth=1)
        axes.set_yticks(
            [i + 0.5 for i in range(len(names))],
            [n if kinds[n] == "stage" else peer_title(n) for n in names],
            rotation=0,
        )
        labels = [shape_label(p) for p in problems]
        axes.set_xticks(
            [i + 0.5 for i in range(len(problems))],
            labels,
            rotation=90 if layout == "narrow" or len(problems) > _UPRIGHT else 0,
        )
        axes.tick_params(labelsize=8 if layout == "wide" else 7.2)
        axes.set_xlabel(
            "percent of the fastest library's rate at that shape" if layout == "wide" else "% of the fastest library"
        )

    height = 0.95 + 0.25 * len(names)
    return _chart(
        draw,
        name=name,
        heights={"wide": height, "narrow": height + 0.35},
        alt=f"Rate of {len(names)} stages and libraries at {len(problems)} {mask} {dtype} shapes, "
        "as a percentage of the fastest library at each shape. The same numbers stand in the tables of this page.",
        caption=f"Every {mask} {dtype} shape, {select.on_inputs(problems)}: percent of the fastest library there. "
        "Blank: no time, see the tables." + _whence(shown, problems, used, each="shape", regime=regime, cache=cache),
        provenance=select.provenance(used, regime, cache),
        data_files=select.run_files(used),
    )


def ratios(
    shown: Results, *, found: Sequence[AgainstPeers], regime: Regime = "burst", name: str | None = None
) -> Chart:
    """How many times as fast the best stage is as the best library, over sequence length at constant tokens.

    One panel an element type, one line a head dim and mask; a point's shape is the library. `found` is
    `results.against_peers`: each point is of one run.

    Raises:
        NoDataError: no head dim, mask and element type has a ratio at two lengths.
    """
    lines: dict[tuple[str, int, str], dict[int, tuple[Contest, str]]] = {}
    for one in found:
        contest, run = (one.burst, one.run) if regime == "burst" else (one.sustained, one.sustained_run)
        if one.problem in _OF_LENGTHS and contest and run:
            kind = (one.problem.dtype, one.problem.head_dim, one.problem.mask)
            lines.setdefault(kind, {})[one.problem.q_len] = contest, run
    lines = {kind: dict(sorted(points.items())) for kind, points in sorted(lines.items()) if len(points) > 1}
    if not lines:
        raise NoDataError(
            f"wanted {regime} ratios at several sequence lengths on {shown.gpu}, found none. `flashlab bench --suite "
            f"lengths{' --sustained 5' if regime == 'sustained' else ''}` on such a GPU makes some"
        )
    drawn = [point for points in lines.values() for point in points.values()]
    inputs = select.on_inputs(_OF_LENGTHS)
    runs = sorted({run for _, run in drawn})
    contests = [contest for contest, _ in drawn]
    counts = sorted({count for points in lines.values() for count in points})
    dtypes = sorted({dtype for dtype, _, _ in lines})
    kinds = sorted({(head_dim, mask) for _, head_dim, mask in lines}, key=lambda kind: (kind[0], kind[1] == "causal"))
    colours = dict(zip(kinds, _CATEGORIES, strict=False))
    rank = {name: index for index, name in enumerate(peers.PEERS)}
    libraries = sorted({contest.peer for contest in contests}, key=lambda name: (rank.get(name, len(rank)), name))
    shapes = {library: _RIVAL_MARKS[rank.get(library, len(rank)) % len(_RIVAL_MARKS)] for library in libraries}
    low, high = (pick(contest.ratio for contest in contests) for pick in (min, max))

    def draw(figure: Figure, layout: Layout) -> None:
        from matplotlib.lines import Line2D

        side_by_side = layout == "wide"
        grid = figure.subplots(
            1 if side_by_side else len(dtypes), len(dtypes) if side_by_side else 1, squeeze=False, sharey=True
        )
        for axes, dtype in zip(grid.flat, dtypes, strict=True):
            for kind in kinds:
                points = lines.get((dtype, *kind), {})
                places = [counts.index(count) for count in points]
                axes.plot(places, [one.ratio for one, _ in points.values()], color=colours[kind], linewidth=1.6)
                for place, (contest, _) in zip(places, points.values(), strict=True):
                    axes.plot([place], [contest.ratio], shapes[contest.peer], color=colours[kind], markersize=6)
            axes.axhline(1, color=MUTED, linewidth=1)
            axes.set_ylim(min(0.97, low - 0.02), max(1.03, high + 0.02))
            axes.set_xticks(range(len(counts)), [str(count) for count in counts])
            axes.set_title(dtype)
            axes.set_xlabel("sequence length")
            axes.grid(axis="y")
        grid.flat[0].set_ylabel("times as fast")
        handles = [Line2D([], [], color=colours[kind], label=f"D{kind[0]} {kind[1]}") for kind in kinds] + [
            Line2D([], [], color=MUTED, linestyle="", marker=shapes[library], label=f"over {short_title(library)}")
            for library in libraries
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4 if side_by_side else 1)

    rows = len(kinds) + len(libraries)
    told = "; ".join(
        f"D{head_dim} {mask} {dtype}: "
        + ", ".join(f"S{count} {number(one.ratio)} over {short_title(one.peer)}" for count, (one, _) in points.items())
        for (dtype, head_dim, mask), points in lines.items()
    )
    days, commits = (sorted({of(run) for run in runs}) for of in (select.date, select.commit_label))
    clocks = sorted(clock for one in contests for clock in (one.stage_clock_mhz, one.peer_clock_mhz) if clock)
    facts = (
        shown.name,
        f"SM {clocks[0]:.0f}–{clocks[-1]:.0f} MHz in the calls" if clocks else "clock not recorded",
        inputs,
        regime,
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        f"commit {', '.join(commits)}",
    )
    return _chart(
        draw,
        name=name or f"ratios-{regime}",
        heights={"wide": 3.2 + 0.19 * math.ceil(rows / 4), "narrow": 2.4 * len(dtypes) + 0.17 * rows},
        alt=f"The best stage's rate over the best library's, {regime}, over sequence length. {told}.",
        caption=f"How many times as fast the best stage is as the best library of the same element type, {regime}, "
        f"{inputs}: from {number(low)} to {number(high)}. Lines are head dims and masks; a point's shape is the "
        "library. Below one the library is faster. Each point is of one run, in which the two took turns; the runs may "
        "be of several sessions and GPUs.",
        provenance=" · ".join(facts),
        data_files=tuple(f"{shown.gpu}/runs/{run}.jsonl" for run in runs),
    )


def _whence(
    shown: Results,
    problems: Iterable[Problem],
    drawn: Sequence[Measurement],
    *,
    each: str,
    regime: Regime = "burst",
    cache: Cache = "hot",
) -> str:
    """For a caption: of how many sessions the rows of a chart over shapes or lengths are; empty where of one."""
    sessions, chips = select.places((row for row in drawn if row.kind == "stage"), regime, cache)
    names = {row.name for row in drawn}
    late = {row.name for problem in problems for row in select.elsewhere(shown.problems[problem], regime, cache)}
    said = ""
    if sessions > 1:
        gpus = f"{chips} GPU{'s' if chips > 1 else ''}"
        said += f" Each {each} is one session; the stages here are of {sessions}, on {gpus}."
    if late & names:
        titles = ", ".join(sorted(peer_title(name) for name in late & names))
        said += f" Of a later session than the stages, at one {each} or more: {titles}."
    return said


_UPRIGHT = 8
"""Columns of a wide table of shapes whose names still stand side by side."""
_OF_LENGTHS = frozenset(suite("lengths"))
"""Problems that have a figure of their own."""
_FAST = 0.15
"""Of the fastest rate of a chart of lengths: what never reaches it has no line, and stands in the table alone."""
_STAGE_MARKS, _LIBRARY_MARKS = "os^v", "DPX*"
_RIVAL_MARKS = "oD<>vPX*s^"
"""Where the shape alone says which library."""


def mark(name: str) -> tuple[str, str]:
    """Colour and shape of a stage or library among many lines: no two have both in common.

    By name, so that charts side by side agree, and from the ladder's end, so that its last rungs differ in colour.
    """
    if name in peers.PEERS:
        return _mark(list(peers.PEERS).index(name), _OF_LIBRARIES, _LIBRARY_MARKS)
    return _mark([*reversed(list(registry.STAGES)), name].index(name), _CATEGORIES, _STAGE_MARKS)


def _mark(rank: int, colours: Sequence[str], shapes: str) -> tuple[str, str]:
    turn, colour = divmod(rank, len(colours))
    return colours[colour], shapes[turn % len(shapes)]


def lengths(
    shown: Results,
    *,
    head_dim: int,
    mask: str,
    dtype: str = "float16",
    regime: Regime = "burst",
    name: str | None = None,
    stage_ids: Sequence[str] | None = None,
) -> Chart:
    """Rate over sequence length at a constant number of tokens, stages beside libraries; right, percent of the peak.

    A line needs two lengths, and a rate that is not tiny beside the fastest: others stand in the table alone.
    The peak is that of the tensor cores, measured on the same GPU. Libraries that lack the element type are hollow and
    in their own (`Results.beside`).

    Raises:
        NoDataError: fewer than two lengths were measured, or none twice of one stage or library.
    """
    problems = select.of_lengths(shown, head_dim=head_dim, mask=mask, dtype=dtype, regime=regime)
    ceiling = shown.ceilings.get(f"tensor_{dtype}")
    series: dict[str, dict[int, float]] = {}
    looks: dict[str, tuple[str, bool]] = {}
    marks: dict[str, tuple[str, str]] = {}
    used: list[Measurement] = []
    for problem in problems:
        for row in (*shown.rows(problem, stage_ids=stage_ids), *shown.beside(problem)):
            rate = select.rate(row, regime)
            if rate is None:
                continue
            other = row.problem.dtype != dtype
            label = beside_title(row) if other else _label(row)
            series.setdefault(label, {})[problem.q_len] = rate
            looks[label] = (row.kind, other)
            marks[label] = mark(row.name)
            used.append(row)
    over = {label: values for label, values in series.items() if len(values) > 1}
    if not over:
        raise NoDataError(f"wanted one stage or library at two sequence lengths, found none on {shown.gpu}")
    top = max(rate for values in over.values() for rate in values.values())
    fast = {label: values for label, values in over.items() if max(values.values()) >= _FAST * top}
    order = sorted(fast, key=lambda label: (looks[label][0] == "peer", -max(fast[label].values())))
    counts = [problem.q_len for problem in problems]

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        for label in order:
            kind, other = looks[label]
            colour, shape = marks[label]
            axes.plot(
                [counts.index(count) for count in fast[label]],
                list(fast[label].values()),
                color=colour,
                linewidth=1.8 if kind == "stage" else 1.2,
                linestyle="-" if kind == "stage" else (0, (4, 2)),
                marker=shape,
                markersize=5,
                markerfacecolor=PAPER if other else colour,
                label=label,
            )
        axes.set_ylim(0, top * 1.08)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y")
        axes.set_xlabel("sequence length")
        axes.set_ylabel("TFLOP/s")
        if ceiling is not None:
            right = axes.twinx()
            right.set_ylim(0, 100 * top * 1.08 / ceiling.value)
            right.set_ylabel("percent of the measured peak")
            right.tick_params(axis="y", labelcolor=MUTED)
        figure.legend(loc="outside lower left", ncols=3 if layout == "wide" else 1)

    counted = {"slower": len(over) - len(fast), "measured at one length": len(series) - len(over)}
    left_out = [f"{many} {what}" for what, many in counted.items() if many]
    best = {kind: next((label for label in order if looks[label] == (kind, False)), None) for kind in ("stage", "peer")}
    told = "; ".join(
        f"{label} {', '.join(f'S{count} {number(fast[label][count])}' for count in counts if count in fast[label])}"
        for label in best.values()
        if label
    )
    legend_rows = {"wide": math.ceil(len(order) / 3), "narrow": len(order)}
    tokens = problems[0].batch * problems[0].q_len
    return _chart(
        draw,
        name=name or f"lengths-D{head_dim}-{mask}-{dtype}-{regime}",
        heights={
            "wide": 3.3 + 0.19 * legend_rows["wide"],
            "narrow": 2.7 + 0.17 * legend_rows["narrow"],
        },
        alt=f"Throughput in TFLOP/s over sequence length at {tokens:,} tokens, D{head_dim} {mask} {dtype}, {regime}. "
        f"{told}.",
        caption=f"D{head_dim}, {mask}, {dtype}, {regime}: {tokens:,} tokens in sequences of each length, "
        "stages (solid) and libraries (dashed; hollow in another element type)."
        + (
            f" Right: percent of what a large {dtype} matrix product reaches on this GPU in a burst."
            if ceiling is not None
            else ""
        )
        + (f" {' and '.join(left_out)} stand in the table alone." if left_out else "")
        + _whence(shown, problems, used, each="length", regime=regime),
        provenance=select.provenance(used, regime),
        data_files=select.run_files(used),
    )


def regimes(rows: Sequence[Measurement], *, name: str = "regimes") -> Chart:
    """Cold cache and sustained load as a percentage of the burst rate with a hot L2.

    Raises:
        NoDataError: no row has a burst time, or none has another.
    """
    timed = _require_timed(rows, "burst", "hot")
    looks: dict[tuple[Regime, Cache], tuple[str, str, str]] = {
        ("burst", "cold"): ("s", STAGE, "burst, cold L2"),
        ("sustained", "hot"): ("D", PEER, "sustained"),
    }
    shares = {
        (row.name, state): 100 * rate / (select.rate(row) or rate)
        for row in timed
        for state in looks
        if (rate := select.rate(row, *state))
    }
    if not shares:
        raise NoDataError(
            f"wanted times with a cold L2 or under sustained load at {timed[0].problem.problem().label}, found bursts "
            "with a hot L2 alone. `flashlab bench --suite first` makes all of them"
        )

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.axvline(100, color=MUTED, linewidth=1)
        for y, row in enumerate(timed):
            for state, (marker, colour, label) in looks.items():
                if (row.name, state) in shares:
                    share = shares[row.name, state]
                    axes.plot([100, share], [y, y], color=GRID, linewidth=1.2, zorder=1)
                    axes.plot(
                        [share], [y], marker, color=colour, markersize=6, label=label if not y else None, zorder=2
                    )
        _name_rows(axes, range(len(timed)), [_label(row) for row in timed], layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("percent of the burst rate with a hot L2")
        figure.legend(loc="outside upper left", ncols=2)

    clock = {state: select.clocks(timed, *state) for state in select.STATES}
    told = "; ".join(
        f"{_label(row)} {number(shares[row.name, ('sustained', 'hot')])} %"
        for row in timed
        if (row.name, ("sustained", "hot")) in shares
    )
    return _chart(
        draw,
        name=name,
        heights=_height(len(timed), extra=0.95),
        alt=f"Rate under sustained load as a percentage of the burst rate: {told or 'not measured'}.",
        caption="What a cold cache and sustained load leave of the burst rate. "
        f"SM clock: burst {clock['burst', 'hot']}, sustained {clock['sustained', 'hot']}.",
        provenance=select.provenance(timed, "burst", "hot").replace("burst, hot L2", "all regimes"),
        data_files=select.run_files(timed),
    )


def samples(row: Measurement, *, name: str = "samples") -> Chart:
    """Every sample of one row in the order taken, with the clock beside it where it was recorded.

    Raises:
        NoDataError: the row has no samples.
    """
    states = [(state, taken) for state in select.STATES if (taken := row.samples_of(*state))]
    if not states:
        raise NoDataError(f"wanted samples of {row.name}, its status is {row.status}: {row.reason}")
    with_clock = any(taken.sm_clock_mhz for _, taken in states)
    over = any(taken.call_clock_mhz for _, taken in states)
    below = f", and below it the SM clock {'over' if over else 'after'} the calls" if with_clock else ""

    def draw(figure: Figure, layout: Layout) -> None:
        import numpy as np

        rows_of_axes = 2 if with_clock else 1
        grid = figure.subplots(
            rows_of_axes, len(states), squeeze=False, sharey="row", sharex="col", height_ratios=[3, 2][:rows_of_axes]
        )
        for column, ((regime, cache), taken) in enumerate(states):
            top: Axes = grid[0][column]
            index = np.arange(len(taken.time_us))
            top.plot(index, taken.time_us, ".", color=STAGE, markersize=3.5, alpha=0.7)
            top.axhline(taken.median_us, color=INK, linewidth=1)
            title = f"{regime}, {cache} L2" if regime == "burst" else regime
            top.set_title(title if layout == "wide" else title.replace(", ", "\n").removesuffix(" L2"))
            top.grid(axis="y")
            if with_clock:
                bottom: Axes = grid[1][column]
                if taken.call_clock_mhz or taken.sm_clock_mhz:
                    read = taken.call_clock_mhz or taken.sm_clock_mhz
                    bottom.plot(index, read, ".", color=PEER, markersize=3.5, alpha=0.7)
                bottom.grid(axis="y")
            grid[-1][column].set_xlabel("sample")
        grid[0][0].set_ylabel("time, µs")
        if with_clock:
            grid[1][0].set_ylabel("SM, MHz")

    told = "; ".join(
        f"{regime} {cache}: median {number(t.median_us)} µs, standard deviation {number(t.cv_percent)} %"
        for (regime, cache), t in states
    )
    return _chart(
        draw,
        name=name,
        heights={"wide": 3.6 if with_clock else 2.4, "narrow": 3.6 if with_clock else 2.4},
        alt=f"Every sample of {row.name} in the order taken. {told}.",
        caption=f"Every sample of {_label(row)} in the order taken: the time of one call"
        f"{below}. The line is the median; the axes do not start at 0.",
        provenance=select.provenance([row]).replace("burst, hot L2", "all regimes"),
        data_files=select.run_files([row]),
    )


def errors(rows: Sequence[Measurement], *, name: str = "errors") -> Chart:
    """Largest error of each row as a fraction of its limit: left of one passes.

    Raises:
        NoDataError: no row has a verdict with an error.
    """
    judged = [(row, v) for row in rows if (v := row.verdict) and v.max_abs_error is not None and v.max_abs_limit]
    if not judged:
        raise NoDataError("wanted rows with a verdict, found none")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_xscale("log")
        for y, (row, verdict) in enumerate(judged):
            worst = (verdict.max_abs_error or 0.0) / (verdict.max_abs_limit or 1.0)
            colour = LOSS if not verdict.passed else PEER if row.kind == "peer" else STAGE
            axes.plot([max(worst, 1e-3)], [y], "D" if row.kind == "peer" else "o", color=colour, markersize=6)
            if verdict.rms_error is not None and verdict.rms_limit:
                axes.plot(
                    [max(verdict.rms_error / verdict.rms_limit, 1e-3)], [y], "|", color=MUTED, markersize=9, mew=1.6
                )
        axes.axvline(1.0, color=LOSS, linewidth=1.2)
        _name_rows(axes, range(len(judged)), [_label(row) for row, _ in judged], layout)
        _plain_log_ticks(axes.xaxis, layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("error ÷ limit, logarithmic")

    passed = sum(v.passed for _, v in judged)
    return _chart(
        draw,
        name=name,
        heights=_height(len(judged), extra=0.65),
        alt=f"Error over its limit for {len(judged)} stages and libraries; {passed} of them pass.",
        caption="Largest error (mark) and root-mean-square error (bar), each over its limit. "
        "Left of the line passes. The limit is twice the error of the same computation done plainly, plus rounding "
        "slack.",
        provenance=select.provenance([row for row, _ in judged]).replace(" · burst, hot L2", ""),
        data_files=select.run_files([row for row, _ in judged]),
    )


SASS_GROUPS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "exponential": ("mufu",),
    "FP32": ("fma",),
    "fp16": ("half",),
    "shared, shuffle": ("shared_load", "shared_store", "shuffle"),
    "global": ("global_load", "global_store", "async_copy", "local"),
    "convert": ("convert",),
    "integer, move": ("integer", "move"),
    "control, rest": ("branch", "branch_predicated", "converge", "barrier", "other"),
}
"""Instruction classes as a chart shows them: few enough to tell apart."""


def sass_mix(mixes: Mapping[str, Mapping[str, int]], *, name: str = "sass-mix", note: str = "") -> Chart:
    """The instruction mix of each kernel's machine code: static counts, each bar one kernel's whole.

    Args:
        mixes: counts by class (see sass.py) for each label.
        note: what was compiled: architecture, head dim, element type.

    Raises:
        NoDataError: `mixes` is empty.
    """
    if not mixes:
        raise NoDataError("wanted the instruction mix of at least one kernel, got none")
    totals = {
        label: sum(mix.get(c, 0) for group in SASS_GROUPS.values() for c in group) or 1 for label, mix in mixes.items()
    }

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        for y, (label, mix) in enumerate(mixes.items()):
            left = 0.0
            for (group, classes), colour in zip(SASS_GROUPS.items(), _CATEGORIES, strict=True):
                share = 100 * sum(mix.get(c, 0) for c in classes) / totals[label]
                if share:
                    axes.barh(
                        y,
                        share,
                        left=left,
                        height=0.66 if layout == "wide" else 0.4,
                        color=colour,
                        edgecolor=SURFACE,
                        linewidth=1,
                        label=group,
                    )
                left += share
            axes.text(101.5, y, f"{totals[label]:,}", va="center", color=MUTED)
        axes.set_xlim(0, 112 if layout == "wide" else 122)
        axes.set_xticks([0, 25, 50, 75, 100])
        _name_rows(axes, range(len(mixes)), list(mixes), layout, bars=True)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("percent of the kernel's instructions")
        axes.annotate(
            "number",
            (1, 1),
            xycoords="axes fraction",
            xytext=(0, 1),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        shown = {group: handles[group] for group in SASS_GROUPS if group in handles}
        figure.legend(shown.values(), shown.keys(), loc="outside upper left", ncols=9 if layout == "wide" else 3,
                      handlelength=0.9, handletextpad=0.4, columnspacing=0.9)  # fmt: skip

    with_tensor = [label for label, mix in mixes.items() if mix.get("tensor")]
    return _chart(
        draw,
        name=name,
        heights={"wide": 0.9 + 0.3 * len(mixes), "narrow": 1.2 + 0.4 * len(mixes)},
        alt=f"Instruction mix of {len(mixes)} kernels. With tensor-core instructions: "
        f"{', '.join(with_tensor) or 'none'}.",
        caption="Static instruction mix of the machine code: what is in the kernel, not how often it runs.",
        provenance=note,
    )


STATE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "issued": ("selected",),
    "ready, not chosen": ("not_selected",),
    "fixed wait": ("wait", "dispatch_stall", "branch_resolving"),
    "unit busy": ("math_pipe_throttle",),
    "wgmma": ("gmma",),
    "shared memory, exp": ("short_scoreboard", "mio_throttle"),
    "global memory, mbarrier": ("long_scoreboard", "lg_throttle", "tex_throttle"),
    "barrier, end of wgmma": ("barrier", "membar"),
}
"""Warp states as a chart shows them; the others are one more group."""


def stalls(found: Sequence[StageProfile], *, name: str = "stalls") -> Chart:
    """What the warps of each stage spent their time on, each bar one launch's whole.

    Raises:
        NoDataError: no profile names the states of warps.
    """
    shares: dict[str, dict[str, float]] = {}
    for one in found:
        states = one.states
        if states:
            grouped = {group: sum(states.get(state, 0) for state in those) for group, those in STATE_GROUPS.items()}
            shares[one.stage] = grouped | {"other": max(0.0, 100 - sum(grouped.values()))}
    if not shares:
        raise NoDataError("wanted a profile that says what warps waited for, found none. `flashlab profile` makes them")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        for y, groups in enumerate(shares.values()):
            left = 0.0
            for (group, share), colour in zip(groups.items(), _CATEGORIES, strict=True):
                axes.barh(
                    y,
                    share,
                    left=left,
                    height=0.66 if layout == "wide" else 0.4,
                    color=colour,
                    edgecolor=SURFACE,
                    linewidth=1,
                    label=group if not y else None,
                )
                left += share
        axes.set_xlim(0, 100)
        axes.set_xticks([0, 25, 50, 75, 100])
        _name_rows(axes, range(len(shares)), list(shares), layout, bars=True)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("percent of the warps' time")
        figure.legend(loc="outside upper left", ncols=5 if layout == "wide" else 2,
                      handlelength=0.9, handletextpad=0.4, columnspacing=0.9)  # fmt: skip

    told = "; ".join(
        f"{stage} {', '.join(f'{group} {number(share, 2)} %' for group, share in _largest(groups))}"
        for stage, groups in shares.items()
    )
    return _chart(
        draw,
        name=name,
        heights={"wide": 1.2 + 0.3 * len(shares), "narrow": 1.7 + 0.4 * len(shares)},
        alt=f"What warps spent their time on, the most of each stage: {told}.",
        caption="What the resident warps of each stage spent their time on: issuing, awaiting their turn, or waiting.",
        provenance=select.profile_provenance(found),
        data_files=select.profile_files(found),
    )


def _largest(groups: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(groups.items(), key=lambda item: -item[1])[:2]


def busy(found: Sequence[StageProfile], *, name: str = "busy") -> Chart:
    """How busy the tensor pipe, the exponential unit and the issue slots were in one launch of each stage.

    Raises:
        NoDataError: no profile says so.
    """
    looks: dict[str, tuple[str, str, Callable[[StageProfile], float | None]]] = {
        "tensor pipe": ("o", STAGE, lambda one: one.tensor_percent),
        "exponential unit": ("D", PEER, lambda one: one.exp_percent),
        "issue slots": ("s", ACCENT, lambda one: one.issue_percent),
    }
    shares = {
        (one.stage, unit): value
        for one in found
        for unit, (_, _, percent) in looks.items()
        if (value := percent(one)) is not None
    }
    if not shares:
        raise NoDataError("wanted a profile that says how busy units were, found none. `flashlab profile` makes them")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        for y, one in enumerate(found):
            axes.plot([0, 100], [y, y], color=GRID, linewidth=1.2, zorder=1)
            for unit, (marker, colour, _) in looks.items():
                if (one.stage, unit) in shares:
                    axes.plot([shares[one.stage, unit]], [y], marker, color=colour, markersize=6, zorder=2)
        for unit, (marker, colour, _) in looks.items():
            axes.plot([], [], marker, color=colour, markersize=6, label=unit)
        axes.set_xlim(0, 100)
        _name_rows(axes, range(len(found)), [one.stage for one in found], layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("percent of the cycles in which the SM was busy")
        figure.legend(loc="outside upper left", ncols=3 if layout == "wide" else 2)

    told = "; ".join(f"{stage} {unit} {number(share, 2)} %" for (stage, unit), share in shares.items())
    return _chart(
        draw,
        name=name,
        heights=_height(len(found), extra=1.0),
        alt=f"How busy units were: {told}.",
        caption="How busy the tensor pipe, the unit for exponentials and conversions, and the issue slots were.",
        provenance=select.profile_provenance(found),
        data_files=select.profile_files(found),
    )


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A stage or library under a roof."""

    label: str
    """Empty: it shares the label of the mark above or below it."""
    is_stage: bool
    intensity: float
    """Operations a byte."""
    tflops: float
    solid: bool = True
    """False: another head dim than the first problem's; of a stage, bytes that were counted, not measured."""


@dataclass(frozen=True, kw_only=True)
class _Roof:
    """A ceiling: flat in TFLOP/s, a slope in TB/s."""

    label: str
    value: float
    is_slope: bool
    measured: bool
    """False: from a data sheet."""


def _roofs(shown: Results, problem: Problem, bandwidth: str) -> list[_Roof]:
    """The ceilings that `problem` meets: products on each unit, exponentials, and the memory called `bandwidth`."""
    flops_per_score = 4 * problem.head_dim
    flat = {
        f"tensor_{problem.dtype}": "tensor cores, cuBLAS",
        f"mma_sync_{problem.dtype}": "tensor cores, mma.sync",
        "half2_fma": "fp16 arithmetic",
        "fp32_fma": "FP32 arithmetic",
    }
    found = [
        _Roof(label=label, value=shown.ceilings[name].value, is_slope=False, measured=True)
        for name, label in flat.items()
        if name in shown.ceilings
    ]
    if "exp2" in shown.ceilings:
        value = shown.ceilings["exp2"].value * flops_per_score
        found.append(_Roof(label=f"exponentials at D{problem.head_dim}", value=value, is_slope=False, measured=True))
    if bandwidth in shown.ceilings:
        label = {"copy": "device memory", "l2_read": "L2"}[bandwidth]
        found.append(_Roof(label=label, value=shown.ceilings[bandwidth].value, is_slope=True, measured=True))
    sheet = roofline_model.DATASHEETS.get(shown.gpu)
    if sheet:
        for name, label, is_slope in (
            (f"tensor_{problem.dtype}", "tensor cores", False),
            (bandwidth, "device memory", True),
        ):
            peak = sheet.peak(name)
            if peak:
                found.append(_Roof(label=label, value=peak, is_slope=is_slope, measured=False))
    return found


def roofline(
    shown: Results,
    *,
    level: Literal["dram", "l2"] = "dram",
    profiles: Sequence[StageProfile] | None = None,
    name: str | None = None,
) -> Chart:
    """Rates against arithmetic intensity under the GPU's ceilings.

    At `dram` each mark is a problem: the fastest stage and the fastest library at it, over the bytes that must cross
    device memory; with `profiles`, it is a stage at the first problem. At `l2` each mark is a stage at the first
    problem, over the bytes that its tiles fetch from L2. Where a stage was profiled there, a filled mark stands over
    the bytes that did cross, beside the hollow one of those counted.

    Raises:
        NoDataError: no bandwidth or compute ceiling was measured (a GPU without has no roof), nothing has a time, or
            `profiles` are given and none is of a stage with a time at the first problem.
    """
    first = shown.first
    if first is None:
        raise NoDataError(f"wanted measurements of {shown.gpu}, found none")
    roofs = _roofs(shown, first, "copy" if level == "dram" else "l2_read")
    flat = [roof for roof in roofs if not roof.is_slope]
    slopes = [roof for roof in roofs if roof.is_slope]
    if not any(r.measured for r in flat) or not any(r.measured for r in slopes):
        raise NoDataError(
            f"wanted a measured bandwidth and compute ceiling of {shown.gpu}, found none. "
            "`flashlab bench --ceilings` makes them"
        )
    by_problem = level == "dram" and profiles is None
    points, rows = _dram_points(shown, first) if by_problem else _stage_points(shown, first, level, profiles or ())
    measured = [one for one in profiles or () if any(row.name == one.stage for row in rows)]
    if profiles is not None and level == "dram" and not any(point.solid for point in points):
        raise NoDataError(
            f"wanted a profile of a stage at {first.label} on {shown.gpu}, found none. `flashlab profile` makes them"
        )
    if not points:
        raise NoDataError(f"wanted a stage with a time at {first.label} on {shown.gpu}, found none")
    top, slope = max(roof.value for roof in flat), max(roof.value for roof in slopes)
    ridge = top / slope
    columns: dict[str, float] = {}
    for row in rows if by_problem else ():
        problem = row.problem.problem()
        intensity = problem.flops / problem.compulsory_bytes
        if all(abs(other / intensity - 1) > 0.1 for other in columns.values()):
            columns[f"S{problem.q_len}"] = intensity
    always = {row.name for row in rows if row.kind == "stage"}
    crowded = by_problem and len({row.problem.problem() for row in rows}) > _NAMED_PROBLEMS

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        left = min([*(p.intensity for p in points), ridge]) / (3 if by_problem else 8)
        right = max([*(p.intensity for p in points), ridge]) * 4
        low = min([*(p.tflops for p in points), *(roof.value for roof in flat)]) / 3
        high = top * 1.6
        axes.set_xlim(left, right)
        axes.set_ylim(low, high)
        colours = iter(("#009e73", "#cc79a7", "#8a6fd1", "#a89f2c", "#8c6d4f"))
        for roof in sorted(slopes, key=lambda r: (not r.measured, -r.value)) + sorted(
            flat, key=lambda r: (not r.measured, -r.value)
        ):
            unit = "TB/s" if roof.is_slope else "TFLOP/s"
            colour = MUTED if roof.is_slope or not roof.measured else next(colours)
            ends = (
                ([left, top / roof.value], [left * roof.value, top])
                if roof.is_slope
                else ([roof.value / slope, right], [roof.value] * 2)
            )
            axes.plot(
                *ends,
                color=colour,
                linewidth=1.8 if roof.measured else 1.2,
                linestyle="-" if roof.measured else (0, (4, 3)),
                label=f"{roof.label}, {number(roof.value)} {unit}{'' if roof.measured else ' (data sheet)'}",
            )
        for point in points:
            axes.plot(
                [point.intensity],
                [point.tflops],
                "o" if point.is_stage else "D",
                color=STAGE if point.is_stage else PEER,
                markerfacecolor=(STAGE if point.is_stage else PEER) if point.solid else PAPER,
                markersize=6,
                markeredgewidth=1.6,
            )
        for position, (length, intensity) in enumerate(sorted(columns.items(), key=lambda item: item[1])):
            up = 4 + (_LABEL_POINTS if layout == "narrow" and position % 2 else 0)
            axes.annotate(
                length, (intensity, 0), xycoords=("data", "axes fraction"), xytext=(0, up), textcoords="offset points",
                ha="center", color=MUTED, size="small",
            )  # fmt: skip
        decade = axes.get_window_extent().height / figure.dpi * 72 / math.log10(high / low)
        for point, shift in _spread_labels([p for p in points if p.label and not crowded], points_per_decade=decade):
            # Towards the side where no other mark's label begins.
            leftwards = any(0.1 < math.log10(p.intensity / point.intensity) < 0.58 for p in points)
            axes.annotate(
                point.label,
                (point.intensity, point.tflops),
                xytext=(-7 if leftwards else 7, shift),
                textcoords="offset points",
                ha="right" if leftwards else "left",
                va="center",
                size=8 if layout == "wide" else 7,
                color=STAGE if point.is_stage else PEER,
                bbox={"facecolor": PAPER, "alpha": 0.8, "pad": 0.6},
                # Far from its mark a label needs a line to it.
                arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7} if shift > _LABEL_POINTS else None,
            )
        _plain_log_ticks(axes.xaxis, "narrow")
        _plain_log_ticks(axes.yaxis, "narrow")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid()
        axes.set_xlabel("operations per byte of device memory" if level == "dram" else "operations per byte of L2")
        axes.set_ylabel("TFLOP/s")
        figure.legend(loc="outside lower left", ncols=2 if layout == "wide" else 1)

    if by_problem:
        which = f", {next(iter(always))} at each" if len(always) == 1 else ""
        caption = (
            f"Each full {first.dtype} problem's fastest stage (circles{which}) and fastest library (diamonds), over "
            "the bytes that must cross device memory. A column is one sequence length S"
            f"{'' if crowded else ', a label names batch and head dim'}. "
            f"Filled: head dim {first.head_dim}, hollow: another."
        )
    else:
        counted = (
            "must cross device memory" if level == "dram" else "its tiles fetch from L2, counted from its tile size"
        )
        caption = f"Each stage at {first.label}. Hollow: over the bytes that {counted}."
        if any(point.solid for point in points):
            caption += " Filled: over those that Nsight Compute measured."
    told = "; ".join(
        f"{row.name} at {row.problem.problem().label} {number(p.tflops)}" for p, row in zip(points, rows, strict=True)
    )
    return _chart(
        draw,
        name=name or f"roofline-{level}{'' if by_problem or level == 'l2' else '-measured'}",
        heights={"wide": 6.2, "narrow": 7.0},
        alt=f"Roofline. Compute ceilings, TFLOP/s: {', '.join(f'{r.label} {number(r.value)}' for r in flat)}. "
        f"Marks, TFLOP/s: {told}.",
        caption=f"{caption} Solid ceilings were measured here, dashed ones are the data sheet's.",
        provenance=select.provenance(rows),
        data_files=(*select.run_files([*rows, *shown.ceilings.values()]), *select.profile_files(measured)),
    )


def _dram_points(shown: Results, first: Problem) -> tuple[list[_Point], list[Measurement]]:
    points: list[_Point] = []
    used: list[Measurement] = []
    for problem, rows in shown.problems.items():
        if problem.dtype != first.dtype or problem.mask != "full":
            continue
        for row in (select.fastest_stage(rows), select.fastest_peer(rows)):
            rate = select.rate(row) if row else None
            if row is None or rate is None:
                continue
            points.append(
                _Point(
                    label=f"B{problem.batch} D{problem.head_dim}",
                    is_stage=row.kind == "stage",
                    intensity=problem.flops / problem.compulsory_bytes,
                    tflops=rate,
                    solid=problem.head_dim == first.head_dim,
                )
            )
            used.append(row)
    return points, used


def _stage_points(
    shown: Results, problem: Problem, level: Literal["dram", "l2"], profiles: Sequence[StageProfile]
) -> tuple[list[_Point], list[Measurement]]:
    """Of each stage with a time a hollow mark, over counted bytes, and a filled one over measured, where there are."""
    points: list[_Point] = []
    used: list[Measurement] = []
    profiled = {one.stage: one for one in profiles if one.problem.problem() == problem}
    for row in shown.rows(problem):
        rate = select.rate(row)
        if rate is None or row.cubin is None:
            continue
        one = profiled.get(row.name)
        moved = None if one is None else one.dram_bytes if level == "dram" else one.l2_bytes
        counted = (
            float(problem.compulsory_bytes) if level == "dram" else roofline_model.l2_bytes(problem, row.cubin.tile_q)
        )
        for size, solid in ((counted, False), (moved, True)):
            if size:
                # One label a stage: the measured mark's where there is one.
                label = row.name if solid or not moved else ""
                intensity = problem.flops / size
                points.append(_Point(label=label, is_stage=True, intensity=intensity, tflops=rate, solid=solid))
                used.append(row)
    return points, used


_LABEL_POINTS = 11.5
"""Height of a label."""
_NAMED_PROBLEMS = 8
"""Problems of a roofline whose marks still have room for labels; more stand in the table beside it."""


def _spread_labels(points: Sequence[_Point], *, points_per_decade: float) -> list[tuple[_Point, float]]:
    """Vertical shifts, in points, that keep the labels of neighbouring marks from covering each other."""
    placed: list[tuple[_Point, float, float]] = []
    for point in sorted(points, key=lambda p: p.tflops):
        natural = math.log10(point.tflops) * points_per_decade
        near = [at for other, at, _ in placed if abs(math.log10(other.intensity / point.intensity)) < 0.6]
        position = max([natural, *(at + _LABEL_POINTS for at in near)])
        placed.append((point, position, position - natural))
    return [(point, shift) for point, _, shift in placed]


def row_errors(
    errors: Mapping[str, Sequence[float]], *, rows: int, limit: float | None = None, note: str = "", name: str
) -> Chart:
    """The largest error of each block of query rows, for several runs of one problem, on a logarithmic axis.

    Args:
        errors: by the run's name; what is not finite is shown at the top.
        rows: rows in a block.
        limit: the largest error that passes, where known.
        note: where they come from.

    Raises:
        NoDataError: no run has an error to draw.
    """
    found = {title: [float(value) for value in values] for title, values in errors.items() if len(values)}
    sizes = [value for values in found.values() for value in values if math.isfinite(value) and value > 0]
    if not sizes:
        raise NoDataError("wanted at least one finite error, found none")
    low, high = min(sizes) / 2, max([*sizes, limit or 0.0]) * 3
    blocks = max(map(len, found.values()))

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        shift = 0.24 / max(1, len(found) - 1)
        for index, (title, values) in enumerate(found.items()):
            colour = (STAGE, PEER, ACCENT, LOSS)[index % 4]
            places = [position + (index - (len(found) - 1) / 2) * shift for position in range(len(values))]
            heights = [min(max(value, low), high) if math.isfinite(value) else high for value in values]
            axes.plot(
                places,
                heights,
                linestyle="none",
                marker="oDsv"[index % 4],
                markersize=6,
                color=colour,
                label=title,
                clip_on=False,
                zorder=3,
            )
            for place, value in zip(places, values, strict=True):
                if not math.isfinite(value):
                    axes.annotate(
                        "NaN", (place, high), xytext=(0, 6), textcoords="offset points", ha="center", color=colour
                    )
        if limit:
            axes.axhline(limit, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), label="largest error that passes")
        axes.set_xticks(range(blocks), [f"{block * rows}–{(block + 1) * rows - 1}" for block in range(blocks)])
        axes.set_xlim(-0.5, blocks - 0.5)
        if layout == "narrow" or blocks > 8:
            axes.tick_params(axis="x", labelrotation=60)
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("query rows")
        axes.set_ylabel("largest error")
        figure.legend(loc="outside upper left", ncols=3 if layout == "wide" else 1)

    worst = "; ".join(
        f"{title}: {max(values):.1e}" if all(map(math.isfinite, values)) else f"{title}: not finite"
        for title, values in found.items()
    )
    return _chart(
        draw,
        name=name,
        heights={"wide": 3.0, "narrow": 3.6},
        alt=f"Largest error of each block of {rows} query rows against the float64 oracle. The worst block of {worst}.",
        caption=f"Largest error of each block of {rows} query rows, over all heads, against the float64 oracle.",
        provenance=note,
    )


_FARTHEST_PERCENT = 12.0


def differences(
    series: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    name: str,
    axis: str,
    within: float | None,
    caption: str,
    provenance: str,
    data_files: tuple[str, ...],
) -> Chart:
    """Percent away from zero, with an interval, of several series in each row.

    Args:
        series: (low, middle, high) in percent by row and series. What lies beyond the axis stands at its end, in
            numbers.
        axis: what the percentages are of.
        within: half width of a band around zero, percent; none where None.

    Raises:
        NoDataError: there is no row.
    """
    if not any(series.values()):
        raise NoDataError("wanted at least one difference to draw, found none")
    names = list(dict.fromkeys(title for row in series.values() for title in row))
    sizes = [abs(value) for row in series.values() for values in row.values() for value in values]
    reach = min(1.15 * max([*sizes, within or 0.0, 0.1]), _FARTHEST_PERCENT)

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_xlim(-reach, reach)
        if within is not None:
            axes.axvspan(-within, within, color=FAINT, alpha=0.25, linewidth=0, zorder=0)
        axes.axvline(0, color=MUTED, linewidth=1, zorder=1)
        # Where names stand above their rows, the marks keep below them.
        step, top = (0.66 / len(names), -0.33) if layout == "wide" else (0.56 / len(names), 0.06)
        for y, row in enumerate(series.values()):
            for index, title in enumerate(names):
                if title not in row:
                    continue
                low, middle, high = (min(max(value, -reach), reach) for value in row[title])
                colour, place = _CATEGORIES[index % len(_CATEGORIES)], y + top + (index + 0.5) * step
                axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.4, solid_capstyle="round")
                axes.plot(
                    [middle], [place], marker="oDsv^P"[index % 6], color=colour, markersize=5, clip_on=False, zorder=3
                )
                if abs(row[title][1]) > reach:
                    left = row[title][1] < 0
                    axes.annotate(
                        f"{row[title][1]:+.0f} %",
                        (middle, place),
                        xytext=(6 if left else -6, 0),
                        textcoords="offset points",
                        ha="left" if left else "right",
                        va="center",
                        color=MUTED,
                        fontsize="small",
                    )
        for index, title in enumerate(names):
            colour = _CATEGORIES[index % len(_CATEGORIES)]
            axes.plot([], [], marker="oDsv^P"[index % 6], linestyle="none", color=colour, markersize=5, label=title)
        _name_rows(axes, range(len(series)), list(series), layout)
        axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel(axis)
        figure.legend(loc="outside upper left", ncols=min(len(names), 4) if layout == "wide" else 1)

    told = "; ".join(
        f"{label}: " + ", ".join(f"{title} {values[1]:+.1f} %" for title, values in row.items())
        for label, row in series.items()
    )
    rows_inches = {"wide": 0.13 * len(names) * len(series), "narrow": 0.15 * len(names) * len(series)}
    plain = _height(len(series), extra=1.0)
    return _chart(
        draw,
        name=name,
        heights={
            "wide": max(plain["wide"], 1.0 + rows_inches["wide"]),
            "narrow": max(plain["narrow"] + 0.2 * len(names), 1.2 + rows_inches["narrow"] + 0.25 * len(series)),
        },
        alt=f"{axis[:1].upper()}{axis[1:]}. {told}.",
        caption=caption,
        provenance=provenance,
        data_files=data_files,
    )


def ceilings(shown: Results, *, name: str = "ceilings") -> Chart:
    """Measured ceilings as a percentage of the data sheet's.

    Raises:
        NoDataError: nothing measured has a data sheet's value beside it.
    """
    sheet = roofline_model.DATASHEETS.get(shown.gpu)
    found = [(c, peak) for c in shown.ceilings.values() if sheet and (peak := sheet.peak(c.name))]
    if not found:
        raise NoDataError(f"wanted measured ceilings of {shown.gpu} with a data sheet's value beside them, found none")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        thickness = 0.56 if layout == "wide" else 0.36
        for y, (ceiling, peak) in enumerate(found):
            share = 100 * ceiling.value / peak
            axes.barh(y, 100, height=thickness, color=GRID, alpha=0.6)
            axes.barh(y, share, height=thickness, color=STAGE)
            of = f" of {number(peak)}" if layout == "wide" else ""
            axes.text(max(share, 100) + 2, y, f"{number(ceiling.value)}{of} {ceiling.unit}", va="center")
        axes.set_xlim(0, 165)
        axes.set_xticks([0, 25, 50, 75, 100])
        _name_rows(axes, range(len(found)), [c.name for c, _ in found], layout, bars=True)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("percent of the data sheet's peak")

    first = found[0][0]
    told = "; ".join(f"{c.name} {number(c.value)} of {number(p)} {c.unit}" for c, p in found)
    return _chart(
        draw,
        name=name,
        heights=_height(len(found), extra=0.75),
        alt=f"Measured ceilings beside the data sheet's: {told}.",
        caption="What the GPU at hand delivers of what its data sheet says (dense products).",
        provenance=f"{first.gpu.name} · burst · {select.date(first.run)} · "
        f"commit {select.commit_label(first.run, first.source.dirty)}",
        data_files=select.run_files([c for c, _ in found]),
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One row of `intervals`."""

    name: str
    value: float
    low: float
    high: float
    """Ends of its interval; both the value where it has none."""
    look: Literal["plain", "better", "worse", "first"] = "plain"


_LOOKS = {"plain": (MUTED, "o"), "better": (ACCENT, "o"), "worse": (LOSS, "o"), "first": (INK, "|")}


def intervals(
    groups: Mapping[str, Sequence[Interval]],
    *,
    name: str,
    xlabel: str,
    reference: float,
    ratio: bool,
    alt: str,
    caption: str,
    provenance: str,
    data_files: tuple[str, ...],
) -> Chart:
    """A forest plot: a value with its interval a row, in named groups, beside a line of reference.

    Args:
        groups: rows by the name that stands above them.
        name, alt, caption, provenance, data_files: as `Chart` has them.
        xlabel: what the values are.
        reference: where the line is.
        ratio: whether values are ratios, drawn on a logarithmic axis.

    Raises:
        NoDataError: there is no row.
    """
    rows: list[tuple[str, Interval | None]] = []
    for heading, found in groups.items():
        if found:
            rows.append((heading, None))
            rows += [(one.name, one) for one in found]
    if not rows:
        raise NoDataError(f"wanted at least one effect to draw, found none in {len(groups)} groups")

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        if ratio:
            axes.set_xscale("log")
        axes.axvline(reference, color=MUTED, linewidth=1, zorder=1)
        for y, (_, one) in enumerate(rows):
            if one is not None:
                colour, marker = _LOOKS[one.look]
                axes.plot([one.low, one.high], [y, y], color=colour, linewidth=1.6, zorder=2)
                axes.plot([one.value], [y], marker, color=colour, markersize=5, zorder=3)
        _name_rows(axes, range(len(rows)), [text for text, _ in rows], layout, bold=list(groups))
        axes.grid(axis="x", which="both" if ratio else "major")
        axes.spines[["left", "bottom"]].set_visible(False)
        if ratio:
            _ratio_ticks(axes)
        axes.set_xlabel(xlabel)

    return _chart(
        draw,
        name=name,
        heights=_height(len(rows), extra=0.75),
        alt=alt,
        caption=caption,
        provenance=provenance,
        data_files=data_files,
    )


_RATIO_STEPS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0)
_RATIO_TICKS = 8
"""At most so many fit beside one another."""


def _ratio_ticks(axes: Axes) -> None:
    """Ticks at plain ratios, as dense as the axis's width allows, 1 always among them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_xlim()
    apart = math.log(high / low) / _RATIO_TICKS
    kept = [1.0]
    for step in sorted(_RATIO_STEPS, key=lambda value: abs(math.log(value))):
        if low <= step <= high and all(abs(math.log(step / other)) >= apart for other in kept):
            kept.append(step)
    axes.xaxis.set_major_locator(FixedLocator(sorted(kept)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
