"""Stages in Triton: what is refused without it, and, where it is installed, that they compile and are right."""

from __future__ import annotations

import ast
import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlab
from flashlab.build import compiler, sass, triton_code
from flashlab.core import errors
from flashlab.core.problem import Problem
from flashlab.experiments import triton_interpreter
from flashlab.kernels import registry
from flashlab.kernels.registry import STAGES, Stage
from flashlab.run.arguments import AttentionParams, TensorView, triton_arguments, triton_parameters
from flashlab.verify.on_cpu import check_on_cpu
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

TRITON = [stage for stage in STAGES.values() if stage.language == "triton"]
every_stage = pytest.mark.parametrize("stage", TRITON, ids=lambda stage: stage.id)
needs_triton = pytest.mark.skipif(triton_code.missing() is not None, reason=f"needs Triton: {triton_code.missing()}")
needs_interpreter = pytest.mark.skipif(
    triton_code.missing(interpreter=True) is not None,
    reason=f"needs Triton's interpreter: {triton_code.missing(interpreter=True)}",
)
ONE = Problem.parse("1x2x65x64")


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str, version: str = "3.9.0") -> None:
    monkeypatch.setattr(triton_code, "_is_there", lambda name: name in names)
    monkeypatch.setattr(triton_code, "version", lambda: version)


# --- without Triton ---


def test_there_is_one_and_it_is_never_the_default() -> None:
    assert [stage.id for stage in TRITON] == ["t0_triton"]
    for arch in (*registry.ARCHS, None):
        assert registry.best(ONE, arch).language == "cuda"


@every_stage
def test_a_kernel_takes_what_it_is_passed(stage: Stage) -> None:
    tree = ast.parse(stage.source.read_text(encoding="utf-8"))
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == stage.entry)
    assert [argument.arg for argument in kernel.args.args] == [*triton_code.ARGUMENTS, *triton_code.CONSTANTS]
    constants = [argument.arg for argument in kernel.args.args if argument.annotation is not None]
    assert constants == list(triton_code.CONSTANTS)
    assert {"TILE_Q", "TILE_KV", "WARPS", "PIPELINE_STAGES", "MAX_REGISTERS"} == set(stage.params)


def test_the_compiler_ends_with_the_worker_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed with its process group."""
    command = [sys.executable, "-c", "import os; print(os.getpgrp())"]
    monkeypatch.setattr(triton_code, "worker", lambda *_: (command, None))
    how: dict[str, Any] = {"dtype": "float16", "constants": {}, "options": {}, "capability": (9, 0), "aligned": True}
    assert triton_code.compile_kernel(Path("none.py"), entry="none", **how) == (None, f"{os.getpgrp()}\n", {})


def test_a_compiler_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_code, "worker", lambda *_: ([sys.executable, "-c", "import time; time.sleep(60)"], None))
    monkeypatch.setattr(triton_code, "_LIMIT_S", 0.1)
    how: dict[str, Any] = {"dtype": "float16", "constants": {}, "options": {}, "capability": (9, 0), "aligned": True}
    assert triton_code.compile_kernel(Path("none.py"), entry="none", **how) == (
        None,
        "not done after 0.1 s; stopped\n",
        {},
    )


def test_an_interpreter_that_was_killed_in_time_did_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter, "run_worker", lambda *_: (-9, "", ""))
    kernel: Any = SimpleNamespace(name="t0_triton", source="none.py", entry="none")
    with pytest.raises(errors.EmulationError, match="ended by SIGKILL") as caught:
        triton_interpreter.interpret(kernel, {}, constants={}, dtype="float16", grid=(1, 1, 1))
    assert caught.value.report is not None
    assert caught.value.report.status == "crash"


@pytest.mark.parametrize(
    ("installed", "version", "compiles", "interprets"),
    [
        ((), "", "pip install triton", "pip install torch && pip install --no-deps 'triton>=3.9'"),
        (("triton",), "3.9.0", None, "pip install torch && pip install --no-deps 'triton>=3.9'"),
        (("triton", "torch"), "3.6.0", None, "pip install --no-deps 'triton>=3.9'"),
        (("triton", "torch"), "3.10.1", None, None),
    ],
)
def test_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    version: str,
    compiles: str | None,
    interprets: str | None,
) -> None:
    _installed(monkeypatch, *installed, version=version)
    assert triton_code.missing() == compiles
    assert triton_code.missing(interpreter=True) == interprets


@every_stage
def test_without_triton_the_others_still_compile_and_run(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    _installed(monkeypatch)
    assert {job.stage.language for job in compiler.jobs()} == {"cuda"}
    with pytest.raises(errors.MissingPackageError, match=f"compile stage {stage.id}, .* pip install triton"):
        compiler.compile_stage(compiler.Job(stage=stage, head_dim=64, dtype="float16", causal=False, arch="sm_90a"))
    q, k, v = make_inputs(ONE)
    with pytest.raises(errors.UnsupportedError, match=f"{stage.id} runs on a CPU by .* own: .*There: pip install to"):
        flashlab.attention(q, k, v, stage=stage.id)
    found = check_on_cpu([stage.id], lengths=[(3, 5)], masks=("full",), layouts=("contiguous",), head_dims=(64,))
    assert {row.status for row in found.rows} == {"unsupported"}


@every_stage
def test_with_triton_they_are_compiled_with_the_others(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    _installed(monkeypatch, "triton")
    assert stage.id in {job.stage.id for job in compiler.jobs()}


@every_stage
@pytest.mark.parametrize("options", [{"races": True}, {"schedule": "descending"}], ids=["races", "schedule"])
def test_what_an_interpreter_cannot_tell_is_refused(stage: Stage, options: dict[str, Any]) -> None:
    q, k, v = make_inputs(ONE)
    with pytest.raises(errors.UnsupportedError, match="no races to look for and no schedule but ascending"):
        flashlab.emulate(q, k, v, stage=stage.id, **options)


@every_stage
def test_bfloat16_is_not_interpreted(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    _installed(monkeypatch, "triton", "torch")
    q, k, v = make_inputs(replace(ONE, dtype="bfloat16"))
    with pytest.raises(errors.UnsupportedError, match="takes float16 on a CPU, got bfloat16"):
        flashlab.attention(q, k, v, stage=stage.id)


def test_the_launcher_passes_every_argument_in_order() -> None:
    views = [TensorView(1 << (20 + i), 100 + i, 200 + i, 300 + i) for i in range(4)]
    params = AttentionParams(*views, 1 << 30, 8, 2, 33, -44, 0.5, 3, None)
    passed = triton_parameters(params)
    values = [value.value for value in passed[: len(triton_code.ARGUMENTS)]]
    strides = [step + i for i in range(4) for step in (100, 200, 300)]
    assert values == [1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 30, *strides, 8, 2, 33, -44, 1, 0.5]
    sizes = [ctypes.sizeof(value) for value in passed]
    assert sizes == [8] * 17 + [4] * 6 + [8] * triton_code.HIDDEN_POINTERS
    assert [value.value for value in passed[len(values) :]] == [None] * triton_code.HIDDEN_POINTERS
    params.LSE = None
    assert triton_arguments(params)["wants_lse"] == triton_arguments(params)["LSE"] == 0


# --- with Triton ---


@needs_triton
@every_stage
def test_every_variant_compiles_for_every_architecture(stage: Stage) -> None:
    work = (*compiler.jobs([stage]), *compiler.jobs([stage], ["sm_90a"], aligned=(False,)))
    assert {job.arch for job in work} == set(stage.archs)
    for job, cubin in zip(work, compiler.compile_many(work), strict=True):
        assert isinstance(cubin, compiler.Cubin), cubin
        assert (cubin.name, cubin.entry, cubin.arch) == (stage.id, stage.entry, job.arch)
        assert cubin.compiler == f"Triton {triton_code.version()}"
        assert cubin.parameters == stage.parameters(job.head_dim)
        assert 0 < cubin.resources.registers <= 255
        shape = cubin.launch_shape
        assert shape is not None
        assert shape.threads == 32 * cubin.parameters["WARPS"]
        assert shape.tile_q == cubin.parameters["TILE_Q"]
        assert 0 < shape.smem_bytes <= 227 * 1024
        if job.arch == "sm_90a" and job.aligned:
            opcodes = {i.opcode.split(".")[0] for i in sass.disassemble(cubin.code, cubin.entry)}
            assert opcodes >= {"HGMMA", "LDGSTS"}


@needs_triton
@every_stage
def test_a_kernel_that_triton_refuses(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    how: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "causal": True, "arch": "sm_90a"}
    source = tmp_path / "edited.py"
    text = stage.source.read_text(encoding="utf-8")
    source.write_text(text.replace("tl.exp2", "tl.no_such_function"), encoding="utf-8")
    with pytest.raises(errors.CompileError, match="no_such_function") as caught:
        compiler.compile_stage(compiler.Job(stage=stage, **how, source=source))
    assert caught.value.command.startswith("triton.compile")
    source.write_text(text.replace(stage.entry, "another"), encoding="utf-8")
    with pytest.raises(errors.CompileError, match=stage.entry):
        compiler.compile_stage(compiler.Job(stage=stage, **how, source=source))
    source.write_text(text, encoding="utf-8")
    first = compiler.compile_stage(compiler.Job(stage=stage, **how, source=source))
    again = compiler.compile_stage(compiler.Job(stage=stage, **how, source=source))
    assert (first.cached, again.cached) == (False, True)
    assert replace(first, cached=True) == again


@needs_interpreter
@every_stage
def test_a_stage_is_right_on_the_cpu(stage: Stage) -> None:
    lengths = ((1, 1), (113, 203), (203, 113), (239, 1), (130, 256))
    found = check_on_cpu([stage.id], lengths=lengths, dtypes=("float16",), layouts=("contiguous", "misaligned"))
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in found.rows if row.status != "ok"] == []
    assert len(found.rows) == len(stage.head_dims) * 2 * len(lengths) * 2


@needs_interpreter
@every_stage
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(stage: Stage, scale: float) -> None:
    q, k, v = make_inputs(ONE)
    out, lse = flashlab.attention(q, k, v, causal=True, scale=scale, stage=stage.id, return_lse=True)
    assert check(out, lse, q, k, v, causal=True, dtype="float16", scale=scale).reason == ""
    assert flashlab.emulate(q, k, v, stage=stage.id, return_lse=False).lse is None


@needs_interpreter
@every_stage
def test_a_row_that_sees_a_nan_is_nan_and_so_is_its_log_sum_exp(stage: Stage) -> None:
    q, k, v = make_inputs(ONE)
    k[0, -1, -1, 3] = np.nan
    ran = flashlab.emulate(q, k, v, stage=stage.id)
    rows = ran.out.shape[2] * (q.shape[1] // k.shape[1])
    assert np.isnan(ran.lse).sum() == rows
    assert (np.isnan(ran.out.astype(np.float64)).all(axis=-1) == np.isnan(ran.lse)).all()


@needs_interpreter
@every_stage
def test_a_wrong_kernel_is_found_and_one_that_fails_says_why(stage: Stage, tmp_path: Path) -> None:
    q, k, v = make_inputs(ONE)
    text = stage.source.read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    assert "O_acc * rescale[:, None]" in text
    wrong.write_text(text.replace("O_acc * rescale[:, None]", "O_acc"), encoding="utf-8")
    long = tuple(np.concatenate([x, 4 * x], axis=2) for x in (q, k, v))
    ran = flashlab.emulate(*long, stage=stage.id, source=wrong)
    assert not check(ran.out, ran.lse, *long, causal=False, dtype="float16").passed
    fails = tmp_path / "fails.py"
    fails.write_text(text.replace("tl.exp2", "tl.no_such_function"), encoding="utf-8")
    out = np.full_like(q, 7)
    with pytest.raises(errors.EmulationError, match="no_such_function"):
        flashlab.emulate(q, k, v, stage=stage.id, source=fails, out=out)
    assert (out == 7).all()
    with pytest.raises(errors.EmulationError, match=r"not done after 0\.01 seconds") as caught:
        flashlab.emulate(q, k, v, stage=stage.id, timeout_s=0.01)
    assert caught.value.report is not None
    assert caught.value.report.status == "timeout"
