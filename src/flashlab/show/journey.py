"""The journey: the key lines, the prediction and the rates of every rung, from its source and its records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from flashlab.core.errors import NoDataError
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.problem import MASKS
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.kernels.text import Excerpt
from flashlab.query import contests, predictions, select
from flashlab.query.select import Results
from flashlab.show import charts, drawings, tables
from flashlab.show.tables import code, markdown, number, percent, times

if TYPE_CHECKING:
    from flashlab.record.schema import Measurement
    from flashlab.show.pages import Output

PAGE = "journey.md"
RUNGS = tuple(stage_id for stage_id, stage in registry.STAGES.items() if stage.language == "cuda")
"""The stages that the journey goes through: those in C++."""

KEY_LINES: Mapping[str, Sequence[Excerpt]] = {
    "00_naive": (
        Excerpt(first="score += to_float(Q_reg[d]) * to_float(K_gmem", last="score *= p.scale_log2;"),
        Excerpt(first="const float new_max = fmaxf(row_max, score);", last="const float prob ="),
        Excerpt(first="O_reg[d] = O_reg[d] * rescale + prob * to_float(V_gmem"),
    ),
    "01_coalesced": (
        Excerpt(first="load_tile<TILE_KV, HEAD_DIM, THREADS, LOADS_IN_FLIGHT>(smem.K", last="the tile is complete"),
        Excerpt(first="(smem.K + (k0 + k) * HEAD_DIM + d);", last="score[k] += to_float"),
    ),
    "02_half2": (
        Excerpt(first="pair_sum = __hfma2(pair_of(Q_reg"),
        Excerpt(first="score[k] += __low2float(pair_sum) + __high2float(pair_sum);"),
        Excerpt(first="pair_sum[i] = __hfma2(prob[k], pair_of(chunk, i), pair_sum[i]);"),
    ),
    "03_warp_rows": (
        Excerpt(first="const element* K_row = smem.K + (lane + k * WARP) * STRIDE + d;", last="K_chunk[k][0] ="),
        Excerpt(first="const float new_max = fmaxf(row_max[r], lanes_max<WARP>(lane_max));"),
        Excerpt(first="= prob[k];"),
        Excerpt(first="the warp's probabilities are complete"),
    ),
    "04_wmma_qk": (
        Excerpt(first="wmma::load_matrix_sync(Q_frag", last="wmma::mma_sync(S_frag"),
        Excerpt(first="wmma::store_matrix_sync(S_smem + k0"),
        Excerpt(first="the warp's scores are complete"),
    ),
    "05_wmma": (
        Excerpt(first="the warp's probabilities and factors are complete", last="scale_rows<"),
        Excerpt(first="wmma::load_matrix_sync(V_frag", last="wmma::mma_sync(O_frag[j]"),
    ),
    "06_cp_async": (
        Excerpt(first="ptx::cp_async_cg_16(target + row * STRIDE"),
        Excerpt(first="this tile's own copies have landed", last="fetch(tile + PIPELINE_STAGES - 1);"),
    ),
    "07_mma_registers": (
        Excerpt(first="const float low = power(fmaf(S_reg", last="P_frag[r][j / 2][j % 2 * 2 + half] ="),
        Excerpt(first="mma(O_reg[r][j], P_frag[r][k], V_frag[0], element{});"),
    ),
    "08_swizzle": (
        Excerpt(first="__device__ __forceinline__ int swizzled(int row, int chunk) {", last="}"),
        Excerpt(first="if (step + 1 < KEY_STEPS) exponentiate(step + 1", last="multiply_PV(step,"),
    ),
    "09_wgmma": (
        Excerpt(first="fill<TILE_KV, THREADS>(smem.K[stage], K_source, tile_key, full, threadIdx.x);"),
        Excerpt(first="ptx::mbarrier_wait_parity(&smem.KV_full[stage]"),
        Excerpt(first="multiply_QK<TILE_KV>(S_reg, Q_desc", last="ptx::wgmma_wait_group<0>();"),
    ),
    "10_warp_specialized": (
        Excerpt(first="if (warpgroup == 0) {", last="consume("),
        Excerpt(first="if (lane == 0) ptx::mbarrier_arrive(&smem.K_empty[stage]);"),
    ),
    "11_pingpong": (
        Excerpt(first="issue_QK(tile);"),
        Excerpt(first="issue_PV(tile - 1);", last="ptx::wgmma_wait_group<OVERLAP"),
        Excerpt(first="softmax_of(tile);"),
    ),
    "12_persistent": (
        Excerpt(first="if (thread == 0) index = gridDim.x + atomicAdd"),
        Excerpt(first="const int num_tiles = tiles_of_rows(p, group_q_row, WGMMA_ROWS);"),
        Excerpt(first="q_tile = num_q_tiles - 1 - section_index / section_heads;"),
    ),
    "13_tma_store": (
        Excerpt(first="wait_for_Q(count + 1);", last="ptx::wgmma_wait_group<0>();"),
        Excerpt(first="all lanes have read it, and Q", last="leave(done);"),
        Excerpt(file="late_fetch.cuh", first="if (tile == last_tiles && thread == 0)"),
    ),
    "14_stale_max": (
        Excerpt(first="S_reg[i] = ptx::ex2_approx_ftz(fmaf(S_reg[i], scale_log2, -reference[h]));"),
        Excerpt(first="if (__any_sync(FULL_WARP, !(sum[0] < SUM_LIMIT", last="redo("),
    ),
    "15_renormalize": (
        Excerpt(first="// 2^-powers", last="sum *= factor;"),
        Excerpt(first="if (any_over[h]) move_reference("),
    ),
    "16_ones_column": (
        Excerpt(first="constexpr int ONES = 8;", last="constexpr int O_COLUMNS"),
        Excerpt(first="ptx::wgmma_rs<O_COLUMNS, element", last="true);"),
        Excerpt(first="weight[h] = O_reg[HEAD_DIM / 2 + 2 * h];"),
    ),
}
"""The lines of each rung that its change comes down to, found in its source."""


def key_lines(stage: Stage) -> str:
    """The key lines of a stage as highlighted code, `…` between those that do not follow one another.

    Raises:
        ParameterError: the source no longer has them.
    """
    parts = []
    for excerpt in KEY_LINES[stage.id]:
        kept = [line for line in excerpt.lines(stage) if not line.startswith("#pragma unroll")]
        parts.append("\n".join(kept))
    body = "\n// …\n".join(parts)
    return f'``` {{ .cuda title="{stage.source.name}" }}\n{body}\n```'


# --- What was measured ------------------------------------------------------------------------------------------------


def _neighbours(stage: Stage) -> str:
    """Links to a rung's own page and to the rungs before and after it on the journey."""
    place = RUNGS.index(stage.id)
    links = [f"[All measurements of {code(stage.id)}](stages/{stage.id}.md)"]
    links += [f"before: [{code(one)}](#{one})" for one in RUNGS[max(place - 1, 0) : place]]
    links += [f"after: [{code(one)}](#{one})" for one in RUNGS[place + 1 : place + 2]]
    return f'<small markdown="span">{" · ".join(links)}</small>'


def _cells(shown: Results, stage: Stage) -> list[tuple[str, Measurement, float | None]]:
    """A stage's rows at the main shape, both head dims and masks, each with its title and its rate over its parent's.

    Where the two that are shown are of different sessions, the ratio is of the newest run that timed both.
    """
    assert shown.first is not None
    cells = []
    for head_dim, mask in product((64, 128), MASKS):
        problem = replace(shown.first, head_dim=head_dim, mask=mask)
        rows = shown.problems.get(problem, ())
        row = next((one for one in rows if one.name == stage.id and one.status == "ok"), None)
        if row is None:
            continue
        mine, parent = row, select.parent_of(row, rows)
        if parent is None and stage.parent:
            pair = predictions.of_one_run(stage.id, problem, stage.parent, problem, shown.records)
            mine, parent = pair[0] or row, pair[1]
        rate, before = select.rate(mine), select.rate(parent) if parent else None
        gain = rate / before if rate and before else None
        cells.append((f"D{head_dim}{' causal' if mask == 'causal' else ''}", row, gain))
    return cells


def score(shown: Results | None, stage: Stage) -> str:
    """What was predicted of a stage and what was measured, with its rates beside its parent's."""
    predicted = f"**Predicted:** {stage.prediction.strip()}"
    cells = _cells(shown, stage) if shown and shown.first else []
    if not cells:
        return f"{predicted}\n\n**Measured:** not on record for this GPU."
    _, row, gain = cells[0]
    said = f"**Measured:** {number(select.rate(row))} TFLOP/s"
    if gain and stage.parent:
        said += f", {times(gain)} over {code(stage.parent)}"
    share = contests.percent_of_peak(row)
    if share:
        said += f", {percent(share)} of the tensor cores' peak"
    scored = tables.scored(predictions.scores(shown, [stage])) if shown else ""
    if scored:
        said += f".\n\n**Predicted → measured:** {scored}"
    lines: list[tuple[str | None, ...]] = [("TFLOP/s", *(number(select.rate(one)) for _, one, _ in cells))]
    if stage.parent:
        lines.append(("over parent", *(_gain(one) for _, _, one in cells)))
    return f"{predicted}\n\n{said}.\n\n{markdown(('', *(title for title, _, _ in cells)), lines)}"


def _gain(ratio: float | None) -> str | None:
    """A ratio over the parent, bold where the stage is slower."""
    text = times(ratio) if ratio else None
    return f"**{text}**" if text and ratio and ratio < 1 else text


# --- The page's pieces ------------------------------------------------------------------------------------------------


def conditions(shown: Results | None) -> str:
    """On what the numbers of the page were measured."""
    if shown is None or shown.first is None:
        return "*Nothing is on record yet: `flashlab bench` measures the ladder.*"
    first = shown.first
    return (
        f"Unless a sentence says otherwise, numbers are of one {shown.name} at {first.label}: batch {first.batch}, "
        f"{first.q_heads} heads, {first.q_len:,} tokens, head dim {first.head_dim}, no mask, {first.dtype}, "
        f"{select.on_inputs([first])}, in bursts with a hot L2 cache "
        f"({select.date(shown.newest)})."
    )


def on_trained(shown: Results, data: Path) -> charts.Chart:
    """The last rungs and the best library on normal inputs and on a trained model's activations.

    Raises:
        NoDataError: no row has a time on both.
    """
    assert shown.first is not None
    looks = {"normal numbers": ("o", charts.STAGE), "trained activations": ("D", charts.PEER)}
    rates: dict[tuple[str, str], float] = {}
    kept: list[Measurement] = []
    results = select.load(shown.gpu, data, (TRAINED,))
    other = next(
        (
            rows
            for problem, rows in results.problems.items()
            if problem.inputs == TRAINED and replace(problem, inputs=NORMAL) == shown.first
        ),
        (),
    )
    for row in shown.rows():
        twin = next((one for one in other if one.name == row.name), None)
        if twin and (usual := select.rate(row)) and (trained := select.rate(twin)):
            rates[row.name, "normal numbers"], rates[row.name, "trained activations"] = usual, trained
            kept.append(row)
    if not kept:
        raise NoDataError(f"wanted rows on trained inputs at {shown.first.label}, found none")
    worst = min(kept, key=lambda row: rates[row.name, "trained activations"] / rates[row.name, "normal numbers"])
    return charts.marks(
        rates,
        looks,
        rows={row.name: charts.row_title(row) for row in kept},
        origin=0.0,
        xlabel="TFLOP/s",
        name="journey-trained",
        alt="Rates on normal numbers and on trained activations. "
        + "; ".join(
            f"{charts.row_title(row)} {number(rates[row.name, 'normal numbers'])} and "
            f"{number(rates[row.name, 'trained activations'])} TFLOP/s"
            for row in kept
        )
        + ".",
        caption="The same kernels on normal random numbers and on Q, K and V of a trained language model, median over "
        f"its layers. {charts.row_title(worst)} loses the most.",
        provenance=select.provenance(kept),
        data_files=select.run_files([*kept, *other]),
    )


def write(out: Output, shown: Results | None, data: Path) -> None:
    """Everything the journey takes in, a file a rung with the sections `heading`, `lines`, `score` and `links`."""
    out.snippet("journey/conditions.md", conditions(shown))
    for stage_id in RUNGS:
        stage = registry.get(stage_id)
        out.sections(
            f"journey/{stage_id}.md",
            heading=f"## {stage_id[:2]}. {stage.title} {{ #{stage_id} }}\n\n*{stage.question.strip()}*",
            lines=key_lines(stage),
            score=score(shown, stage),
            links=_neighbours(stage),
        )
    for name, draw in drawings.DRAWINGS.items():
        out.snippet(f"journey/drawing-{name}.md", out.chart(draw(), PAGE))
    out.snippet("journey/barriers.md", drawings.barriers())
    trained = "*Not on record for this GPU: `flashlab bench --suite inputs` measures it.*"
    if shown is not None and shown.first is not None:
        with contextlib.suppress(NoDataError):
            trained = out.chart(on_trained(shown, data), PAGE)
    out.snippet("journey/trained.md", trained)
