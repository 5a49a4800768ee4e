"""compute-sanitizer over every stage: out-of-bounds accesses, races, uninitialised reads, barriers that do not match.

Each tool runs a process of this module that launches every stage over head dims, masks, element types, lengths and
aligned and odd rows; memory is allocated for each call anew, so that an access past an array is past an allocation.
What is on record says how often each stage was launched, and what was found in it.

    PYTHONPATH=src python3 scripts/sanitize.py     appends to data/<gpu>/sanitizer/
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashlab.build import compiler
from flashlab.core.errors import FlashlabError, LaunchError, MissingError, ParameterError
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.problem import DTYPES, MASKS, Problem
from flashlab.kernels import registry
from flashlab.record import provenance, store
from flashlab.record.store import Gpu, Sanitized, Source
from flashlab.run import gpu
from flashlab.run.attention import prepare
from flashlab.verify.oracle import make_inputs

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LENGTHS: tuple[tuple[int, int], ...] = ((1, 1), (65, 130), (203, 113), (130, 257))
"""Query and key lengths of the launches: one key, ends of tiles, more queries than keys, several tiles."""
OPTIONS = ("--report-api-errors", "no", "--print-limit", "1000")
"""No API errors: asking the driver for a function that it lacks is one, and no error of a kernel."""
TIMEOUT_S = 540.0
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_ENTRY = re.compile(r"\battention_(\w+?)(?=\+0x|\(|\s|$)")
_KEPT = 5
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a tool said of one process."""

    total: int | None
    """Errors by its own count; None where it did not come to its summary."""
    of_stage: Mapping[str, int]
    """Reports that name a stage's kernel."""
    words: Mapping[str, tuple[str, ...]]
    """Their first lines, the first few of each stage; those that name no stage under an empty name."""


def parse(text: str) -> Found:
    """What a tool's log says.

    Each report is a paragraph, ended by a line of its own sign; the first kernel that it names is its.
    """
    counts: Counter[str] = Counter()
    words: dict[str, list[str]] = {}
    total: int | None = None
    for paragraph in _paragraphs(text):
        summary = _SUMMARY.search(paragraph[0])
        if summary:
            total = (total or 0) + int(summary[1] or summary[2])
            continue
        named = _ENTRY.search(" ".join(paragraph))
        stage = named[1] if named else ""
        if named:
            counts[stage] += 1
        words.setdefault(stage, []).append(paragraph[0])
    return Found(total=total, of_stage=counts, words={name: tuple(lines[:_KEPT]) for name, lines in words.items()})


def _paragraphs(text: str) -> Iterator[list[str]]:
    """The reports and summaries in a log, a list of lines each; what the tool says of itself is left out."""
    lines: list[str] = []
    for line in (*text.splitlines(), "========="):
        if not line.startswith("========="):
            continue
        said = line.removeprefix("=========").strip()
        if said.startswith("COMPUTE-SANITIZER"):
            continue
        if said and not _SUMMARY.search(said):
            lines.append(said)
            continue
        if lines:
            yield lines
        lines = []
        if said:
            yield [said]


def program() -> str:
    """The tool: on PATH, else in a toolkit's usual place.

    Raises:
        MissingError: there is none.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    found = shutil.which("compute-sanitizer", path=search)
    if found is None:
        raise MissingError("wanted `compute-sanitizer` on PATH, found none; the CUDA toolkit has it")
    return found


def version(command: str) -> str:
    """What it says of its version, in one line."""
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.lower().startswith("version")), lines[-1] if lines else "unknown")


def sanitize(
    stage_ids: Sequence[str] | None = None,
    *,
    tools: Sequence[str] = TOOLS,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    data: Path = DATA,
    device: int = 0,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
) -> tuple[Path, tuple[Sanitized, ...]]:
    """Run every tool over the stages that this GPU runs, all tools at once, and append to data/<gpu>/sanitizer/.

    Args:
        stage_ids: all where None.
        tools: of `TOOLS`.
        lengths: (q_len, kv_len) of the launches.
        data: the folder that holds data/<gpu>.
        device: CUDA device index.
        timeout_s: for each tool.
        say: told what happens, a line at a time.

    Returns:
        The file, and its records, one a tool and stage.

    Raises:
        UnknownStageError, ParameterError: a stage or tool that is not there, or no stage that runs here.
        NoGpuError, MissingError: no GPU, or no compute-sanitizer.
        OutputError: `data` cannot be written.
    """
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown or not tools:
        raise ParameterError(f"tools: wanted some of {', '.join(TOOLS)}, got {', '.join(unknown) or 'none'}")
    found = gpu.info(device)
    chosen = [registry.get(stage_id) for stage_id in (registry.STAGES if stage_ids is None else stage_ids)]
    able = [stage.id for stage in chosen if found.arch in stage.archs]
    if not able:
        raise ParameterError(f"wanted a stage that runs on {found.arch}, got none")
    command = program()
    said = version(command)
    folder = writable_dir(data / found.slug / "sanitizer", "records")
    commit, dirty = provenance.source()
    source = Source(commit=commit, dirty=dirty)
    run = store.run_id(source, datetime.now(UTC))
    path = folder / f"{run}.jsonl"
    say("compiling")
    cuda = [registry.get(stage_id) for stage_id in able if stage_id in registry.CUDA_STAGES]
    compiler.compile_many(compiler.jobs(cuda, [found.arch or ""], aligned=(True, False)))
    job = {"stages": able, "lengths": [list(pair) for pair in lengths], "device": device}

    def under(tool: str) -> tuple[Found, dict[str, Any], str]:
        say(f"{tool}: started")
        result = _run(command, tool, job, timeout_s)
        say(f"{tool}: {'no summary' if result[0].total is None else f'{result[0].total} errors'}")
        return result

    with ThreadPoolExecutor(len(tools)) as pool:
        results = dict(zip(tools, pool.map(under, tools), strict=True))
    written = []
    for tool, (told, done, tail) in results.items():
        whole = told.total is not None and bool(done.get("done"))
        elsewhere = max(0, (told.total or 0) - sum(told.of_stage.values()))
        for stage_id in able:
            reasons = (*told.words.get(stage_id, ()), *done.get("failed", {}).get(stage_id, ()))
            if elsewhere:
                reasons += told.words.get("", ())
            record = Sanitized(
                run=run,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                gpu=Gpu.model_validate({name: getattr(found, name) for name in Gpu.model_fields}),
                source=source,
                software=provenance.software(),
                tool=tool,
                version=said,
                stage=stage_id,
                launches=int(done.get("launches", {}).get(stage_id, 0)),
                errors=told.of_stage.get(stage_id, 0) + len(done.get("failed", {}).get(stage_id, ())),
                elsewhere=elsewhere,
                finished=whole,
                findings=(*reasons, *(() if whole else (tail,))),
            )
            store.append(path, record)
            written.append(record)
    store.write_checksums(found.slug, data)
    return path, tuple(written)


def _run(command: str, tool: str, job: Mapping[str, object], timeout_s: float) -> tuple[Found, dict[str, Any], str]:
    """What a tool found, what the process it watched says it did, and the end of what both printed."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder) / "log", Path(folder) / "report"
        asked = [command, "--tool", tool, *OPTIONS, "--log-file", str(log)]
        own = [
            sys.executable,
            "-m",
            "flashlab.experiments.sanitizer",
            "--launch",
            json.dumps(job),
            "--report",
            str(report),
        ]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each array an allocation of its own
        try:
            ended = subprocess.run(
                [*asked, *own], capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
            )
            tail = f"exit status {ended.returncode}: {(ended.stdout + ended.stderr)[-500:]}"
        except subprocess.TimeoutExpired:
            tail = f"no end within {timeout_s:g} s"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        done = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return parse(text), done, tail


# --- Under the tool ---------------------------------------------------------------------------------------------------


def problems(stage_id: str, lengths: Sequence[tuple[int, int]]) -> list[Problem]:
    """What a stage is launched on: grouped heads, every head dim, type, mask and pair of lengths it takes."""
    stage = registry.get(stage_id)
    whole = Problem(batch=1, q_heads=2, kv_heads=1, q_len=1, kv_len=1, head_dim=stage.head_dims[0])
    return [
        replace(whole, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype, mask=mask)
        for head_dim in stage.head_dims
        for dtype in DTYPES
        if dtype in stage.dtypes
        for mask in MASKS
        for q_len, kv_len in lengths
    ]


def _launch(job: Mapping[str, Any], report: Path) -> None:
    """Launch every stage; `report` says how often, and what was refused."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(job["device"])
    lengths = [(q_len, kv_len) for q_len, kv_len in job["lengths"]]
    launches: Counter[str] = Counter()
    failed: dict[str, list[str]] = {}

    def write(done: bool) -> None:
        report.write_text(json.dumps({"launches": launches, "failed": failed, "done": done}), encoding="utf-8")

    for stage_id in job["stages"]:
        for problem in problems(stage_id, lengths):
            for odd in (0, 1):
                try:
                    _launch_once(torch, stage_id, problem, odd)
                    launches[stage_id] += 1
                except (FlashlabError, RuntimeError) as error:
                    failed.setdefault(stage_id, []).append(f"{problem.label}: {error}")
                    if isinstance(error, LaunchError) or not isinstance(error, FlashlabError):
                        write(done=False)
                        return  # what runs afterwards in this process says nothing
        write(done=False)
    write(done=True)


def _launch_once(torch: Any, stage_id: str, problem: Problem, odd: int) -> None:
    """One launch. Arrays come from the host, so that no kernel but the stage's runs; `odd` elements part the rows."""

    def on_gpu(shape: Sequence[int], values: Any | None) -> Any:
        batch, heads, length, head_dim = shape
        step = head_dim + odd
        strides = (heads * length * step, length * step, step, 1)
        size = batch * heads * length * step
        if values is None:
            flat = torch.empty(size, dtype=getattr(torch, problem.dtype), device="cuda")
        else:
            host = torch.zeros(size, dtype=torch.int16)
            host.as_strided(tuple(shape), strides)[...] = torch.from_numpy(values.view("int16"))
            flat = host.cuda().view(getattr(torch, problem.dtype))
        return flat.as_strided(tuple(shape), strides)

    q, k, v = (on_gpu(x.shape, x) for x in make_inputs(problem))
    out = on_gpu(q.shape, None)
    lse = torch.empty(tuple(q.shape[:3]), dtype=torch.float32, device="cuda")
    prepare(q, k, v, causal=problem.causal, stage=stage_id, out=out, lse=lse)()
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """What a tool runs."""
    parser = argparse.ArgumentParser(prog="python -m flashlab.sanitizer", description="Internal: launches, watched.")
    parser.add_argument("--launch", required=True, help="stages, lengths and device as JSON")
    parser.add_argument("--report", type=Path, required=True, help="where to say what was launched")
    options = parser.parse_args(arguments)
    _launch(json.loads(options.launch), options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
