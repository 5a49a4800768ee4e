"""The journey: the key lines, the prediction and the rates of every rung, from its source and its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlab.core.errors import NoDataError
from flashlab.core.inputs import TRAINED
from flashlab.core.paths import SITE
from flashlab.core.problem import MASKS, Problem, suite
from flashlab.kernels import registry, text
from flashlab.kernels.registry import Stage
from flashlab.query import contests, predictions, select
from flashlab.query.select import Results
from flashlab.show import charts, drawings, tables
from flashlab.show.tables import Column, markdown, number, table, times

if TYPE_CHECKING:
    from flashlab.record.schema import Measurement
    from flashlab.show.pages import Output

PAGE = "journey.md"
RUNGS = tuple(stage_id for stage_id, stage in registry.STAGES.items() if stage.key_lines)
"""The stages of the journey, in order."""


def key_lines(stage: Stage) -> str:
    """The key lines of a stage as highlighted code, with `…` for gaps between them.

    Raises:
        ParameterError: the source no longer has them.
    """
    parts = []
    for excerpt in stage.key_lines:
        kept = [line for line in text.lines(stage, excerpt) if not line.startswith("#pragma unroll")]
        parts.append("\n".join(kept))
    body = "\n// …\n".join(parts)
    return f'``` {{ .cuda title="{stage.source.name}" }}\n{body}\n```'


def drawings_of(stage: Stage) -> list[Callable[[], charts.Chart]]:
    """The drawings in a rung's section of the journey, in its order."""
    parts = re.split(r'"journey/(\w+)\.md:heading"', (SITE / PAGE).read_text("utf-8"))
    section = dict(zip(parts[1::2], parts[2::2], strict=True)).get(stage.id, "")
    return [drawings.DRAWINGS[name] for name in re.findall(r'"journey/drawing-(\w+)\.md"', section)]


# --- What was measured ------------------------------------------------------------------------------------------------


def _cells(shown: Results, stage: Stage, at: Problem) -> list[tuple[str, Measurement, float | None]]:
    """A stage's rows at a shape, both head dims and masks, each with its title and speed-up over the parent.

    If the two shown are from different sessions, the speed-up is from the newest run that timed both.
    """
    cells = []
    for head_dim, mask in product((64, 128), MASKS):
        problem = replace(at, head_dim=head_dim, mask=mask)
        row = next(
            (candidate for candidate in shown.rows(problem) if candidate.name == stage.id and candidate.status == "ok"),
            None,
        )
        if row is None:
            continue
        gain = select.speedup(*predictions.pair(shown, problem, stage.id, stage.parent)) if stage.parent else None
        cells.append((f"D{head_dim}{' causal' if mask == 'causal' else ''}", row, gain))
    return cells


def by_length(shown: Results, stage: Stage) -> str:
    """A table of a stage's speed-up over its parent by sequence length, in float16, at a constant number of tokens."""
    shapes = [at for at in suite("lengths") if (at.head_dim, at.mask, at.dtype) == (64, "full", "float16")]
    rows = [{"": f"S{at.q_len}"} | {title: gain for title, _, gain in _cells(shown, stage, at)} for at in shapes]
    return table(
        [Column(kind, kind, times if kind else None) for kind in ("", "D64", "D64 causal", "D128", "D128 causal")], rows
    )


def _over_parent(gain: float) -> str:
    """A ratio, in bold if the stage is slower."""
    said = times(gain)
    return f"**{said}**" if gain < 1 and said != times(1.0) else said


def _rung(shown: Results, stage: Stage) -> dict[str, Any]:
    """The values of a rung's section: key lines, neighbours and, if on record, rates and speed-ups over the parent."""
    place = RUNGS.index(stage.id)
    neighbours = [("before", RUNGS[place - 1])] if place else []
    neighbours += [("after", neighbour) for neighbour in RUNGS[place + 1 : place + 2]]
    facts = {"stage": stage, "lines": key_lines(stage), "neighbours": neighbours}
    cells = _cells(shown, stage, shown.first) if shown.first else []
    if not cells:
        return facts | {"row": None}
    _, row, gain = cells[0]
    lines: list[tuple[str | None, ...]] = [("TFLOP/s", *(number(select.rate(measured)) for _, measured, _ in cells))]
    if stage.parent:
        lines.append(("over parent", *(_over_parent(comparison) if comparison else None for _, _, comparison in cells)))
    scored = tables.scored(predictions.scores(shown, [stage]))
    rates = markdown(("", *(title for title, _, _ in cells)), lines)
    return facts | {"row": row, "gain": gain, "share": contests.percent_of_peak(row), "scored": scored, "rates": rates}


# --- The page's pieces ------------------------------------------------------------------------------------------------


def on_trained(shown: Results, data: Path) -> charts.Chart:
    """The last rungs and the best library on normal inputs and on a trained model's activations.

    Raises:
        NoDataError: no row has a time on both.
    """
    others = select.load(shown.gpu, data, (TRAINED,))
    trained = others.rows(replace(shown.first, inputs=TRAINED)) if shown.first else ()
    twins = {row.name: row for row in trained if select.rate(row)}
    kept = [row for row in shown.rows() if row.name in twins and select.rate(row)]
    if not kept:
        raise NoDataError.of(f"rows on trained inputs of {shown.gpu}", "flashlab bench --suite inputs")
    worst = min(kept, key=lambda row: select.speedup(twins[row.name], row) or 0.0)
    return charts.side_by_side(
        {"normal numbers": kept, "trained activations": [twins[row.name] for row in kept]},
        {"normal numbers": ("o", charts.STAGE), "trained activations": ("D", charts.PEER)},
        name="journey-trained",
        caption="The same kernels on normal random numbers and on Q, K and V of a trained language model, median over "
        f"its layers. {tables.title_of(worst.name)} loses the most.",
        provenance=select.provenance([*kept, *(twins[row.name] for row in kept)]),
    )


def write(out: Output, shown: Results, data: Path) -> None:
    """Write the snippets of the journey; a rung's file has the sections `heading`, `lines`, `score` and `links`."""
    out.snippet("journey/conditions.md", out.rendered("conditions.md", PAGE, shown=shown))
    for stage_id in RUNGS:
        of = select.with_stage(shown, stage_id, data)
        facts = _rung(of, registry.get(stage_id)) | {"elsewhere": of.name if of.gpu != shown.gpu else ""}
        out.snippet(f"journey/{stage_id}.md", out.rendered("rung.md", PAGE, **facts))
    for name, draw in drawings.DRAWINGS.items():
        out.snippet(f"journey/drawing-{name}.md", out.chart(draw(), PAGE))
    out.snippet("journey/barriers.md", drawings.barriers())
    missing = "*Not on record for this GPU: `flashlab bench --suite inputs` measures it.*"
    out.snippet("journey/trained.md", out.drawn(PAGE, on_trained, shown, data) or missing)
