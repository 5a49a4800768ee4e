"""What several test files need and one process makes: folders filled once a test run, and kernels named by content."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashlab.build import compiler
from flashlab.build.compiler import Cubin, Job
from flashlab.core.errors import MissingPackageError
from flashlab.core.paths import BUILD, ROOT
from flashlab.core.problem import DType, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.record import store
from flashlab.record.schema import Ceiling, Measurement, Verdict
from flashlab.run import emulator

try:
    emulator.cxx()
    NO_COMPILER = ""
except MissingPackageError as error:
    NO_COMPILER = str(error)
"""Why nothing can be emulated here; empty where it can."""
needs_compiler = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)


def cubin(
    stage: Stage,
    head_dim: int,
    *,
    causal: bool = False,
    dtype: DType = "float16",
    overrides: Mapping[str, int] | None = None,
) -> Cubin:
    """The machine code of a stage for Hopper."""
    return compiler.compile_stage(
        Job(stage=stage, head_dim=head_dim, dtype=dtype, causal=causal, arch="sm_90a", overrides=overrides)
    )


def tracked() -> list[str]:
    """Files of the checkout in git, new ones included; skips where there is none."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


tiers = pytest.mark.parametrize(
    "whole",
    [pytest.param(False, id="part"), pytest.param(True, id="whole", marks=pytest.mark.exhaustive)],
)
"""Of a large matrix, `make test` runs a part, a few cases of each stage, and `make test-all` the whole too."""


def parts_of(part: Iterable[Stage | str], whole: Iterable[Stage | str]) -> pytest.MarkDecorator:
    """`stage` and whether its `whole` matrix is meant: `make test` takes a part of some, `make test-all` all of all."""

    def given(stage: Stage | str, whole: bool) -> Any:
        name = stage if isinstance(stage, str) else stage.id
        marks = pytest.mark.exhaustive if whole else ()
        return pytest.param(stage, whole, id=f"{name}-{'whole' if whole else 'part'}", marks=marks)

    each = [*(given(stage, False) for stage in part), *(given(stage, True) for stage in whole)]
    return pytest.mark.parametrize(("stage", "whole"), each)


OF_STAGES = ("01_correctness", "03_anatomy")
"""Notebooks that emulate every stage they are given, or compile it for every architecture."""
REPORTED = ("00_naive", "06_cp_async", "16_ones_column")
"""What the notebooks of the tests' report compile for every architecture and emulate: the first stage, one for warps
and one for Hopper alone."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this test run that `make` fills; whichever worker comes first makes it, the others wait for it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker has a folder below the run's
    folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
    with (root / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            assert not folder.exists(), f"{name} was begun and failed before: see the first error that names it"
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def in_turn(stage: Stage) -> tuple[tuple[int, DType, bool], ...]:
    """Head dim, element type and whether causal, of as few variants as have each head dim, and each type in each mask.

    Of the variants of `one_type_a_head_dim`, where head dims are more than types.
    """
    dims, types = stage.head_dims, stage.dtypes
    return tuple(
        (dims[number % len(dims)], types[number % len(types)], bool(number // len(types) % 2))
        for number in range(max(len(dims), 2 * len(types)))
    )


def part_of(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs of the variants `in_turn`, for Hopper; for its newest architecture where a stage does not run there."""

    def taken(job: Job) -> bool:
        arch = "sm_90a" if "sm_90a" in job.stage.archs else job.stage.archs[-1]
        return job.arch == arch and (job.head_dim, job.dtype, job.causal) in in_turn(job.stage)

    return tuple(job for job in jobs if taken(job))


def ends_of(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Of `part_of` the first and the last: another head dim, and where there are as many, another type and mask."""
    return tuple(jobs[0:1]) + tuple(jobs[-1:])


def without_variants(patched: pytest.MonkeyPatch) -> None:
    """Let pages of stages off the ladder show the machine code of each, and of the variants of dead ends alone.

    There are four times as many with all, and `test_it_compiles_everywhere_without_spills` compiles them.
    """
    off = registry.OFF_LADDER.items()
    kept = {name: one if name in registry.DEAD_ENDS else replace(one, variants=()) for name, one in off}
    patched.setattr(registry, "OFF_LADDER", kept)


def one_type_a_head_dim(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs of one element type for each head dim, alternating: the other differs in opcodes, not in registers."""

    def taken(stage: Stage, head_dim: int) -> str:
        return stage.dtypes[stage.head_dims.index(head_dim) % len(stage.dtypes)]

    return tuple(job for job in jobs if job.dtype == taken(job.stage, job.head_dim))


def a_variant_elsewhere(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs for Hopper, and one per head dim on each other architecture.

    Element types alternate by head dim, the first of both being what other tests and notebooks compile too, and masks
    by head dim and architecture.
    """

    def taken(job: Job) -> bool:
        stage, number = job.stage, job.stage.head_dims.index(job.head_dim)
        causal = bool((number + stage.archs.index(job.arch)) % 2)
        return (job.dtype, job.causal) == (stage.dtypes[number % len(stage.dtypes)], causal)

    return tuple(job for job in jobs if job.arch == "sm_90a" or taken(job))


def live_things(page: str) -> list[str]:
    """What of a page of the report would run, or lead to a script, and is not the report's own."""
    found: list[str] = []

    class Scan(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            urls = [given.get(name) or "" for name in ("href", "src", "action", "formaction", "data", "xlink:href")]
            if any(name.startswith("on") for name in given) or "srcdoc" in given or given.get("src") == "x":
                found.append(self.get_starttag_text() or tag)
            if any(url.strip().lower().startswith(("javascript:", "vbscript:", "data:text")) for url in urls):
                found.append(self.get_starttag_text() or tag)
            self._script = tag == "script"

        def handle_endtag(self, tag: str) -> None:
            self._script = False

        def handle_data(self, data: str) -> None:
            if getattr(self, "_script", False) and "hacked" in data:
                found.append(data)

    Scan().feed(page)
    return found


def source_file(name: str, text: str) -> Path:
    """A file `name` of that text, at a path that depends on nothing else: the compile cache's keys hold the path.

    It lies in build/, so the next run finds what this one has compiled. Tests read it and change nothing.
    """
    path = BUILD / "tests" / hashlib.sha256(text.encode()).hexdigest()[:16] / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{name}.{os.getpid()}.{os.urandom(4).hex()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    return path


def llama(torch: Any, *, layers: int, heads: int, head_dim: int) -> Any:
    """A small Llama of transformers with random weights and two K/V heads, whose attention may be flashlab's."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    importlib.import_module("flashlab.torch").register()
    torch.manual_seed(0)
    width = heads * head_dim
    config = transformers.LlamaConfig(
        **{"vocab_size": 128, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": head_dim},
        **{"pad_token_id": 0, "eos_token_id": None},
    )
    return transformers.LlamaForCausalLM(config).eval()


WINDOWED_MODELS = ("Gemma2", "Gemma3", "Mistral")


def windowed(torch: Any, kind: str, window: int) -> Any:
    """A small model of transformers with random weights whose layers have windows of so many tokens, or a soft cap, or
    both."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    importlib.import_module("flashlab.torch").register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    sizes |= {"sliding_window": window}
    # Of a cap that random weights' scores reach.
    more = {
        "Gemma2": {"attn_logit_softcapping": 0.5},
        "Gemma3": {"layer_types": ["sliding_attention"] * 2},
        "Mistral": {},
    }
    name = {"Gemma3": "Gemma3Text"}.get(kind, kind)
    config = getattr(transformers, f"{name}Config")(**sizes, **more[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def right(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0
) -> tuple[Any, Any]:
    """Output (queries, heads, head_dim) and log-sum-exp (heads, queries) of one sequence, by the definition.

    Of torch tensors (queries or keys, heads, head_dim), in float64.
    """
    torch = importlib.import_module("torch")
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    apart = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    apart -= k.shape[1] - q.shape[1]
    before, after = window[0], 0 if causal else window[1]
    scores.masked_fill_(((apart < -before) & (before >= 0)) | ((apart > after) & (after >= 0)), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.where(lse.isneginf()[..., None], 0.0, (scores - lse[..., None]).exp() @ v).transpose(0, 1), lse


def guarded_verdict(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    *,
    layout: str = "contiguous",
    source: Path | None = None,
) -> Verdict:
    """Run a stage once on the current GPU between guards and say what is wrong with it; q, k, v are CuPy arrays."""
    from flashlab.measure import check

    inputs = check._guarded_inputs(values, layout)
    return check._guarded_run(stage_id, problem, values, inputs, layout=layout, source=source)[0]


@dataclass(frozen=True)
class Run:
    """The records of one run file, by kind, and what could not be read."""

    path: Path
    records: tuple[Measurement | Ceiling, ...]
    damage: tuple[store.Damage, ...]

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Stages and libraries; no row `with_lse`."""
        return tuple(row for row in self.records if isinstance(row, Measurement) and not row.with_lse)

    @property
    def with_lse(self) -> tuple[Measurement, ...]:
        return tuple(row for row in self.records if isinstance(row, Measurement) and row.with_lse)

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        return tuple(row for row in self.records if isinstance(row, Ceiling))


def read_run(path: Path) -> Run:
    rows, damage = store.read(path, Measurement)
    ceilings, _ = store.read(path, Ceiling)
    return Run(path, (*rows, *ceilings), damage)
