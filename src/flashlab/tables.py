"""Markdown tables drawn from records: what a page or a notebook shows in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from flashlab import check, peers, results, sass, stages
from flashlab.compiler import Cubin
from flashlab.errors import CompileError, NoDataError
from flashlab.records import Cache, CubinFields, Measurement, Regime, Status, flat
from flashlab.results import Results
from flashlab.sass import Instruction

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


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: `digits` significant ones, never in powers of ten, thousands apart; a dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


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


def markdown(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, the others right."""
    lines = [
        f"| {' | '.join(header)} |",
        "|" + "|".join(":--" if i < left else "--:" for i in range(len(header))) + "|",
    ]
    for row in rows:
        cells = [number(c) if isinstance(c, float) else "–" if c is None else str(c) for c in row]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def rates(rows: Sequence[Measurement], regime: Regime = "burst", cache: Cache = "hot") -> str:
    """Every row of one problem: rate, time, spread, gain over its parent, share of the fastest library; or why not."""
    by_name = {row.name: row for row in rows}
    peer = results.fastest_peer(rows, regime, cache)
    best = results.rate(peer, regime, cache) if peer else None
    lines: list[list[Cell]] = []
    for row in rows:
        facts = flat(row, regime, cache)
        rate = results.rate(row, regime, cache)
        if rate is None:
            why = _STATUS_WORDS[row.status] if row.status != "ok" else "not taken"
            lines.append([title(row), why, None, None, None, None, None])
            continue
        stage = stages.STAGES.get(row.name)
        parent = results.rate(by_name[stage.parent], regime, cache) if stage and stage.parent in by_name else None
        samples = row.samples_of(regime, cache)
        lines.append(
            [
                title(row),
                rate,
                samples.median_us if samples else None,
                samples.cv_percent if samples else None,
                facts["samples"] if isinstance(facts["samples"], int) else None,
                number(rate / parent) if parent else None,
                f"{number(100 * rate / best)} %" if best else None,
            ]
        )
    header = ("", "TFLOP/s", "median, µs", "deviation, %", "samples", "× parent", "of best library")
    return markdown(header, lines)


def states(rows: Sequence[Measurement]) -> str:
    """Rates in each regime and cache state, with the clock, power and energy."""
    lines: list[list[Cell]] = []
    for row in rows:
        if row.status != "ok":
            continue
        sustained = row.samples_of("sustained", "hot")
        conditions = sustained.conditions if sustained else None
        lines.append(
            [
                title(row),
                *(results.rate(row, *state) for state in results.STATES),
                number(median(sustained.sm_clock_mhz), 4) if sustained and sustained.sm_clock_mhz else None,
                number(conditions.power_w_max) if conditions and conditions.power_w_max else None,
                conditions.energy_j_per_call * 1e3 if conditions and conditions.energy_j_per_call else None,
                ", ".join(conditions.throttle_reasons) or "none" if conditions else None,
            ]
        )
    header = (
        "",
        "burst, hot L2, TFLOP/s",
        "burst, cold L2",
        "sustained",
        "SM, MHz",
        "power, W",
        "mJ a call",
        "clock held back by",
    )
    return markdown(header, lines)


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
        "Fingerprint": f"`{gpu.fingerprint}`",
    }
    facts.update({f"Host {name.replace('_', ' ')}": value for name, value in shown.machine.host.items()})
    return markdown(("measured on", ""), facts.items(), left=2)


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


def excerpt(instructions: Sequence[Instruction], opcode: str, *, lines: int = 16) -> str:
    """Machine code from the densest stretch of instructions whose opcode starts with `opcode`, as a code block."""
    starts = range(max(1, len(instructions) - lines + 1))
    best = max(starts, key=lambda i: sum(x.opcode.startswith(opcode) for x in instructions[i : i + lines]))
    text = "\n".join(f"{x.address:06x}  {x.text}" for x in instructions[best : best + lines])
    return f"```text\n{text}\n```\n"


def judged(verdicts: Mapping[str, check.Verdict]) -> str:
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
        ("ceiling", "how", "value", "unit", "deviation, %"),
        [(f"`{c.name}`", c.how, c.value, c.unit, c.samples.cv_percent) for c in shown.ceilings.values()],
        left=2,
    )


MEASUREMENT_COLUMNS: Mapping[str, str] = {
    "run": "id of the run: UTC start time and commit",
    "time": "when the row was recorded, UTC",
    "gpu": "product name of the GPU",
    "gpu_fingerprint": "first 12 hex digits of the sha256 of its UUID",
    "kind": "stage (a kernel of this lab) or peer (a library)",
    "name": "stage id or peer name",
    "shape": "BxHxSxD, or BxHxHkvxSqxSkxD where heads or lengths differ",
    "dtype": "element type of Q, K, V and O",
    "mask": "full or causal (bottom-right aligned)",
    "status": "ok, wrong, unsupported, missing, crashed, timeout or error; only ok has times",
    "reason": "why there is no time; empty when ok",
    "regime": "burst (idle gaps, clock at its maximum) or sustained (continuous, power-limited)",
    "cache": "hot (calls back to back) or cold (L2 overwritten before every call)",
    "samples": "number of samples",
    "calls": "calls between the two timing events of one sample",
    "median_us": "median time of one call, microseconds",
    "cv_percent": "standard deviation over mean, percent",
    "tflops": "rate at the median time; 4·B·H·Sq·Sk·D operations, half for a square causal mask",
    "sm_clock_mhz": "median SM clock beside the samples; empty where not recorded",
    "max_abs_error": "largest absolute error against the float64 oracle",
    "max_abs_limit": "the limit it was held to",
    "registers": "registers a thread, from the machine code; empty for peers",
    "dynamic_smem_bytes": "dynamic shared memory a block, bytes; empty for peers",
    "blocks_per_sm": "resident blocks an SM, from the driver; empty for peers",
    "cubin_sha256": "digest of the machine code that ran; empty for peers",
    "commit": "full hash of the code that made the row",
    "dirty": "true where the tree differed from that commit",
}
"""Columns of measurements.csv: one line a row, regime and cache state, or one line where there is no time."""

SAMPLE_COLUMNS: Mapping[str, str] = {
    name: MEASUREMENT_COLUMNS[name] for name in ("run", "kind", "name", "shape", "dtype", "mask", "regime", "cache")
} | {
    "index": "position of the sample, from 0, in the order taken",
    "time_us": "time of one call, microseconds",
    "sm_clock_mhz": "SM clock beside the sample; empty where not recorded",
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
            "shape": problem.shape,
            "dtype": problem.dtype,
            "mask": problem.mask,
            "status": row.status,
            "reason": row.reason,
            "max_abs_error": row.verdict.max_abs_error if row.verdict else None,
            "max_abs_limit": row.verdict.max_abs_limit if row.verdict else None,
            "registers": row.cubin.registers if row.cubin else None,
            "dynamic_smem_bytes": row.cubin.dynamic_smem_bytes if row.cubin else None,
            "blocks_per_sm": row.cubin.blocks_per_sm if row.cubin else None,
            "cubin_sha256": row.cubin.sha256 if row.cubin else None,
            "commit": row.source.commit,
            "dirty": row.source.dirty,
        }
        timed: list[dict[str, object]] = [
            {
                "regime": s.regime,
                "cache": s.cache,
                "samples": len(s.time_us),
                "calls": s.calls,
                "median_us": s.median_us,
                "cv_percent": s.cv_percent,
                "tflops": problem.tflops(s.median_us),
                "sm_clock_mhz": median(s.sm_clock_mhz) if s.sm_clock_mhz else None,
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
            "shape": row.problem.problem().shape,
            "dtype": row.problem.dtype,
            "mask": row.problem.mask,
            "regime": s.regime,
            "cache": s.cache,
            "index": index,
            "time_us": time_us,
            "sm_clock_mhz": s.sm_clock_mhz[index] if s.sm_clock_mhz else None,
        }
        for row in rows
        for s in row.samples
        for index, time_us in enumerate(s.time_us)
    ]
