"""Markdown tables of the cycle model's pages: per-SM throughput of units, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flashlab.core.errors import NoDataError
from flashlab.core.paths import DATA
from flashlab.experiments.cycle_model import GROUP_THREADS, Prediction, Rates, compare, predict_loop, rates_of
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.record.schema import Ceiling, ChipReading
from flashlab.show.tables import Column, number, table

Readings = Mapping[str, ChipReading]
"""The result of `chip.newest`."""


def source(readings: Iterable[ChipReading]) -> str:
    """GPU, date and commit."""
    newest = max(readings, key=lambda reading: reading.run)
    return select.sourced(newest.gpu.name, runs=[newest.run])


def _sourced(columns: Sequence[Column], rows: Iterable[Any], readings: Readings) -> str:
    """A table of a GPU's newest readings, with provenance."""
    return f"{table(columns, rows)}\n*{source(readings.values())}*\n"


def _grid(
    readings: Readings, rows: Iterable[Mapping[str, str]], text: Sequence[Column], values: Mapping[str, str], **how: Any
) -> str:
    """A table of readings: `values` maps a column's header to a template of its readings' names, filled in from a row.

    `text` are the columns before them; `how` applies to those of `values`.
    """

    def reading(name: str) -> Callable[[Mapping[str, str]], float | None]:
        return lambda row: measured.value if (measured := readings.get(name.format_map(row))) else None

    columns = [*text, *(Column(header, reading(name), **how) for header, name in values.items())]
    return _sourced(columns, rows, readings)


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _clocks(value: float) -> str:
    return f"{value:.4f}"


def _difference(predicted: float | None, measured: float | None) -> str | None:
    return f"{100 * (predicted / measured - 1):+.0f} %" if predicted and measured else None


def units(readings: Readings) -> str:
    """What each unit does per cycle, by warps, and its latency, as a Markdown table."""
    rows = [{"name": name.removesuffix("_16_warps")} for name in readings if name.endswith("_16_warps")]
    by_warps = {"per cycle, 4 warps": "{name}_4_warps", "8 warps": "{name}_8_warps", "16 warps": "{name}_16_warps"}
    columns = [Column("instruction", "name", _spoken)]
    return _grid(readings, rows, columns, {**by_warps, "latency, cycles": "{name}_latency"})


def wgmma(readings: Readings, *, ceilings: Mapping[str, Ceiling]) -> str:
    """FLOP per cycle and SM of wgmma, by width and warpgroups, and of mma.sync beside them, as a Markdown table."""
    rows = [
        {"from": source, "how": how, "groups": groups, "end": f"{groups}wg_{where}{suffix}"}
        for where, source in (("ss", "shared memory"), ("rs", "registers"))
        for suffix, how in (("_drained", "a wait after every eight"), ("", "the next eight issued before the wait"))
        for groups in "123"
    ]
    columns = [Column("A from", "from"), Column("wgmma", "how", left=True), Column("warpgroups", "groups")]
    by_width = {f"n{width}": f"wgmma_n{width}_{{end}}" for width in (64, 128, 192, 256)}
    text = _grid(readings, rows, columns, by_width)
    try:
        rates = rates_of(readings, ceilings)
    except NoDataError:
        return text
    if rates.mma_sync is None:
        return text
    return text + (
        f"\nThe warp-level mma.sync reaches {number(rates.mma_sync, 4)}, from its ceiling and the clock in its "
        f"calls: {_percent(rates.mma_sync, rates.wgmma)} of what two warpgroups reach at n128.\n"
    )


def issue(readings: Readings) -> str:
    """What issuing wgmma costs, and when they are done, as a Markdown table."""
    columns = [
        Column("wgmma", lambda reading: f"{len(reading.stamps) - 1} × n{reading.defines['WIDTH']}"),
        Column(
            "A from", lambda reading: "registers" if reading.defines["A_IN_REGISTERS"] else "shared memory", left=True
        ),
        Column("warpgroups", lambda reading: str(reading.defines["THREADS"] // GROUP_THREADS)),
        Column("issued after, cycles", lambda reading: reading.stamps[-2]),
        Column("cycles each", lambda reading: reading.stamps[-2] / (len(reading.stamps) - 1)),
        Column("done after, cycles", lambda reading: reading.stamps[-1]),
    ]
    rows = [r for r in readings.values() if r.group == "issue" and not r.defines["EACH"]]
    return _sourced(columns, rows, readings)


def latencies(readings: Readings) -> str:
    """Latencies of barriers, handovers and copies, as a Markdown table."""
    columns = [Column("step", "how"), Column("cycles", "value")]
    return _sourced(columns, [reading for reading in readings.values() if reading.kernel == "latency"], readings)


def beside(readings: Readings) -> str:
    """Throughput of other instructions concurrent with wgmma, and of wgmma, as a Markdown table."""
    rows = []
    for name, alone in readings.items():
        if not name.endswith("wg_alone"):
            continue
        what, _, groups = name.removesuffix("wg_alone").rpartition("_")
        for width in (64, 128):
            for tensor in (1, 2):
                wgmma_by = f"wgmma_n{width}_{tensor}wg_rs_beside"
                pair = readings.get(f"{wgmma_by}_{what}_{groups}wg")
                free = readings.get(f"{wgmma_by}_nothing_1wg")
                if pair is None or free is None or not pair.beside:
                    continue
                row = {"what": what, "groups": groups, "wgmma": f"n{width} by {tensor}", "alone": alone.value}
                row |= {"beside": median(pair.beside), "pair": pair.value, "free": free.value}
                rows.append(row)
    columns = [
        Column("concurrent with wgmma", lambda row: _spoken(row["what"])),
        Column("warpgroups", "groups", left=True),
        Column("wgmma", "wgmma", left=True),
        Column("alone, per cycle", "alone"),
        Column("concurrent, per cycle", "beside"),
        Column("of alone", lambda row: _percent(row["beside"], row["alone"])),
        Column("wgmma, of alone", lambda row: _percent(row["pair"], row["free"])),
    ]
    return _sourced(columns, rows, readings)


def softmaxes(readings: Readings) -> str:
    """Cycles per score of softmax mixes alone, by warps per scheduler, as a Markdown table."""
    ending = "_1_warps"
    names = [name for name, reading in readings.items() if reading.group == "softmax" and name.endswith(ending)]
    rows = [{"name": name.removesuffix(ending)} for name in names]
    headers = ("1 warp per scheduler", "2", "3", "4")
    by_warps = {header: f"{{name}}_{header[0]}_warps" for header in headers}
    return _grid(readings, rows, [Column("cycles per score", "name", _spoken)], by_warps, form=_clocks)


def loops(readings: Readings) -> str:
    """Cycles per score of inner loops of GEMMs and softmax only, as a Markdown table, the fastest first."""
    clock = next(iter(readings.values())).gpu.max_sm_clock_mhz
    try:
        rates: Rates | None = rates_of(readings)
    except NoDataError:
        rates = None

    def what(reading: ChipReading) -> str:
        _, _, order = reading.how.partition(", order ")
        return order[:1] + order[1:].lower().replace(" d=", " D=")

    def predicted(reading: ChipReading) -> float | None:
        return predict_loop(reading, rates) if rates else None

    def tflops(reading: ChipReading) -> float | None:
        if clock is None:
            return None
        return 4.0 * reading.defines["HEAD_DIM"] / reading.value * reading.gpu.sm_count * clock / 1e6

    columns = [
        Column("", lambda reading: f"D={reading.defines['HEAD_DIM']}"),
        Column("loop", what, left=True),
        Column("measured, cycles per score", "value", _clocks),
        Column("predicted", predicted, _clocks),
        Column("difference", lambda reading: _difference(predicted(reading), reading.value)),
        Column("TFLOP/s at the maximum clock", tflops),
    ]
    loops = [reading for reading in readings.values() if reading.group == "loop"]
    return _sourced(columns, sorted(loops, key=lambda r: (r.defines["HEAD_DIM"], r.value)), readings)


def _clock(prediction: Prediction) -> str:
    return f"{number(prediction.clock_mhz, 4)}{'' if prediction.clock_measured else ' (maximum)'}"


_PREDICTIONS: Sequence[Column] = (
    Column("stage", "kernel.stage"),
    Column("order", "kernel.order", left=True),
    Column(
        "blocks × groups × rows × keys",
        "kernel",
        "{0.blocks} × {0.groups} × {0.group_rows} × {0.keys}".format,
        left=True,
    ),
    Column("bottleneck", lambda prediction: max(prediction.floor, key=prediction.floor.get), left=True),
    Column("floor, cycles per score", lambda prediction: max(prediction.floor.values()), _clocks),
    Column("predicted, cycles per score", "cycles_per_score", _clocks),
    Column("measured", "measured_cycles", _clocks),
    Column("difference", lambda prediction: _difference(prediction.cycles_per_score, prediction.measured_cycles)),
    Column("SM clock, MHz", _clock),
    Column("predicted, TFLOP/s at this clock", "tflops"),
    Column("measured, TFLOP/s", "measured_tflops"),
)


def predictions(gpu: str, data: Path = DATA) -> str:
    """Predictions against measurements, as a Markdown table for each problem."""
    try:
        compared = compare(gpu, data)
    except NoDataError as error:
        return f"*{error}*"
    text: list[str] = []
    for problem, rows in grouped(compared, lambda prediction: prediction.problem).items():
        text.append(f"### D={problem.head_dim}, {problem.mask}\n\n{table(_PREDICTIONS, rows)}")
    return "\n".join(text)
