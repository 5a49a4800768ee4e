"""Timelines of one SM in 08 to 13, drawn to scale from the cycle model's simulation of the inner loop.

Tunables are the stages' defaults. Copies, which the model assumes to arrive in time, begin when their pipeline stage is
free and last as long as a single copy of their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashlab.core.errors import NoDataError
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import chip, cycle_model, cycle_tables
from flashlab.experiments.cycle_model import Kernel, Moment, Rates
from flashlab.kernels import registry
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.record import store
from flashlab.record.schema import ChipReading
from flashlab.run import choice
from flashlab.show import drawings, journey
from flashlab.show.charts import ACCENT, MUTED, PEER, STAGE, Chart
from flashlab.show.drawings import Span
from flashlab.show.pages import Output
from flashlab.show.tables import number

if TYPE_CHECKING:
    from flashlab.query.select import Results

_COLOURS = {"QK": STAGE, "PV": ACCENT, "softmax": PEER}
_FREE = "The groups start evenly spread over a tile; no barrier orders them, so other alignments occur on a GPU."
_LOOP_OF_11 = "The loop is that of 11, without the prologues and epilogues of work tiles."
NOTES = {
    "08_swizzle": f"{_FREE} Copies are not shown, because the latency of `cp.async` was not measured.",
    "09_wgmma": f"{_FREE} The model waits for an mbarrier before each GEMM, the kernel once for K and V together.",
    "10_warp_specialized": _FREE,
    "11_pingpong": "",
    "12_persistent": _LOOP_OF_11,
    "13_tma_store": _LOOP_OF_11,
}
"""The stages with a timeline, and a note on each."""
Uses = Mapping[tuple[int, str], Sequence[Span]]
"""GEMMs and softmaxes by group number and name, in the order of tiles."""


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Merge adjacent spans that look the same."""
    last: dict[tuple[object, ...], Span] = {}
    for span in spans:
        look = (span.row, *span[3:])
        before = last.pop(look, None)
        if before and before.stop == span.start:
            span = span._replace(start=before.start)
        elif before:
            yield before
        last[look] = span
    yield from last.values()


def uses_of(moments: Iterable[Moment]) -> Uses:
    """The GEMMs and softmaxes of every group, with GEMMs in the upper half of its row."""
    parts = (
        Span(
            group, moment.start, moment.stop, name, _COLOURS[name], *((0.0, 0.48) if name == "softmax" else (0.52, 1.0))
        )
        for moment in moments
        for group, name in (*moment.gemms, *((group, "softmax") for group in moment.softmaxes))
    )
    return grouped(sorted(_merged(parts), key=lambda span: span.start), lambda span: (span.row, span.words))


def copies_of(kernel: Kernel, uses: Uses, readings: Mapping[str, ChipReading]) -> list[Span]:
    """TMA loads of the first block, with K in the upper half of the row.

    Raises:
        NoDataError: a load of that size was not measured.
    """
    together = kernel.stage == "09_wgmma"  # by the block itself, at the beginning of its tile, for one mbarrier
    kib = kernel.keys * kernel.head_dim * 2 * (1 + together) // 1024
    if (reading := readings.get(f"bulk_copy_{kib}_kib")) is None:
        raise NoDataError.of(f"a reading of bulk_copy_{kib}_kib", "flashlab chip")
    spans: list[Span] = []
    start = 0.0
    for tile in range(cycle_model.TILES // 2):
        for letter, gemm, low in (("K", "QK", 0.52), ("V", "PV", 0.0)):
            if together:
                start = uses[0, "QK"][tile].start
            else:  # by the producer, in this order, when every consumer has waited for the GEMM
                late = kernel.overlaps and gemm == "PV"  # which it does after the next tile's softmax
                ends = (gemm, "softmax") if late else (gemm,)
                start = max(start, *(uses[i, end][tile + late].stop for i in range(kernel.groups) for end in ends))
            spans.append(Span(0, start, start + reading.value, letter, MUTED, low, low + 0.48))
    return spans


def units_of(kernel: Kernel, rates: Rates, moments: Iterable[Moment]) -> Iterator[Span]:
    """Utilisation of the tensor cores, row 0, and of the exponential unit, row 1."""
    steps = cycle_model.steps_of(kernel, rates)
    # Of what the model counts as scores of a softmax, some stand for the output's rescale.
    real = kernel.group_rows * kernel.keys / sum(step.amount for step in steps if step.kind == "softmax")
    for moment in moments:
        qk = sum(name == "QK" for _, name in moment.gemms) / max(1, len(moment.gemms))
        yield Span(0, moment.start, moment.stop, "", STAGE, 1 - qk, 1.0)
        yield Span(0, moment.start, moment.stop, "", ACCENT, 0.0, 1 - qk if moment.gemms else 0.0)
        yield Span(1, moment.start, moment.stop, "", PEER, 0.0, moment.rate * real / rates.exp2)


def draw(stage_id: str, readings: Mapping[str, ChipReading], data: Path) -> Chart:
    """The timeline of a stage.

    Raises:
        NoDataError: readings or ceilings are missing.
    """
    if not readings:
        raise NoDataError.of("readings of an SM's units", "flashlab chip")
    problem, stage, gpu = Problem.parse(FIRST_SHAPE), registry.get(stage_id), next(iter(readings.values())).gpu
    ceilings = store.newest_ceilings(gpu.slug, data)
    rates = cycle_model.rates_of(readings, ceilings)
    defaults = stage.parameters(problem.head_dim)
    kernel = cycle_model.kernel_of(stage_id, problem.head_dim, defaults)
    assert kernel is not None
    tuned = choice.parameters(stage, gpu.slug, problem, data=data)
    others = ", ".join(f"{name} {value}" for name, value in tuned.items() if defaults[name] != value)
    drawn = f"The timeline is for the defaults; the rates on these pages are for {others}. " if others else ""
    moments = cycle_model.moments_of(kernel, rates)
    uses = uses_of(moments)
    blocks = [f"block {block}" for block in range(kernel.blocks)] if kernel.blocks > 1 else [""]
    names = [f"{block}, consumer {i}".strip(", ") for block in blocks for i in range(kernel.groups)]
    names = blocks if kernel.groups == 1 else names
    names[0] = f"{names[0]}: GEMMs above, softmax below"
    loads = ["TMA loads" + (" of block 0" if kernel.blocks > 1 else "")] if kernel.uses_wgmma else []
    begin = uses[0, "QK"][cycle_model.WARM_TILES * kernel.interleaved].start
    end = begin + max(drawings.TIMELINE_CYCLES.values())
    units = [*_merged(units_of(kernel, rates, (moment for moment in moments if begin <= moment.start < end)))]
    spans = [
        *(copies_of(kernel, uses, readings) if loads else []),
        *(span._replace(row=len(loads) + span.row) for span in units),
        *(span._replace(row=len(loads) + 2 + span.row) for use in uses.values() for span in use),
    ]
    length = max(span.stop for span in units) - begin
    busy = [
        sum((unit.stop - unit.start) * (unit.high - unit.low) for unit in units if unit.row == row) for row in (0, 1)
    ]
    tensor, exponential = (f"{100 * cycles / length:.0f} %" for cycles in busy)
    gemm = sum(step.amount for step in cycle_model.steps_of(kernel, rates) if (step.kind, step.name) == ("issue", "QK"))
    measured_by = [ceilings["mma_sync_float16"]] if not kernel.uses_wgmma else []
    return drawings.timeline(
        stage_id,
        [*loads, "tensor cores", "exponential unit: height is its utilisation", *names],
        [span._replace(start=span.start - begin, stop=span.stop - begin) for span in spans],
        alt=f"Timeline of one SM in the loop of {stage_id}: tensor cores, exponential unit, and each group of four "
        f"warps. Alone, a group's QK GEMM and its PV GEMM take {number(gemm)} cycles each. The tensor cores are busy "
        f"for {tensor} of the time shown; the exponential unit is utilised to {exponential}.",
        caption=f"One SM in the loop of {stage_id} at {problem.label}, with {kernel.blocks} "
        f"block{'s' * (kernel.blocks > 1)} of {kernel.tile_rows} rows and {kernel.keys} keys per tile. To scale, in "
        "cycles that the cycle model computes from micro-benchmarks of the SM's units; the kernel was not traced. "
        f"Concurrent GEMMs share the tensor cores. {drawn}{NOTES[stage_id]}".strip(),
        provenance=cycle_tables.source(readings.values()),
        data_files=select.run_files([*readings.values(), *measured_by]),
    )


def page(out: Output, shown: Results, data: Path) -> None:
    """Write every timeline for its stage's page and the journey, for the GPU shown if its units were measured."""
    slugs = sorted(store.gpus(data, "chip"), key=lambda slug: slug != shown.gpu)
    readings = chip.newest(slugs[0] if slugs else "", data)
    for stage_id in NOTES:
        try:
            chart, missing = draw(stage_id, readings, data), ""
        except NoDataError as error:
            chart, missing = None, f"*{error}*"
        for folder, page in (("stages", f"stages/{stage_id}.md"), ("journey", journey.PAGE)):
            out.snippet(f"timelines/{folder}/{stage_id}.md", out.chart(chart, page) if chart else missing)


PAGES = {"timelines": page}
