"""Figures drawn from records: every one in a wide and a narrow layout, each recoloured for light and dark pages.

A `Chart` holds a figure without matplotlib: SVG text, alternative text, caption and the source of its numbers.
JupyterLab displays it directly; pages.py writes its variants for the site. A chart function gathers numbers and text
and passes `compose` a function that draws them on a matplotlib figure in either layout.

Colours are Okabe and Ito's, which readers with any common colour blindness can tell apart; shapes or labels repeat it.
"""

from __future__ import annotations

import html
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from flashlab.core.arithmetic import several
from flashlab.core.errors import NoDataError
from flashlab.core.facts import Facts
from flashlab.core.inputs import NORMAL
from flashlab.core.problem import STANDARD_SHAPES, Problem, Regime, suite
from flashlab.kernels import peers, registry
from flashlab.query import roofline as limits
from flashlab.query import select
from flashlab.query.compare import Comparison
from flashlab.query.contests import Across, AgainstPeers, Contest, percent_of_peak
from flashlab.query.select import Results
from flashlab.query.statistics import Estimate
from flashlab.record.schema import Ceiling, Measurement, StageProfile, Verdict
from flashlab.show.tables import (
    beside_note,
    beside_title,
    elsewhere_note,
    fastest_note,
    number,
    set_of,
    short_title,
    title_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Layout = Literal["wide", "narrow"]
Theme = Literal["light", "dark"]
LAYOUTS: tuple[Layout, ...] = ("wide", "narrow")
THEMES: tuple[Theme, ...] = ("light", "dark")
MIME = "application/vnd.flashlab.chart+json"
"""A notebook output of this type is a whole `Chart`; pages.py turns it into the page's figure."""

_INCHES: dict[Layout, float] = {"wide": 7.6, "narrow": 3.7}

INK, MUTED, GRID, SURFACE = "#1f2430", "#5b6472", "#d5dae1", "#fdfefe"
STAGE, PEER, ACCENT, LOSS, FAINT = "#0070b0", "#c65d00", "#007a5a", "#b3331a", "#9fb4c4"
_CATEGORIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#a89f2c", "#7a8290", "#b9c0ca")
_OF_LIBRARIES = ("#5f7fbf", "#8a6fd1", "#8c6d4f", "#6b8e23", "#3f8f8b", "#c98a5a", "#2aa7c4", "#b5569c", "#c0504d")
"""Where libraries stand beside so many stages that they need colours of their own."""
_DARK = {
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


class Chart(Facts):
    """A figure, ready to show."""

    name: str
    """File name stem, unique within a report."""
    alt: str
    """Alternative text for a reader who cannot see the figure."""
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
        """For a notebook: the figure with its caption, and the whole `Chart` for the site."""
        picture = b64encode(self.svg["wide"].encode()).decode()
        figure = (
            f'<figure style="margin: 0"><img alt="{html.escape(self.alt)}" style="max-width: 100%" '
            f'src="data:image/svg+xml;base64,{picture}" /><figcaption>{html.escape(self.caption)}<br />'
            f"<small>{html.escape(self.provenance)}</small></figcaption></figure>"
        )
        return {
            "text/html": figure,
            "text/plain": f"{self.caption} {self.provenance}".strip(),
            MIME: self.model_dump(mode="json"),
        }


# --- How figures are drawn --------------------------------------------------------------------------------------------


def _theme(layout: Layout) -> Any:
    size = 9.5 if layout == "wide" else 8.8
    sizes = {"font": 0, "axes.label": 0, "axes.title": 0.5, "xtick.label": -0.7, "ytick.label": 0, "legend.font": -0.7}
    colours = {MUTED: ("axes.label", "xtick.", "xtick.label"), INK: ("text.", "axes.title", "ytick.", "ytick.label")}
    return (
        {f"{what}{'.' if what == 'font' else ''}size": size + more for what, more in sizes.items()}
        | {f"{what}color": colour for colour, names in colours.items() for what in names}
        | {f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")}
        | {
            "svg.fonttype": "none",  # text stays text: sharp, small, in the reader's own font
            "svg.hashsalt": "flashlab",  # the same data gives the same bytes
            "font.family": "DejaVu Sans",  # wider than any system font, so what fits here fits there
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "legend.frameon": False,
            "axes.edgecolor": GRID,
            "axes.facecolor": "none",
            "figure.facecolor": SURFACE,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "lines.solid_capstyle": "round",
            "patch.edgecolor": "w",
            "patch.force_edgecolor": True,
            "patch.linewidth": 0,
            "xtick.bottom": False,
            "ytick.left": False,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


def compose(
    draw: Callable[[Figure, Layout], None],
    *,
    name: str,
    heights: tuple[float, float],
    alt: str,
    caption: str,
    provenance: str = "",
    data_files: tuple[str, ...] = (),
) -> Chart:
    """Draw both layouts; `heights` in inches, wide and narrow."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    svg: dict[Layout, str] = {}
    for layout, height in zip(LAYOUTS, heights, strict=True):
        with mpl.rc_context(rc=_theme(layout)):
            figure = Figure(figsize=(_INCHES[layout], height), layout="constrained")
            draw(figure, layout)
            buffer = StringIO()
            # Not savefig, which draws everything twice for a bounding box that nobody asks for.
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace("'DejaVu Sans'", _FONT)
        svg[layout] = _compact(text)
    return Chart(name=name, alt=alt, caption=caption, provenance=provenance, data_files=data_files, svg=svg)


def _compact(svg: str) -> str:
    """The same picture in half the bytes: hundredths of a point, no metadata, and each style once, as a class."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)

    def rounded(tag: re.Match[str]) -> str:  # what stands between tags is a label, and keeps its digits
        return re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), tag[0])

    svg = re.sub(r"<[^>]*>", rounded, svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*\)"| id="[A-Za-z][A-Za-z2.]+_\d+"', "", svg)
    svg = re.sub(r"\n\s*", " ", svg.replace("\n<", "<")).replace("> <", "><")
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: _short_path(path[0]), svg)
    svg = re.sub(r"<g>(<(?:path|use) [^<>]*/>|<text [^<>]*>[^<>]*</text>)</g>", r"\1", svg)
    styles: dict[str, str] = {}
    svg = re.sub(r' style="([^"]*)"', lambda m: f' class="s{styles.setdefault(m[1], str(len(styles)))}"', svg)
    rules = "".join(f".s{number}{{{style}}}" for style, number in styles.items())
    return svg.replace("</style>", f"{rules}</style>", 1)


def _short_path(path: str) -> str:
    """The same path, with a line across as `H` and one up or down as `V`, which name one coordinate."""
    parts, last = [], ["", ""]
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        at = numbers.split()
        if command == "L" and at[1] == last[1]:
            parts.append(f"H{at[0]}")
        elif command == "L" and at[0] == last[0]:
            parts.append(f"V{at[1]}")
        else:
            parts.append(command + " ".join(at))
        last = at[-2:] if len(at) > 1 else ["", ""]
    return "".join(parts)


def size_px(svg: str) -> tuple[int, int]:
    """Width and height of an SVG of this module in CSS pixels."""
    width, height = (float(re.findall(rf'<svg[^>]*? {side}="([0-9.]+)pt"', svg)[0]) for side in ("width", "height"))
    return round(width * 4 / 3), round(height * 4 / 3)


def _of_rows(rows: Sequence[Measurement], regime: Regime = "burst") -> dict[str, Any]:
    """Provenance and data files of a chart of such rows."""
    return {"provenance": select.provenance(rows, regime), "data_files": select.run_files(rows)}


def _of_profiles(profiles: Sequence[StageProfile]) -> dict[str, Any]:
    return {"provenance": select.profile_provenance(profiles), "data_files": select.run_files(profiles)}


def _text(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **look: Any) -> None:
    """Text so many points beside a place."""
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **look)


def _mark(axes: Axes, x: float, y: float, shape: str, colour: str, **look: Any) -> None:
    axes.plot([x], [y], marker=shape, color=colour, **{"markersize": 6, "linestyle": "none", **look})


def _plain_log_ticks(axis: Any, layout: Layout = "wide") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > (3.5 if layout == "wide" else 1.6) else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _row_chart(
    rows: Sequence[tuple[str, Any]],
    each: Callable[[Axes, float, Any, Layout], None],
    *,
    xlabel: str,
    extra: float = 0.75,
    heights: tuple[float, float] | None = None,
    xlim: Mapping[Layout, tuple[float, float]] | None = None,
    xticks: Sequence[float] | None = None,
    reference: tuple[float, Mapping[str, Any]] | None = None,
    log: bool | Callable[[Axes], None] = False,
    bars: bool = False,
    positions: Sequence[float] | None = None,
    bold: Sequence[str] = (),
    corner: str = "",
    legend: Mapping[str, Mapping[str, Any]] | None = None,
    columns: tuple[int, int] = (4, 1),
    **what: Any,
) -> Chart:
    """A horizontal chart of named rows; names are beside them in the wide layout, above them in the narrow one.

    Args:
        rows: the name of each, and the value that `each` draws at its height.
        extra: inches above and below the rows; not used with `heights`.
        reference: where a vertical line stands, and how it looks.
        log: whether the axis is logarithmic, or the function that sets its ticks.
        bars: whether the rows are bars.
        positions: heights of the rows; default: evenly spaced.
        bold: names to print in bold.
        corner: heading of the numbers at the right.
        legend: the marks of each series, in so many `columns`, wide and narrow.
        what: name, alt, caption, provenance and data files, as `Chart` has them.
    """
    names, places = [name for name, _ in rows], positions or range(len(rows))

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        if log:
            axes.set_xscale("log")
        if xlim:
            axes.set_xlim(*xlim[layout])
        if xticks is not None:
            axes.set_xticks(xticks)
        for y, (_, row) in zip(places, rows, strict=True):
            each(axes, y, row, layout)
        if reference:
            axes.axvline(reference[0], **{"color": MUTED, "linewidth": 1, "zorder": 1, **reference[1]})
        if corner:
            _text(axes, corner, (1, 1), (0, 2), xycoords="axes fraction", ha="right", color=MUTED)
        axes.set_ylim(places[-1] + 0.7, places[0] - (0.7 if layout == "wide" else 1.0))
        axes.set_yticks(*((places, names) if layout == "wide" else ([],)))
        for tick, name in zip(axes.get_yticklabels(), names, strict=False):
            tick.set_fontweight("bold" if name in bold else "normal")
        for y, name in zip(places, names if layout == "narrow" else (), strict=False):
            # On paper, or the line at the reference would strike the name through.
            look = {"weight": "bold" if name in bold else "normal", "bbox": {"facecolor": PAPER, "pad": 0.6}}
            _text(axes, name, (0, y), (0, 7 if bars else 5), xycoords=("axes fraction", "data"), va="bottom", **look)
        if callable(log):
            log(axes)
        elif log:
            _plain_log_ticks(axes.xaxis, layout)
        if not bars or log:
            axes.grid(axis="x")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel(xlabel)
        for series, series_look in (legend or {}).items():
            axes.plot([], [], linestyle="none", label=series, **{"markersize": 6, **series_look})
        if legend:
            figure.legend(loc="outside upper left", ncols=columns[layout == "narrow"], columnspacing=0.9)

    return compose(draw, heights=heights or (extra + 0.27 * len(rows), extra + 0.37 * len(rows)), **what)


def marks(
    values: Mapping[tuple[str, str], float],
    looks: Mapping[str, tuple[str, str]],
    *,
    rows: Mapping[str, str],
    origin: float | tuple[float, float],
    **what: Any,
) -> Chart:
    """One row per name and one mark per series, on a line from `origin` to the mark, or over the whole `origin`.

    Args:
        values: by row and series.
        looks: the shape and colour of each series.
        rows: the display names of the rows.
    """
    over = origin if isinstance(origin, tuple) else None

    def each(axes: Axes, y: float, row: str, layout: Layout) -> None:
        for series, look in looks.items():
            if (row, series) in values:
                axes.plot(over or (origin, values[row, series]), [y, y], color=GRID, linewidth=1.2, zorder=1)
                _mark(axes, values[row, series], y, *look, zorder=2)

    return _row_chart(
        [(title, row) for row, title in rows.items()],
        each,
        extra=0.95,
        xlim={"wide": over, "narrow": over} if over else None,
        reference=None if isinstance(origin, tuple) else (origin, {}),
        legend={series: {"marker": shape, "color": colour} for series, (shape, colour) in looks.items()},
        columns=(len(looks), 2),
        **what,
    )


def _stacked(
    shares: Mapping[str, Mapping[str, float]], *, totals: Mapping[str, int] | None = None, **what: Any
) -> Chart:
    """One bar of 100 percent per row, split into groups; `totals`, the absolute size, are printed at its end."""
    groups = dict(zip(next(iter(shares.values())), _CATEGORIES, strict=False))

    def each(axes: Axes, y: float, row: str, layout: Layout) -> None:
        left, height = 0.0, 0.66 if layout == "wide" else 0.4
        for group, colour in groups.items():
            share = shares[row][group]
            axes.barh(y, share, left=left, height=height, color=colour, edgecolor=SURFACE, linewidth=1)
            left += share
        if totals:
            axes.text(101.5, y, f"{totals[row]:,}", va="center", color=MUTED)

    return _row_chart(
        [(row, row) for row in shares],
        each,
        heights=(1.2 + 0.3 * len(shares), 1.7 + 0.4 * len(shares)),
        xlim={"wide": (0, 112 if totals else 100), "narrow": (0, 122 if totals else 100)},
        xticks=_PERCENT,
        bars=True,
        corner="number" if totals else "",
        legend={group: {"marker": "s", "color": colour} for group, colour in groups.items()},
        columns=(5, 2),
        **what,
    )


_PERCENT = (0, 25, 50, 75, 100)


# --- The ladder -------------------------------------------------------------------------------------------------------


def _timed(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows with a burst time.

    Raises:
        NoDataError: none has one.
    """
    timed = [row for row in rows if row.samples_of()]
    if not timed:
        raise NoDataError(f"wanted at least one row with burst hot samples, found none among {len(rows)} rows")
    return timed


def _spread(row: Measurement) -> tuple[float, float, float]:
    """Burst rate at the 95th percentile of the times, at the median, and at the 5th."""
    import numpy as np

    samples, problem = row.samples_of(), row.problem
    assert samples is not None
    slow, mid, fast = (problem.tflops(float(t)) for t in np.percentile(samples.time_us, (95, 50, 5)))
    return slow, mid, fast


def _stages_then_libraries(lines: Sequence[Measurement], best: float | None) -> dict[str, Any]:
    """Row positions of a ladder, with libraries set apart, and the reference line of the fastest library."""
    look = {"color": PEER, "linestyle": (0, (3, 3)), "alpha": 0.8, "zorder": 0}
    return {
        "positions": [index + (0.6 if row.kind == "peer" else 0.0) for index, row in enumerate(lines)],
        "reference": None if best is None else (best, look),
    }


def ladder(
    rows: Sequence[Measurement],
    *,
    name: str = "ladder",
    beside: Sequence[Measurement] = (),
    records: Sequence[Measurement] = (),
) -> Chart:
    """Every stage and every library at one problem, TFLOP/s on a logarithmic axis, with the 5th to 95th percentile.

    A logarithmic axis, because rates span orders of magnitude and equal steps then mean equal factors; marks rather
    than bars, because a bar's length would mean nothing there. Rows without a time stay, with the reason.

    Args:
        beside: as `Results.beside` gives them, shown hollow in place of the same libraries' rows without a time.
        records: as for `select.fastest_stage`.

    Raises:
        NoDataError: no row has a time.
    """
    timed = _timed(rows)
    beside = [row for row in beside if row.samples_of()]
    rates = {row.name: _spread(row) for row in (*timed, *beside)}
    peer, stage = select.fastest_peer(rows), select.fastest_stage(rows, records=records)
    dtype, note = rows[0].problem.dtype, beside_note(rows, beside)
    notes = [f"Hollow: {note}" if note else "", elsewhere_note(rows), fastest_note(rows, records)]
    best = f"The fastest stage, {stage.name}, reaches {number(rates[stage.name][1])} TFLOP/s" if stage else ""
    library = f"the fastest library in {dtype}, {title_of(peer.name)}, {number(rates[peer.name][1])}" if peer else ""
    hollow, lines = {row.name for row in beside}, select.with_beside(rows, beside)
    left, top = min(low for low, _, _ in rates.values()) / 1.7, max(high for _, _, high in rates.values())
    right: dict[Layout, float] = {"wide": top * 3.0, "narrow": top * 4.5}

    def each(axes: Axes, y: float, row: Measurement, layout: Layout) -> None:
        colour = PEER if row.kind == "peer" else STAGE
        if row.name not in rates:
            axes.text(left * 1.06, y, f"{row.status}", va="center", color=MUTED, style="italic")
            return
        slow, mid, fast = rates[row.name]
        axes.plot([left, mid], [y, y], color=GRID, linewidth=1.2, solid_capstyle="butt", zorder=1)
        axes.plot([slow, fast], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round", zorder=2)
        # A line of one point shows nothing; with it README's chart stays what is committed, byte for byte.
        look = {"markeredgewidth": 1.4, "zorder": 3, "linestyle": "-"}
        face = PAPER if row.name in hollow else colour
        _mark(axes, mid, y, "D" if row.kind == "peer" else "o", colour, markerfacecolor=face, **look)
        # Where all is narrow the dashed line would strike numbers through.
        paper = {"bbox": {"facecolor": PAPER, "pad": 0.6}} if layout == "narrow" else {}
        _text(axes, number(mid), (max(mid, fast), y), (7, 0), va="center", weight="normal", **paper)
        parent = select.parent_of(row, rows)
        if parent is not None and parent.name in rates:
            gain = f"×{number(mid / rates[parent.name][1])}"
            axes.text(right[layout], y, gain, va="center", ha="right", color=MUTED)

    return _row_chart(
        [(beside_title(row) if row.name in hollow else title_of(row.name), row) for row in lines],
        each,
        name=name,
        xlabel="TFLOP/s, logarithmic",
        heights=(0.65 + 0.27 * (len(rows) + 1), 0.65 + 0.37 * (len(rows) + 1)),
        xlim={layout: (left, end) for layout, end in right.items()},
        log=True,
        **_stages_then_libraries(lines, rates[peer.name][1] if peer else None),
        corner="× parent",
        alt=f"Throughput of {len(timed)} stages and libraries on a logarithmic axis. "
        f"{best or 'No stage has a time'}; {library or 'no library has a time'}." + (f" {note}" if note else ""),
        caption="Throughput of each stage (circles) and library (diamonds): median, with the 5th to 95th percentile as "
        f"a band, often narrower than the mark. The dashed line is the fastest library in {dtype}."
        + "".join(f" {note}" for note in notes if note),
        **_of_rows(timed),
    )


_FRONT_LIBRARIES = 4
"""Number of the fastest libraries on the front page."""


def climb(rows: Sequence[Measurement], *, records: Sequence[Measurement] = ()) -> Chart:
    """The whole ladder and the fastest libraries at one problem, TFLOP/s as bars from 0, so that its top can be read.

    The fastest stage is highlighted. A rate is followed by its percentage of the tensor cores' peak, where known.

    Args:
        records: as for `select.fastest_stage`.

    Raises:
        NoDataError: no row has a time.
    """
    timed = _timed(rows)
    rates = {row.name: select.rate(row) or 0.0 for row in timed}
    stages = [row for row in timed if row.kind == "stage"]
    others = sorted((row for row in timed if row.kind == "peer"), key=lambda row: -rates[row.name])
    # One library by two names is shown once: dispatch by PyTorch to cuDNN is cuDNN.
    kept = [row for row in others if row.name != "sdpa"][:_FRONT_LIBRARIES]
    peer, stage = select.fastest_peer(rows), select.fastest_stage(rows, records=records)
    highlight, note = stage.name if stage else "", fastest_note(rows, records)
    lines = [*stages, *kept]

    def each(axes: Axes, y: float, row: Measurement, layout: Layout) -> None:
        colour = PEER if row.kind == "peer" else ACCENT if row.name == highlight else STAGE
        axes.barh(y, rates[row.name], height=0.62 if layout == "wide" else 0.42, color=colour)
        share = percent_of_peak(row)
        words = number(rates[row.name]) + (f"  ({number(share, 2)} %)" if share else "")
        look = {"bbox": {"facecolor": PAPER, "pad": 0.6}, "weight": "bold" if row.name == highlight else "normal"}
        _text(axes, words, (rates[row.name], y), (5, 0), va="center", **look)

    top = max(rates.values())
    said = [f"{title_of(row.name)} {number(rates[row.name])}" for row in lines]
    return _row_chart(
        [(title_of(row.name), row) for row in lines],
        each,
        name="front",
        xlabel="TFLOP/s (percent of the tensor cores' peak)",
        heights=(0.7 + 0.27 * (len(lines) + 1), 0.7 + 0.37 * (len(lines) + 1)),
        xlim={"wide": (0, top * 1.2), "narrow": (0, top * 1.36)},
        **_stages_then_libraries(lines, rates[peer.name] if peer else None),
        bars=True,
        bold=[highlight] if highlight else [],
        alt=f"Throughput in TFLOP/s from 0. {'; '.join(said)}.",
        caption=f"Throughput of each version of the kernel and of the {len(kept)} fastest libraries in "
        f"{rows[0].problem.dtype}, median. The dashed line is the fastest of them." + (f" {note}" if note else ""),
        **_of_rows(timed),
    )


def card(rows: Sequence[Measurement], *, title: str, said: Sequence[str]) -> bytes:
    """The picture that a link to the report is shown with: a PNG of 1200 by 630 pixels, the ladder as columns.

    Args:
        rows: of one problem; may be empty.
        said: lines below the title.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    stages = {row.name: rate for row in rows if row.kind == "stage" and (rate := select.rate(row))}
    peer = select.fastest_peer(rows)
    with mpl.rc_context(rc={"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(12, 6.3), dpi=100, facecolor=_PAGE["light"])
        figure.text(0.05, 0.85, title, size=38, weight="bold", color=INK)
        for place, line in enumerate(said):
            figure.text(0.05, 0.745 - 0.075 * place, line, size=24, color=INK)
        axes: Axes = figure.add_axes((0.05, 0.06, 0.9, 0.5))
        axes.bar(range(len(stages)), list(stages.values()), width=0.75, color=STAGE)
        if peer and (rate := select.rate(peer)):
            axes.axhline(rate, color=PEER, linestyle=(0, (3, 3)), linewidth=2.5)
            _text(axes, title_of(peer.name), (-0.4, rate), (0, 8), size=17, color=PEER)
        axes.set_axis_off()
        buffer = BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def side_by_side(
    series: Mapping[str, Sequence[Measurement]], looks: Mapping[str, tuple[str, str]], **what: Any
) -> Chart:
    """Rates of the same stages and libraries on several GPUs or inputs: a row each, a mark per series.

    Args:
        series: rows of one problem, by the name of their GPU or inputs.
        looks: the shape and colour of each.
    """
    every = [(title, row) for title, rows in series.items() for row in rows]
    rates = {(row.name, title): rate for title, row in every if (rate := select.rate(row)) is not None}
    names = {row.name: title_of(row.name) for _, row in every}
    said = "; ".join(f"{names[of]} on {title} {number(rate)}" for (of, title), rate in rates.items())
    return marks(
        rates,
        looks,
        rows=names,
        origin=0.0,
        xlabel="TFLOP/s",
        alt=f"Throughput in TFLOP/s: {said}.",
        data_files=select.run_files(row for _, row in every),
        **what,
    )


def across(compared: Sequence[Across], everything: Sequence[Results]) -> Chart:
    """Rates of each GPU at one problem: a row per stage or library, a mark per GPU."""
    titles = {shown.gpu: shown.name.removeprefix("NVIDIA ") for shown in everything}
    series = {title: [across.rows[gpu] for across in compared if gpu in across.rows] for gpu, title in titles.items()}
    clocks = ", ".join(f"{title} {select.clocks(rows)}" for title, rows in series.items())
    return side_by_side(
        series,
        {title: ("oDs^v"[i % 5], _CATEGORIES[i % len(_CATEGORIES)]) for i, title in enumerate(series)},
        name="across-gpus",
        caption=f"The same versions and libraries on each GPU at {compared[0].problem.label}, burst, median. "
        f"SM clock inside the calls: {clocks}.",
        provenance=select.sourced(" and ".join(series), runs=(row.run for rows in series.values() for row in rows)),
    )


def waterfall(rows: Sequence[Measurement]) -> Chart:
    """Speed-up of each stage over its parent: a bar from the parent's rate to the child's on a logarithmic axis.

    Raises:
        NoDataError: no stage and its parent both have times.
    """
    pairs = [(row, parent) for row in rows if (parent := select.parent_of(row, rows))]
    steps = {
        row.name: (before, after)
        for row, parent in pairs
        if (before := select.rate(parent)) and (after := select.rate(row))
    }
    if not steps:
        raise NoDataError("wanted a stage and its parent, both with times, found none")
    ends = [rate for pair in steps.values() for rate in pair]

    def each(axes: Axes, y: float, step: tuple[float, float], layout: Layout) -> None:
        before, after = step
        colour, height = STAGE if after >= before else LOSS, 0.5 if layout == "wide" else 0.36
        axes.barh(y, after - before, left=before, height=height, color=colour, alpha=0.9)
        text = f"×{number(after / before)}{'' if after >= before else ' slower'}"
        _text(axes, text, (max(step), y), (6, 0), va="center")
        if y:
            axes.plot([before, before], [y - 0.75, y - 0.25], color=MUTED, linewidth=0.8)

    factors = ", ".join(f"{stage} ×{number(after / before)}" for stage, (before, after) in steps.items())
    return _row_chart(
        list(steps.items()),
        each,
        name="waterfall",
        xlabel="TFLOP/s, logarithmic",
        xlim={"wide": (min(ends) / 1.6, max(ends) * 1.9), "narrow": (min(ends) / 1.6, max(ends) * 3.0)},
        bars=True,
        log=True,
        alt=f"Speed-up of each stage over its parent: {factors}.",
        caption="Speed-up of each stage: a bar from its parent's rate to its own; equal lengths are equal factors.",
        **_of_rows([row for row, _ in pairs if row.name in steps]),
    )


def regimes(rows: Sequence[Measurement], *, name: str = "regimes") -> Chart:
    """Cold cache and sustained load as a percentage of the burst rate with a hot L2.

    Raises:
        NoDataError: no row has a burst time, or none has another.
    """
    timed = _timed(rows)
    states = {name: state for state, name in select.STATES.items() if state != ("burst", "hot")}
    looks = dict(zip(states, (("s", STAGE), ("^", ACCENT), ("v", LOSS), ("D", PEER)), strict=True))
    shares = {
        (row.name, series): 100 * rate / (select.rate(row) or rate)
        for row in timed
        for series, state in states.items()
        if (rate := select.rate(row, *state))
    }
    if not shares:
        wanted = f"times with a cold L2 or under sustained load at {timed[0].problem.label}"
        raise NoDataError.of(wanted, "flashlab bench --suite first", "bursts with a hot L2 alone")
    under_load = [
        f"{title_of(r.name)} {number(shares[r.name, 'sustained'])} %" for r in timed if (r.name, "sustained") in shares
    ]
    loaded = f", sustained {select.clocks(timed, 'sustained')}" if under_load else ""
    return marks(
        shares,
        {series: look for series, look in looks.items() if any(of == series for _, of in shares)},
        rows={row.name: title_of(row.name) for row in timed if any(name == row.name for name, _ in shares)},
        origin=100.0,
        xlabel="percent of the burst rate with a hot L2",
        name=name,
        alt=f"Rate under sustained load as a percentage of the burst rate: {'; '.join(under_load) or 'not measured'}.",
        caption=f"Rates relative to bursts with a hot L2. SM clock: burst {select.clocks(timed)}{loaded}.",
        provenance=select.provenance(timed, state="all regimes"),
        data_files=select.run_files(timed),
    )


def samples(row: Measurement, *, name: str = "samples") -> Chart:
    """Every sample of one row in the order taken, with the SM clock if it was recorded.

    Raises:
        NoDataError: the row has no samples.
    """
    states = {name: taken for state, name in select.STATES.items() if (taken := row.samples_of(*state))}
    if not states:
        raise NoDataError(f"wanted samples of {row.name}, its status is {row.status}: {row.reason}")
    over = any(taken.call_clock_mhz for taken in states.values())
    with_clock = over or any(taken.sm_clock_mhz for taken in states.values())
    below = f", and below it the SM clock {'over' if over else 'after'} the calls" if with_clock else ""
    panels = (("time, µs", STAGE), ("SM, MHz", PEER))[: 1 + with_clock]

    def draw(figure: Figure, layout: Layout) -> None:
        shape: dict[str, Any] = {"squeeze": False, "sharey": "row", "sharex": "col"}
        grid = figure.subplots(len(panels), len(states), height_ratios=[3, 2][: len(panels)], **shape)
        for column, (title, taken) in enumerate(states.items()):
            series = (taken.time_us, taken.call_clock_mhz or taken.sm_clock_mhz)
            for axes, values, (_, colour) in zip(grid[:, column], series, panels, strict=False):
                axes.plot(range(len(values)), values, ".", color=colour, markersize=3.5, alpha=0.7)
                axes.grid(axis="y")
            grid[0][column].axhline(taken.median_us, color=INK, linewidth=1)
            grid[0][column].set_title(title if layout == "wide" else title.replace(", ", "\n").removesuffix(" L2"))
            grid[-1][column].set_xlabel("sample")
        for axes, (label, _) in zip(grid[:, 0], panels, strict=True):
            axes.set_ylabel(label)

    said = "; ".join(
        f"{title.replace(',', '').removesuffix(' L2')}: median {number(taken.median_us)} µs, standard deviation "
        f"{number(taken.cv_percent)} %"
        for title, taken in states.items()
    )
    return compose(
        draw,
        name=name,
        heights=(3.6, 3.6) if with_clock else (2.4, 2.4),
        alt=f"Every sample of {row.name} in the order taken. {said}.",
        caption=f"Every sample of {title_of(row.name)} in the order taken: the time of one call"
        f"{below}. The line is the median; the axes do not start at 0.",
        provenance=select.provenance([row], state="all regimes"),
        data_files=select.run_files([row]),
    )


def errors(rows: Sequence[Measurement]) -> Chart:
    """Largest error of each row as a fraction of its limit: left of one passes.

    Raises:
        NoDataError: no row has a verdict with an error.
    """
    judged = [(row, v) for row in rows if (v := row.verdict) and v.max_abs_error is not None and v.max_abs_limit]
    if not judged:
        raise NoDataError("wanted rows with a verdict, found none")

    def each(axes: Axes, y: float, item: tuple[Measurement, Verdict], layout: Layout) -> None:
        row, verdict = item
        worst = (verdict.max_abs_error or 0.0) / (verdict.max_abs_limit or 1.0)
        colour = LOSS if not verdict.passed else PEER if row.kind == "peer" else STAGE
        _mark(axes, max(worst, 1e-3), y, "D" if row.kind == "peer" else "o", colour)
        if verdict.rms_error is not None and verdict.rms_limit:
            _mark(axes, max(verdict.rms_error / verdict.rms_limit, 1e-3), y, "|", MUTED, markersize=9, mew=1.6)

    of_rows = _of_rows([row for row, _ in judged])
    return _row_chart(
        [(title_of(row.name), (row, verdict)) for row, verdict in judged],
        each,
        name="errors",
        xlabel="error ÷ limit, logarithmic",
        extra=0.65,
        reference=(1.0, {"color": LOSS, "linewidth": 1.2}),
        log=True,
        alt=f"Error over its limit for {len(judged)} stages and libraries; {sum(v.passed for _, v in judged)} of them "
        "pass.",
        caption="Largest error (mark) and root-mean-square error (bar), each over its limit. "
        "Left of the line passes. The limit is twice the error of the same computation done plainly, plus rounding "
        "slack.",
        **of_rows | {"provenance": of_rows["provenance"].replace(" · burst, hot L2", "")},
    )


def _columns(axes: Axes, labels: Sequence[object], xlabel: str, ylabel: str) -> None:
    """Name the columns of a chart of lines, evenly apart, and its axes."""
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.tick_params(axis="y", labelcolor=MUTED)
    axes.grid(axis="y")
    axes.set(xlabel=xlabel, ylabel=ylabel)


def row_errors(
    errors: Mapping[str, Sequence[float]], *, rows: int, limit: float | None = None, note: str = "", name: str
) -> Chart:
    """The largest error of each block of query rows, for several runs of one problem, on a logarithmic axis.

    Args:
        errors: by the run's name; non-finite values are drawn at the top.
        rows: rows in a block.
        limit: the largest error that passes, where known.
        note: the provenance.

    Raises:
        NoDataError: no run has an error to draw.
    """
    runs = {title: [float(value) for value in values] for title, values in errors.items() if len(values)}
    sizes = [value for values in runs.values() for value in values if math.isfinite(value) and value > 0]
    if not sizes:
        raise NoDataError("wanted at least one finite error, found none")
    low, high = min(sizes) / 2, max([*sizes, limit or 0.0]) * 3
    blocks = max(map(len, runs.values()))

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        axes.set_yscale("log")
        shift = 0.24 / max(1, len(runs) - 1)
        for index, (title, values) in enumerate(runs.items()):
            places = [place + (index - (len(runs) - 1) / 2) * shift for place in range(len(values))]
            heights = [min(max(value, low), high) if math.isfinite(value) else high for value in values]
            colour = (STAGE, PEER, ACCENT, LOSS)[index % 4]
            axes.plot(places, heights, "oDsv"[index % 4], color=colour, label=title, clip_on=False, zorder=3)
            for place, value in zip(places, values, strict=True):
                if not math.isfinite(value):
                    _text(axes, "NaN", (place, high), (0, 6), ha="center", color=colour)
        if limit:
            axes.axhline(limit, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), label="largest error that passes")
        spans = [f"{block * rows}–{(block + 1) * rows - 1}" for block in range(blocks)]
        _columns(axes, spans, "query rows", "largest error")
        axes.set(ylim=(low, high), xlim=(-0.5, blocks - 0.5))
        axes.tick_params(axis="x", labelrotation=60 if layout == "narrow" or blocks > 8 else 0)
        axes.spines[["left", "bottom"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=3 if layout == "wide" else 1)

    worst = "; ".join(
        f"{title}: {max(values):.1e}" if all(map(math.isfinite, values)) else f"{title}: not finite"
        for title, values in runs.items()
    )
    return compose(
        draw,
        name=name,
        heights=(3.0, 3.6),
        alt=f"Largest error of each block of {rows} query rows against the float64 oracle. The worst block of {worst}.",
        caption=f"Largest error of each block of {rows} query rows, over all heads, against the float64 oracle.",
        provenance=note,
    )


# --- Over shapes and lengths ------------------------------------------------------------------------------------------

_UPRIGHT = 8
"""Maximum columns of a wide chart of shapes whose names fit side by side."""
_OF_LENGTHS = frozenset(suite("lengths"))
"""Problems with separate figures."""
_FAST = 0.15
"""Fraction of a chart's fastest rate; what never reaches it has no line and appears only in the table."""
_STAGE_MARKS, _LIBRARY_MARKS = "os^v", "DPX*"
_RIVAL_MARKS = "oD<>vPX*sh^pd8H"
"""One marker per library of `PEERS`, where only the shape identifies the library."""


def mark(name: str) -> tuple[str, str]:
    """Colour and shape of a stage or library among many lines: no two have both in common.

    It depends on the name, so that all charts agree, and counts from the ladder's end, so that its last rungs differ in
    colour.
    """
    if name in peers.PEERS:
        names, colours, shapes = list(peers.PEERS), _OF_LIBRARIES, _LIBRARY_MARKS
    else:
        names, colours, shapes = [*reversed(list(registry.STAGES)), name], _CATEGORIES, _STAGE_MARKS
    turn, colour = divmod(names.index(name), len(colours))
    return colours[colour], shapes[turn % len(shapes)]


def _whence(
    shown: Results, problems: Iterable[Problem], drawn: Sequence[Measurement], *, each: str, regime: Regime = "burst"
) -> str:
    """Caption text on the sessions that a chart's rows are from; empty if there is only one."""
    sessions, chips = select.places((row for row in drawn if row.kind == "stage"), regime)
    late = {
        row.name
        for problem in problems
        for row in select.elsewhere(shown.problems[problem], regime)
        if row.kind == "peer"
    }
    said = ""
    if sessions > 1:
        said += f" The stages were measured in {sessions} sessions, on {several(chips, 'GPU')}."
    if titles := sorted(title_of(name) for name in late & {row.name for row in drawn}):
        said += f" In another session than the last stage at one or more {each}s: {', '.join(titles)}."
    return said


def scaling(
    shown: Results, *, mask: str, dtype: str = "float16", name: str = "scaling", stage_ids: Sequence[str] | None = None
) -> Chart:
    """Every shape at once: rate as a percentage of the fastest library at that shape.

    Raises:
        NoDataError: fewer than two problems of that mask and element type have times.
    """
    import pandas as pd

    libraries = shown.libraries(dtype)
    best = {
        problem: select.rate(peer)
        for problem, rows in shown.problems.items()
        if (problem.mask, problem.dtype) == (mask, dtype)
        and (problem.shape in STANDARD_SHAPES or replace(problem, inputs=NORMAL) not in _OF_LENGTHS)
        and (peer := select.fastest_of(libraries, rows))
    }
    if len(best) < 2:
        wanted = f"several {mask} {dtype} problems at which each library was timed on {shown.gpu}"
        raise NoDataError.of(wanted, select.bench("standard", inputs=shown.inputs), len(best))
    used = [(problem, row) for problem in best for row in shown.rows(problem, stage_ids=stage_ids) if select.rate(row)]
    kinds = {row.name: row.kind for kind in ("stage", "peer") for _, row in used if row.kind == kind}
    frame = pd.DataFrame(
        {
            problem: {row.name: 100 * (select.rate(row) or 0.0) / (top or 1.0) for at, row in used if at == problem}
            for problem, top in best.items()
        }
    ).reindex(list(kinds))

    def draw(figure: Figure, layout: Layout) -> None:
        import seaborn as sns
        from matplotlib.colors import LinearSegmentedColormap

        axes: Axes = figure.subplots()
        sns.heatmap(
            frame.to_numpy(),
            ax=axes,
            cmap=LinearSegmentedColormap.from_list("rate", ["#f2f5f7", "#9cc9e6", "#2a7fb8", "#0b4a78"]),
            vmin=0,
            vmax=100,
            annot=frame.map(lambda v: "" if math.isnan(v) else f"{v:.0f}" if v >= 9.5 else f"{v:.1f}").to_numpy(),
            fmt="",
            cbar=False,
            linewidths=1.5,
            linecolor=SURFACE,
            annot_kws={"size": 9 if layout == "wide" else 7.2},
            xticklabels=[problem.sizes.replace(" S", "\nS", 1) for problem in best],
            yticklabels=[title_of(name) for name in kinds],
        )
        axes.axhline(list(kinds.values()).count("stage"), color=MUTED, linewidth=1)
        axes.tick_params(labelsize=8 if layout == "wide" else 7.2)
        axes.tick_params(axis="x", labelrotation=90 if layout == "narrow" or len(best) > _UPRIGHT else 0)
        axes.tick_params(axis="y", labelrotation=0)
        axes.set_xlabel(
            "percent of the fastest library's rate at that shape" if layout == "wide" else "% of the fastest library"
        )

    height, drawn = 0.95 + 0.25 * len(kinds), [row for _, row in used]
    return compose(
        draw,
        name=name,
        heights=(height, height + 0.35),
        alt=f"Rate of {len(kinds)} stages and libraries at {len(best)} {mask} {dtype} shapes, "
        "as a percentage of the fastest library at each shape. The tables of this page have the same numbers.",
        caption=f"Every {mask} {dtype} shape, {select.on_inputs(best)}, at which each of {set_of(libraries)} was "
        "tried: percent of the fastest one's rate. "
        "Blank: no time; see the tables." + _whence(shown, best, drawn, each="shape"),
        **_of_rows(drawn),
    )


def ratios(shown: Results, *, found: Sequence[AgainstPeers], regime: Regime = "burst") -> Chart:
    """Speed-up of the best stage over the best library, over sequence length at a constant number of tokens.

    One panel per element type, one line per head dim and mask; a point's shape is the library. `found` is the result of
    `contests.against_peers`: each point is from one run.

    Raises:
        NoDataError: no head dim, mask and element type has a ratio at two lengths.
    """
    held = [(at.problem, at.burst if regime == "burst" else at.sustained) for at in found]
    wanted = {replace(problem, inputs=shown.inputs) for problem in _OF_LENGTHS}
    lines: dict[tuple[str, int, str], dict[int, Contest]] = {}
    for problem, contest in sorted(
        held, key=lambda pair: (pair[0].dtype, pair[0].head_dim, pair[0].mask, pair[0].q_len)
    ):
        if problem in wanted and contest:
            lines.setdefault((problem.dtype, problem.head_dim, problem.mask), {})[problem.q_len] = contest
    lines = {kind: at for kind, at in lines.items() if len(at) > 1}
    if not lines:
        raise NoDataError.of(
            f"{regime} ratios at several sequence lengths on {shown.gpu}",
            select.bench("lengths", regime, shown.inputs),
        )
    contests = [contest for at in lines.values() for contest in at.values()]
    runs = sorted({contest.run for contest in contests})
    counts = sorted({count for at in lines.values() for count in at})
    dtypes = sorted({dtype for dtype, _, _ in lines})
    kinds = sorted({(head_dim, mask) for _, head_dim, mask in lines}, key=lambda kind: (kind[0], kind[1] == "causal"))
    colours = dict(zip(kinds, _CATEGORIES, strict=False))
    rank = {name: index for index, name in enumerate(peers.PEERS)}
    libraries = sorted({contest.peer.name for contest in contests}, key=lambda name: (rank.get(name, len(rank)), name))
    shapes = {library: _RIVAL_MARKS[rank.get(library, len(rank)) % len(_RIVAL_MARKS)] for library in libraries}
    low, high = (pick(contest.ratio for contest in contests) for pick in (min, max))

    def draw(figure: Figure, layout: Layout) -> None:
        from matplotlib.lines import Line2D

        panels = (1, len(dtypes)) if layout == "wide" else (len(dtypes), 1)
        grid = figure.subplots(*panels, squeeze=False, sharey=True)
        for axes, dtype in zip(grid.flat, dtypes, strict=True):
            for kind in kinds:
                at = {counts.index(count): contest for count, contest in lines.get((dtype, *kind), {}).items()}
                axes.plot(list(at), [contest.ratio for contest in at.values()], color=colours[kind], linewidth=1.6)
                for place, contest in at.items():
                    axes.plot([place], [contest.ratio], shapes[contest.peer.name], color=colours[kind], markersize=6)
            axes.axhline(1, color=MUTED, linewidth=1)
            _columns(axes, counts, "sequence length", "speed-up" if axes is grid.flat[0] else "")
            axes.set(ylim=(min(0.97, low - 0.02), max(1.03, high + 0.02)), title=dtype)
        handles = [Line2D([], [], color=colours[kind], label=f"D{kind[0]} {kind[1]}") for kind in kinds] + [
            Line2D([], [], color=MUTED, linestyle="", marker=shapes[library], label=f"over {short_title(library)}")
            for library in libraries
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4 if layout == "wide" else 1)

    entries = len(kinds) + len(libraries)
    said = "; ".join(
        f"D{head_dim} {mask} {dtype}: "
        + ", ".join(
            f"S{count} {number(contest.ratio)} over {short_title(contest.peer.name)}" for count, contest in at.items()
        )
        for (dtype, head_dim, mask), at in lines.items()
    )
    return compose(
        draw,
        name=f"ratios-{regime}",
        heights=(3.2 + 0.19 * math.ceil(entries / 4), 2.4 * len(dtypes) + 0.17 * entries),
        alt=f"The best stage's rate over the best library's, {regime}, over sequence length. {said}.",
        caption=f"Speed-up of the best stage over the best library of the same element type, {regime}, "
        f"{select.on_inputs(wanted)}: from {number(low)} to {number(high)}. Lines are head dims and masks; a "
        "point's shape is the library. Below one the library is faster. Each point is from one run, in which the two "
        "were interleaved; runs may be from several sessions and GPUs.",
        provenance=_of_contests(shown, contests, regime),
        data_files=tuple(f"{shown.gpu}/runs/{run}.jsonl" for run in runs),
    )


def _of_contests(shown: Results, contests: Sequence[Contest], regime: Regime) -> str:
    """Caption text on the source of ratios over sequence lengths."""
    runs = {contest.run for contest in contests}
    rows = [row for contest in contests for row in (contest.stage, contest.peer)]
    clocks = sorted(clock for row in rows if (clock := select.call_clock(row, regime)))
    spread = f"SM {clocks[0]:.0f}–{clocks[-1]:.0f} MHz in the calls" if clocks else "clock not recorded"
    on = select.on_inputs(row.problem for row in rows)
    return select.sourced(shown.name, spread, on, regime, runs=runs)


def lengths(shown: Results, *, head_dim: int, mask: str, dtype: str = "float16", regime: Regime = "burst") -> Chart:
    """Rate over sequence length at a constant number of tokens, of stages and libraries; right axis: percent of peak.

    A line needs two lengths and a rate of at least `_FAST` of the fastest; others are left out.
    The peak is that of the tensor cores, measured on the same GPU. Libraries that lack the element type are hollow, in
    another type (`Results.beside`).

    Raises:
        NoDataError: fewer than two lengths were measured, or none twice of one stage or library.
    """
    problems = select.of_lengths(shown, head_dim=head_dim, mask=mask, dtype=dtype, regime=regime)
    ceiling = shown.ceilings.get(f"tensor_{dtype}")
    rows = (row for problem in problems for row in (*shown.rows(problem), *shown.beside(problem)))
    used = [row for row in rows if select.rate(row, regime)]
    lines: dict[str, dict[int, Measurement]] = {}
    for row in used:
        label = title_of(row.name) if row.problem.dtype == dtype else beside_title(row)
        lines.setdefault(label, {})[row.problem.q_len] = row
    rates = {
        label: {count: select.rate(row, regime) or 0.0 for count, row in at.items()}
        for label, at in lines.items()
        if len(at) > 1
    }
    if not rates:
        raise NoDataError(f"wanted one stage or library at two sequence lengths, found none on {shown.gpu}")
    best = {label: max(of_label.values()) for label, of_label in rates.items()}
    top, any_of = max(best.values()), {label: next(iter(at.values())) for label, at in lines.items()}
    fast = (label for label in rates if best[label] >= _FAST * top)
    order = sorted(fast, key=lambda label: (any_of[label].kind != "stage", -best[label]))
    counts = [problem.q_len for problem in problems]

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        for label in order:
            row, (colour, shape) = any_of[label], mark(any_of[label].name)
            axes.plot(
                list(map(counts.index, rates[label])),
                list(rates[label].values()),
                label=label,
                color=colour,
                marker=shape,
                markersize=5,
                markerfacecolor=colour if row.problem.dtype == dtype else PAPER,
                linewidth=1.8 if row.kind == "stage" else 1.2,
                linestyle="-" if row.kind == "stage" else (0, (4, 2)),
            )
        _columns(axes, counts, "sequence length", "TFLOP/s")
        axes.set_ylim(0, top * 1.08)
        if ceiling is not None:
            right = axes.twinx()
            right.set(ylim=(0, 100 * top * 1.08 / ceiling.value), ylabel="percent of a large GEMM's rate")
            right.tick_params(axis="y", labelcolor=MUTED)
        figure.legend(loc="outside lower left", ncols=3 if layout == "wide" else 1)

    first: dict[str, str] = {}
    for label in order:
        if any_of[label].problem.dtype == dtype:
            first.setdefault(any_of[label].kind, label)
    fastest = "; ".join(
        f"{label} {', '.join(f'S{count} {number(rate)}' for count, rate in rates[label].items())}"
        for label in first.values()
    )
    counted = {"slower": len(rates) - len(order), "measured at one length": len(lines) - len(rates)}
    left_out = " and ".join(f"{many} {what}" for what, many in counted.items() if many)
    tokens = problems[0].batch * problems[0].q_len
    return compose(
        draw,
        name=f"lengths-D{head_dim}-{mask}-{dtype}-{regime}",
        heights=(3.3 + 0.19 * math.ceil(len(order) / 3), 2.7 + 0.17 * len(order)),
        alt=f"Throughput in TFLOP/s over sequence length at {tokens:,} tokens, D{head_dim} {mask} {dtype}, {regime}. "
        f"{fastest}.",
        caption=f"D{head_dim}, {mask}, {dtype}, {regime}: {tokens:,} tokens in sequences of each length, "
        "stages (solid) and libraries (dashed; hollow in another element type)."
        + (f" Right axis: percent of a large {dtype} GEMM's burst rate on this GPU." if ceiling else "")
        + (f" {left_out} are not drawn." if left_out else "")
        + _whence(shown, problems, used, each="length", regime=regime),
        **_of_rows(used, regime),
    )


# --- Inside a kernel --------------------------------------------------------------------------------------------------

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
"""Instruction classes in the groups that a chart shows."""


def sass_mix(mixes: Mapping[str, Mapping[str, int]], *, note: str = "") -> Chart:
    """The instruction mix of each kernel's machine code: static counts, one bar per kernel.

    Args:
        mixes: counts by class (see sass.py) for each label; at least one kernel.
        note: what was compiled: architecture, head dim, element type.
    """
    counts = {
        label: {group: sum(mix.get(kind, 0) for kind in kinds) for group, kinds in SASS_GROUPS.items()}
        for label, mix in mixes.items()
    }
    totals = {label: sum(of_group.values()) for label, of_group in counts.items()}
    with_tensor = [label for label, mix in mixes.items() if mix.get("tensor")]
    return _stacked(
        {
            label: {group: 100 * count / (totals[label] or 1) for group, count in of_group.items()}
            for label, of_group in counts.items()
        },
        totals=totals,
        xlabel="percent of the kernel's instructions",
        name="sass-mix",
        alt=f"Instruction mix of {len(mixes)} kernels. With tensor-core instructions: "
        f"{', '.join(with_tensor) or 'none'}.",
        caption="Static instruction mix of the machine code: what is in the kernel, not how often it runs.",
        provenance=note,
    )


STATE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Selected": ("selected",),
    "Not Selected": ("not_selected",),
    "Wait, Dispatch": ("wait", "dispatch_stall", "branch_resolving"),
    "Math Pipe Throttle": ("math_pipe_throttle",),
    "GMMA": ("gmma",),
    "Short Scoreboard, MIO": ("short_scoreboard", "mio_throttle"),
    "Long Scoreboard, LG": ("long_scoreboard", "lg_throttle", "tex_throttle"),
    "Barrier": ("barrier", "membar"),
}
"""Warp states in the groups that a chart shows, by Nsight Compute's names; the others form one more group."""


def stalls(profiles: Sequence[StageProfile]) -> Chart:
    """Warp states of each stage, one bar per launch.

    Raises:
        NoDataError: no profile names the states of warps.
    """
    shares: dict[str, dict[str, float]] = {}
    for profile in profiles:
        grouped = {group: sum(profile.states.get(state, 0) for state in of) for group, of in STATE_GROUPS.items()}
        if profile.states:
            shares[profile.stage] = grouped | {"Other": max(0.0, 100 - sum(grouped.values()))}
    if not shares:
        raise NoDataError.of("a profile with warp states", "flashlab profile")

    def largest(groups: Mapping[str, float]) -> str:
        most = sorted(groups.items(), key=lambda item: -item[1])[:2]
        return ", ".join(f"{group} {number(share, 2)} %" for group, share in most)

    said = "; ".join(f"{stage} {largest(groups)}" for stage, groups in shares.items())
    return _stacked(
        shares,
        xlabel="percent of the warps' time",
        name="stalls",
        alt=f"Warp states, the most frequent of each stage: {said}.",
        caption="Warp states of each stage: the share of its resident warps' time in which they issued (Selected), "
        "could have (Not Selected), or stalled, by reason.",
        **_of_profiles(profiles),
    )


def busy(profiles: Sequence[StageProfile]) -> Chart:
    """Utilisation of the tensor pipe, the exponential unit and the issue slots in one launch of each stage.

    Raises:
        NoDataError: no profile has it.
    """
    units = {"tensor pipe": "tensor_percent", "exponential unit": "exp_percent", "issue slots": "issue_percent"}
    shares = {
        (profile.stage, unit): float(value)
        for profile in profiles
        for unit, field in units.items()
        if (value := getattr(profile, field)) is not None
    }
    if not shares:
        raise NoDataError.of("a profile with the utilisation of units", "flashlab profile")
    said = "; ".join(f"{stage} {unit} {number(share, 2)} %" for (stage, unit), share in shares.items())
    return marks(
        shares,
        dict(zip(units, (("o", STAGE), ("D", PEER), ("s", ACCENT)), strict=True)),
        rows={profile.stage: profile.stage for profile in profiles},
        origin=(0.0, 100.0),
        xlabel="percent of the cycles in which the SM was busy",
        name="busy",
        alt=f"Unit utilisation: {said}.",
        caption="Utilisation of the tensor pipe, the unit for exponentials and conversions, and the issue slots.",
        **_of_profiles(profiles),
    )


# --- Under the roof ---------------------------------------------------------------------------------------------------


def ceilings(shown: Results) -> Chart:
    """Measured ceilings as a percentage of the data sheet's.

    Raises:
        NoDataError: nothing measured has a data sheet's value beside it.
    """
    sheet = limits.DATASHEETS.get(shown.gpu)
    pairs = [(ceiling, peak) for ceiling in shown.ceilings.values() if sheet and (peak := sheet.peak(ceiling.name))]
    if not pairs:
        raise NoDataError(f"wanted measured ceilings of {shown.gpu} with a data sheet's value beside them, found none")

    def each(axes: Axes, y: float, pair: tuple[Ceiling, float], layout: Layout) -> None:
        (ceiling, peak), height = pair, 0.56 if layout == "wide" else 0.36
        share, of = 100 * ceiling.value / peak, f" of {number(peak)}" if layout == "wide" else ""
        axes.barh(y, 100, height=height, color=GRID, alpha=0.6)
        axes.barh(y, share, height=height, color=STAGE)
        axes.text(max(share, 100) + 2, y, f"{number(ceiling.value)}{of} {ceiling.unit}", va="center")

    first = pairs[0][0]
    values = "; ".join(
        f"{ceiling.name} {number(ceiling.value)} of {number(peak)} {ceiling.unit}" for ceiling, peak in pairs
    )
    return _row_chart(
        [(pair[0].name, pair) for pair in pairs],
        each,
        name="ceilings",
        xlabel="percent of the data sheet's peak",
        xlim={"wide": (0, 165), "narrow": (0, 165)},
        xticks=_PERCENT,
        bars=True,
        alt=f"Measured ceilings beside the data sheet's: {values}.",
        caption="Measured ceilings as a percentage of the data sheet's peaks (dense GEMMs).",
        provenance=select.sourced(first.gpu.name, "burst", runs=[first.run]),
        data_files=select.run_files([ceiling for ceiling, _ in pairs]),
    )


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A stage or library under a roof."""

    row: Measurement
    intensity: float
    """Operations a byte."""
    tflops: float
    label: str = ""
    """Empty if it shares the label of the mark above or below it, or the table below names it."""
    solid: bool = True
    """False: another head dim than the first problem's; for a stage, bytes that were counted, not measured."""


@dataclass(frozen=True, kw_only=True)
class _Roof:
    """A ceiling: flat in TFLOP/s, a slope in TB/s."""

    label: str
    value: float
    is_slope: bool
    measured: bool = True
    """False: from a data sheet."""


_LABEL_POINTS = 11.5
"""Height of a label."""
_ROOF_COLOURS = ("#009e73", "#cc79a7", "#8a6fd1", "#a89f2c", "#8c6d4f")


def _roofs(
    shown: Results, problem: Problem, bandwidth: Literal["copy", "l2_read"], clock_mhz: float | None
) -> list[_Roof]:
    """The ceilings of `problem`: GEMMs on each unit, exponentials, and the memory bandwidth named `bandwidth`.

    Those of an SM's units are at `clock_mhz`.
    """
    dtype, sheet = problem.dtype, limits.DATASHEETS.get(shown.gpu)
    # Operations a result: an exponential is of one score.
    known = {
        f"tensor_{dtype}": ("a large GEMM by cuBLAS", 1),
        f"mma_sync_{dtype}": ("tensor cores, mma.sync", 1),
        "half2_fma": ("fp16 arithmetic", 1),
        "fp32_fma": ("FP32 arithmetic", 1),
        "exp2": (f"exponentials at D{problem.head_dim}", 4 * problem.head_dim),
        bandwidth: ({"copy": "device memory", "l2_read": "L2"}[bandwidth], 1),
    }
    roofs = []
    for name, (label, scale) in known.items():
        if ceiling := shown.ceilings.get(name):
            taken, value = ceiling.samples.call_clock_mhz, ceiling.value
            if taken and clock_mhz and name != bandwidth:
                value = value * clock_mhz / median(taken)
            roofs.append(_Roof(label=label, value=value * scale, is_slope=name == bandwidth))
    for name, label in ((f"tensor_{dtype}", "tensor cores"), (bandwidth, "device memory")):
        if sheet and (peak := sheet.peak(name)):
            if name != bandwidth and clock_mhz and sheet.tensor_mhz:
                peak *= clock_mhz / sheet.tensor_mhz
            roofs.append(_Roof(label=label, value=peak, is_slope=name == bandwidth, measured=False))
    return roofs


def _problem_points(shown: Results, first: Problem) -> list[_Point]:
    """Fastest stage and library at each non-causal problem of the last rung, over compulsory device-memory bytes."""
    return [
        _Point(
            row=row,
            intensity=problem.flops / problem.compulsory_bytes,
            tflops=rate,
            solid=problem.head_dim == first.head_dim,
        )
        for problem, rows in shown.with_last_rung().items()
        if (problem.dtype, problem.mask) == (first.dtype, "full")
        for row in (select.fastest_stage(rows, records=shown.records), select.fastest_peer(rows))
        if row and (rate := select.rate(row))
    ]


def _stage_points(
    shown: Results, problem: Problem, level: Literal["dram", "l2"], profiles: Sequence[StageProfile]
) -> list[_Point]:
    """For each stage with a time a hollow mark, over counted bytes, and a filled one over measured bytes, if any."""
    points: list[_Point] = []
    profiled = {profile.stage: profile for profile in profiles if profile.problem == problem}
    for row in shown.rows(problem):
        rate = select.rate(row)
        if rate is None or row.cubin is None:
            continue
        moved = getattr(profiled[row.name], f"{level}_bytes") if row.name in profiled else None
        counted = problem.compulsory_bytes if level == "dram" else limits.l2_bytes(problem, row.cubin.tile_q)
        for size, solid in ((counted, False), (moved, True)):
            if size:
                # One label a stage: the measured mark's where there is one.
                label = row.name if solid or not moved else ""
                points.append(_Point(row=row, label=label, intensity=problem.flops / size, tflops=rate, solid=solid))
    return points


def _draw_roofs(axes: Axes, roofs: Sequence[_Roof], left: float, right: float) -> None:
    """The ceilings between two intensities: slopes up to the highest flat one, flat ones from the steepest slope on."""
    top = max(roof.value for roof in roofs if not roof.is_slope)
    slope = max(roof.value for roof in roofs if roof.is_slope)
    colours = iter(_ROOF_COLOURS)
    for roof in sorted(roofs, key=lambda roof: (not roof.is_slope, not roof.measured, -roof.value)):
        label = f"{roof.label}, {number(roof.value)} {'TB/s' if roof.is_slope else 'TFLOP/s'}"
        axes.plot(
            [left, top / roof.value] if roof.is_slope else [roof.value / slope, right],
            [left * roof.value, top] if roof.is_slope else [roof.value] * 2,
            color=MUTED if roof.is_slope or not roof.measured else next(colours),
            linewidth=1.8 if roof.measured else 1.2,
            linestyle="-" if roof.measured else (0, (4, 3)),
            label=f"{label}{'' if roof.measured else ' (data sheet)'}",
        )


def _label_points(axes: Axes, layout: Layout, points: Sequence[_Point], *, points_per_decade: float) -> None:
    """Label the marks, each as far up as keeps it from the labels of neighbouring marks below."""
    placed: list[tuple[_Point, float]] = []
    for point in sorted((point for point in points if point.label), key=lambda point: point.tflops):
        natural = math.log10(point.tflops) * points_per_decade
        near = [at for other, at in placed if abs(math.log10(other.intensity / point.intensity)) < 0.6]
        placed.append((point, max([natural, *(at + _LABEL_POINTS for at in near)])))
        shift = placed[-1][1] - natural
        # Towards the side where no other mark's label begins.
        leftwards = any(0.1 < math.log10(other.intensity / point.intensity) < 0.58 for other in points)
        _text(
            axes,
            point.label,
            (point.intensity, point.tflops),
            (-7 if leftwards else 7, shift),
            ha="right" if leftwards else "left",
            va="center",
            size=8 if layout == "wide" else 7,
            color=STAGE if point.row.kind == "stage" else PEER,
            bbox={"facecolor": PAPER, "alpha": 0.8, "pad": 0.6},
            # Far from its mark a label needs a line to it.
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7} if shift > _LABEL_POINTS else None,
        )


def roofline(
    shown: Results, *, level: Literal["dram", "l2"] = "dram", profiles: Sequence[StageProfile] | None = None
) -> Chart:
    """Rates against arithmetic intensity under the GPU's ceilings.

    At `dram` each mark is a problem: the fastest stage and the fastest library at it, over the bytes that must cross
    device memory; with `profiles`, it is a stage at the first problem. At `l2` each mark is a stage at the first
    problem, over the bytes that its tiles load from L2. If a stage was profiled there, a filled mark shows the
    measured bytes beside the hollow one for the counted bytes.

    Raises:
        NoDataError: no bandwidth or compute ceiling was measured, nothing has a time, or
            `profiles` are given and none is of a stage with a time at the first problem.
    """
    first = shown.first
    if first is None:
        raise NoDataError(f"wanted measurements of {shown.gpu}, found none")
    by_problem = level == "dram" and profiles is None
    points = _problem_points(shown, first) if by_problem else _stage_points(shown, first, level, profiles or ())
    fastest = max(points, key=lambda point: point.tflops, default=None)
    clock_mhz = select.call_clock(fastest.row) if fastest else None
    roofs = _roofs(shown, first, "copy" if level == "dram" else "l2_read", clock_mhz)
    if {roof.is_slope for roof in roofs if roof.measured} != {True, False}:
        raise NoDataError.of(f"a measured bandwidth and compute ceiling of {shown.gpu}", "flashlab bench --ceilings")
    measured = [profile for profile in profiles or () if any(point.row.name == profile.stage for point in points)]
    if profiles is not None and level == "dram" and not any(point.solid for point in points):
        raise NoDataError.of(f"a profile of a stage at {first.label} on {shown.gpu}", "flashlab profile")
    if not points:
        raise NoDataError(f"wanted a stage with a time at {first.label} on {shown.gpu}, found none")
    rows = [point.row for point in points]

    def draw(figure: Figure, layout: Layout) -> None:
        axes: Axes = figure.subplots()
        top = max(roof.value for roof in roofs if not roof.is_slope)
        slope = max(roof.value for roof in roofs if roof.is_slope)
        places = [*(point.intensity for point in points), top / slope]
        left, right = min(places) / (3 if by_problem else 8), max(places) * 4
        low = min([*(point.tflops for point in points), *(roof.value for roof in roofs if not roof.is_slope)]) / 3
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, top * 1.6))
        _draw_roofs(axes, roofs, left, right)
        for point in points:
            colour = STAGE if point.row.kind == "stage" else PEER
            marker, face = "o" if point.row.kind == "stage" else "D", colour if point.solid else PAPER
            look: dict[str, Any] = {"color": colour, "markerfacecolor": face, "markersize": 6, "markeredgewidth": 1.6}
            axes.plot([point.intensity], [point.tflops], marker, **look)
        if by_problem:
            _name_lengths(axes, layout, points)
        decade = axes.get_window_extent().height / figure.dpi * 72 / math.log10(top * 1.6 / low)
        _label_points(axes, layout, points, points_per_decade=decade)
        for axis in (axes.xaxis, axes.yaxis):
            _plain_log_ticks(axis, "narrow")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid()
        memory = "device memory" if level == "dram" else "L2"
        axes.set(xlabel=f"operations per byte of {memory}", ylabel="TFLOP/s")
        figure.legend(loc="outside lower left", ncols=2 if layout == "wide" else 1)

    flat = ", ".join(f"{roof.label} {number(roof.value)}" for roof in roofs if not roof.is_slope)
    marks = "; ".join(f"{p.row.name} at {p.row.problem.label} {number(p.tflops)}" for p in points)
    return compose(
        draw,
        name=f"roofline-{level}{'' if by_problem or level == 'l2' else '-measured'}",
        heights=(6.2, 7.0),
        alt=f"Roofline. Compute ceilings, TFLOP/s: {flat}. Marks, TFLOP/s: {marks}.",
        caption=f"{_of_marks(first, points, level, by_problem)} {_of_ceilings(roofs, clock_mhz)}",
        provenance=select.provenance(rows),
        data_files=select.run_files([*rows, *shown.ceilings.values(), *measured]),
    )


def _of_marks(first: Problem, points: Sequence[_Point], level: Literal["dram", "l2"], by_problem: bool) -> str:
    """Caption text on the marks of a roofline."""
    if by_problem:
        stages = {point.row.name for point in points if point.row.kind == "stage"}
        which = f", {stages.pop()} at each" if len(stages) == 1 else ""
        return (
            f"The fastest stage (circles{which}) and library (diamonds) at each non-causal {first.dtype} problem, over "
            "the bytes that must cross device memory. A column is one sequence length S. "
            f"Filled: head dim {first.head_dim}; hollow: other head dims."
        )
    counted = "must cross device memory" if level == "dram" else "its tiles load from L2, counted from the tile size"
    filled = " Filled: over the bytes that Nsight Compute measured." if any(point.solid for point in points) else ""
    return f"Each stage at {first.label}. Hollow: over the bytes that {counted}.{filled}"


def _of_ceilings(roofs: Sequence[_Roof], clock_mhz: float | None) -> str:
    """Caption text on the ceilings of a roofline."""
    dashed = "" if all(roof.measured for roof in roofs) else ", dashed ones are the data sheet's"
    if clock_mhz is None:
        return f"Solid ceilings were measured here{dashed}; the clock inside the calls was not recorded."
    at_clock = f"those of an SM's units at {clock_mhz:.0f} MHz, the clock inside the calls of the fastest mark"
    return f"Solid ceilings were measured here{dashed}; {at_clock}."


def _name_lengths(axes: Axes, layout: Layout, points: Sequence[_Point]) -> None:
    """Name the columns of marks at the axis; columns that nearly coincide share a name."""
    columns: dict[str, float] = {}
    for point in points:
        if all(abs(other / point.intensity - 1) > 0.1 for other in columns.values()):
            columns[f"S{point.row.problem.q_len}"] = point.intensity
    look: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "color": MUTED, "size": "small"}
    for position, (length, intensity) in enumerate(sorted(columns.items(), key=lambda item: item[1])):
        up = 4 + (_LABEL_POINTS if layout == "narrow" and position % 2 else 0)
        _text(axes, length, (intensity, 0), (0, up), **look)


# --- Effects with intervals -------------------------------------------------------------------------------------------

_FARTHEST_PERCENT = 12.0


def differences(
    series: Mapping[str, Mapping[str, tuple[float, float, float]]], *, axis: str, within: float | None, **what: Any
) -> Chart:
    """Percent away from zero, with an interval, of several series in each row.

    Args:
        series: (low, middle, high) in percent by row and series. A value beyond the axis is printed at its end.
        axis: the axis label.
        within: half width of a band around zero, percent; None for no band.
        what: name, caption, provenance and data files, as `Chart` has them.
    """
    names = list(dict.fromkeys(title for row in series.values() for title in row))
    looks: dict[str, dict[str, Any]] = {
        title: {"marker": "oDsv^P"[index % 6], "color": _CATEGORIES[index % len(_CATEGORIES)], "markersize": 5}
        for index, title in enumerate(names)
    }
    sizes = [abs(value) for row in series.values() for values in row.values() for value in values]
    reach = min(1.15 * max([*sizes, within or 0.0, 0.1]), _FARTHEST_PERCENT)

    def each(axes: Axes, y: float, row: Mapping[str, tuple[float, float, float]], layout: Layout) -> None:
        if within is not None and not y:
            axes.axvspan(-within, within, color=FAINT, alpha=0.25, linewidth=0, zorder=0)
        # Where names stand above their rows, the marks keep below them.
        step, top = (0.66 / len(names), -0.33) if layout == "wide" else (0.56 / len(names), 0.06)
        for title, (_, value, _) in row.items():
            place, colour = y + top + (names.index(title) + 0.5) * step, looks[title]["color"]
            low, middle, high = (min(max(end, -reach), reach) for end in row[title])
            axes.plot([low, high], [place] * 2, color=colour, linewidth=3, alpha=0.4, solid_capstyle="round")
            axes.plot([middle], [place], clip_on=False, zorder=3, **looks[title])
            if abs(value) > reach:
                look = {"ha": "left" if value < 0 else "right", "va": "center", "color": MUTED, "fontsize": "small"}
                _text(axes, f"{value:+.0f} %", (middle, place), (math.copysign(6, -value), 0), **look)

    said = "; ".join(
        f"{label}: " + ", ".join(f"{title} {values[1]:+.1f} %" for title, values in row.items())
        for label, row in series.items()
    )
    rows, marks = len(series), len(names) * len(series)
    return _row_chart(
        list(series.items()),
        each,
        xlabel=axis,
        heights=(
            1.0 + max(0.27 * rows, 0.13 * marks),
            max(1.0 + 0.37 * rows + 0.2 * len(names), 1.2 + 0.15 * marks + 0.25 * rows),
        ),
        xlim={"wide": (-reach, reach), "narrow": (-reach, reach)},
        reference=(0, {}),
        legend=looks,
        columns=(min(len(names), 4), 1),
        alt=f"{axis[:1].upper()}{axis[1:]}. {said}.",
        **what,
    )


Look = Literal["plain", "better", "worse", "first"]
_LOOKS: Mapping[Look, tuple[str, str]] = {
    "plain": ("o", MUTED),
    "better": ("o", ACCENT),
    "worse": ("o", LOSS),
    "first": ("|", INK),
}
Interval = tuple[str, Estimate, Look]
"""One row of `intervals`: its name, its value with both ends, and how it looks."""


def intervals(groups: Mapping[str, Sequence[Interval]], *, xlabel: str, ratio: bool, **what: Any) -> Chart:
    """A forest plot: one value with its interval per row, in named groups, and a line at no difference.

    Args:
        groups: rows, at least one, by the group's heading.
        xlabel: the axis label.
        ratio: whether values are ratios, drawn on a logarithmic axis; else differences.
        what: name, caption, provenance and data files, as `Chart` has them.
    """
    lines: list[tuple[str, Interval | None]] = []
    for heading, rows in groups.items():
        lines += [(heading, None), *((row[0], row) for row in rows)]
    said = "; ".join(
        f"{of}, {title}: {number(value.value, 4)}" for of, rows in groups.items() for title, value, _ in rows
    )

    def each(axes: Axes, y: float, row: Interval | None, layout: Layout) -> None:
        if row:
            _, estimate, look = row
            shape, colour = _LOOKS[look]
            axes.plot([estimate.low, estimate.high], [y, y], color=colour, linewidth=1.6, zorder=2)
            _mark(axes, estimate.value, y, shape, colour, markersize=5, zorder=3)

    same, log = (1.0, _ratio_ticks) if ratio else (0.0, False)
    how: dict[str, Any] = {"reference": (same, {}), "log": log, "bold": list(groups)}
    return _row_chart(lines, each, xlabel=xlabel, alt=f"{xlabel[:1].upper()}{xlabel[1:]}. {said}.", **how, **what)


def changes(comparison: Comparison) -> Chart:
    """Speed-up of a comparison's second side over the first, with intervals, one group per problem."""
    looks: Mapping[str, Look] = {"faster": "better", "slower": "worse"}
    groups: dict[str, list[Interval]] = {}
    for change in comparison.changes:
        ratio = Estimate(value=change.ratio, low=change.low, high=change.high)
        row = (title_of(change.rows[0].name), ratio, looks.get(change.verdict, "plain"))
        groups.setdefault(change.problem.label, []).append(row)
    records = [record for change in comparison.changes for record in change.rows]
    before, after = comparison.sides
    percent = comparison.noise_percent
    noise = "" if percent is None else f", and noise between starts is {percent:.2f} %"
    return intervals(
        groups,
        xlabel=f"speed-up: {after} over {before}",
        ratio=True,
        name="compare",
        caption=f"Speed-up of {after} over {before}: ratio of medians with its 95 % interval{noise}.",
        **_of_rows(records),
    )


_RATIO_STEPS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0)
_RATIO_TICKS = 8
"""Maximum number of ticks that fit side by side."""


def _ratio_ticks(axes: Axes) -> None:
    """Ticks at round ratios, as dense as the axis allows, always including 1."""
    low, high = axes.get_xlim()
    apart = math.log(high / low) / _RATIO_TICKS
    kept = [1.0]
    for step in sorted(_RATIO_STEPS, key=lambda value: abs(math.log(value))):
        if low <= step <= high and all(abs(math.log(step / other)) >= apart for other in kept):
            kept.append(step)
    axes.set_xticks(sorted(kept))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
