"""Why a peer is not measured, in words; the peers themselves run in tests/gpu."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from flashlab.build import triton_code
from flashlab.core import errors
from flashlab.core.problem import Problem
from flashlab.kernels import peers
from flashlab.query import select

FULL = Problem.parse("1x2x64x64")
BFLOAT16 = Problem.parse("1x2x64x64", dtype="bfloat16")
SQUARE_CAUSAL = Problem.parse("1x2x64x64", mask="causal")
WIDE_CAUSAL = Problem.parse("1x2x2x64x128x64", mask="causal")
TALL_CAUSAL = Problem.parse("1x2x2x128x64x64", mask="causal")
GROUPED = Problem.parse("1x4x2x64x64x64")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package is there."""
    spec = importlib.machinery.ModuleSpec("any", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_registry_has_what_the_lab_compares_with() -> None:
    assert peers.PEERS.keys() >= {
        "sdpa",
        "sdpa_cudnn",
        "sdpa_flash",
        "cublas_unfused",
        "flex",
        "triton_fa2",
        "fa3",
        "fa4",
    }
    assert {"fa3-fwd", "flash-attn-4"} <= set(peers.DISTRIBUTIONS), "records name their versions"
    assert all(peer.title and peer.how for peer in peers.PEERS.values())
    with pytest.raises(errors.ParameterError, match="sdpa_cudnn"):
        peers.get("cudnn")


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_missing_package_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(errors.MissingPackageError, match=f"{name} .*pip install"):
        peers.get(name).require(BFLOAT16)


def test_a_missing_wheel_is_told_from_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: spec if module == "torch" else None)
    peers.get("sdpa").require(FULL)
    with pytest.raises(errors.MissingPackageError, match="pip install 'fa3-fwd'"):
        peers.get("fa3").require(BFLOAT16)


def test_another_package_of_the_same_name_is_not_taken_for_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-2's package is called flash_attn too, and has no module `cute`."""
    for name in ("torch", "flash_attn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(errors.MissingPackageError, match="pip install 'flash-attn-4'"):
        peers.get("fa4").require(FULL)
    (tmp_path / "flash_attn" / "cute.py").touch()
    peers.get("fa4").require(FULL)
    with pytest.raises(errors.UnsupportedError):
        peers.get("fa4").require(FULL, compute_capability=(7, 5))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "problem", "options", "words"),
    [
        ("fa3", FULL, {}, "bfloat16"),
        ("fa3", BFLOAT16, {"compute_capability": (8, 0)}, "9.0 to 9.0; this GPU has 8.0"),
        ("fa3", BFLOAT16, {"compute_capability": (10, 0)}, "this GPU has 10.0"),
        ("sdpa_flash", FULL, {"compute_capability": (7, 5)}, "8.0 or newer"),
        ("sdpa_flash", WIDE_CAUSAL, {}, "top left"),
        ("sdpa_cudnn", WIDE_CAUSAL, {}, "top left"),
        ("sdpa", BFLOAT16, {"compute_capability": (7, 5)}, "bfloat16 needs"),
        ("sdpa", TALL_CAUSAL, {}, "sees no key"),
        ("cublas_unfused", TALL_CAUSAL, {}, "sees no key"),
        ("flex", TALL_CAUSAL, {}, "sees no key"),
        ("sdpa_math", Problem.parse("4x16x8192x64"), {"free_bytes": 10 << 30}, r"about 60.1 GB .* 10.7 GB are free"),
        ("cublas_unfused", Problem.parse("4x16x8192x64"), {"free_bytes": 10 << 30}, "60.1 GB"),
        ("sdpa_efficient", GROUPED, {}, "grouped"),
        ("flashinfer", FULL, {}, "at most 1 query rows"),
        ("flashinfer", Problem.parse("4x32x8x1x8190x128"), {}, "pages of 16 keys, got 8190"),
        ("flashinfer", Problem.parse("4x32x8x1x8192x96"), {}, "head dims 64, 128 and 256, got 96"),
    ],
)
def test_what_a_peer_cannot_do_is_said(name: str, problem: Problem, options: Any, words: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=words):
        peers.get(name).require(problem, **options)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "problem", "options"),
    [
        ("fa3", BFLOAT16, {"compute_capability": (9, 0)}),
        ("fa3", Problem.parse("1x2x2x64x128x64", dtype="bfloat16", mask="causal"), {}),
        ("sdpa", WIDE_CAUSAL, {"compute_capability": (7, 5)}),
        ("sdpa_cudnn", SQUARE_CAUSAL, {"compute_capability": (12, 0)}),
        ("sdpa_math", Problem.parse("4x16x8192x64"), {"free_bytes": 130 << 30}),
        ("flex", GROUPED, {"compute_capability": (9, 0)}),
        ("flashinfer", Problem.parse("4x32x8x1x8192x128"), {"compute_capability": (9, 0)}),
    ],
)
def test_what_a_peer_can_do_is_not_refused(name: str, problem: Problem, options: Any) -> None:
    peers.get(name).require(problem, **options)


def test_a_library_for_decoding_is_measured_where_something_decodes() -> None:
    decoding = Problem.parse("4x32x8x1x8192x128")
    assert "flashinfer" not in peers.default_names([FULL, BFLOAT16])
    assert set(peers.default_names([FULL, decoding])) == peers.PEERS.keys() - {"fa3_fp8"}


def test_a_library_in_fp8_is_measured_by_name_alone_and_no_ratio_is_of_it() -> None:
    assert peers.get("fa3_fp8").precision == "e4m3_scaled"
    assert "fa3_fp8" not in peers.default_names([BFLOAT16])
    for refused in (
        Problem.parse("4x32x8x1x8192x128", dtype="bfloat16"),
        Problem.parse("1x16x2048x128", dtype="bfloat16", inputs="trained"),
    ):
        limit = peers.get("fa3_fp8").limits(refused)
        assert limit is not None, "it would be timed with the rounding in it"
        assert "rounded once" in limit
    assert peers.get("fa3_fp8").limits(BFLOAT16) is None
    fp8, sound = (synthetic.measurement(name, BFLOAT16) for name in ("fa3_fp8", "sdpa_math"))
    assert select.rate(fp8) > select.rate(sound)
    assert select.fastest_peer([sound, fp8]) is sound
    assert select.fastest_peer([fp8]) is None


def test_fp8_inputs_are_rounded_once_for_the_tensors_they_were_made_of() -> None:
    torch = pytest.importorskip("torch")
    calls: list[Any] = []

    def attention(**given: Any) -> Any:
        calls.append(given)
        return given["q"]

    attend = peers._Fp8(attention, Problem.parse("2x4x2x3x5x128", dtype="bfloat16"))
    q, k, v = (torch.randn(2, length, heads, 128) for length, heads in ((3, 4), (5, 2), (5, 2)))
    attend(q, k, v)
    attend(q, k, v)
    attend(q + 1, k, v)
    first, again, other = calls
    assert first["q"].dtype == torch.float8_e4m3fn
    assert [first[f"{name}_descale"].shape for name in "qkv"] == [(2, 2)] * 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        scale = first[f"{name}_descale"].repeat_interleave(x.shape[2] // 2, dim=1)[:, None, :, None]
        torch.testing.assert_close(first[name].float() * scale, x, rtol=2**-4, atol=2**-9 * float(x.abs().max()))
    assert again["q"] is first["q"]
    assert not torch.equal(other["q"].float(), first["q"].float())


def test_every_peer_says_its_layout_and_whether_it_writes_a_log_sum_exp() -> None:
    assert {peers.get(name).layout for name in ("fa3", "fa4")} == {"bshd"}
    assert [peers.get(name).wrote_lse() for name in ("sdpa_flash", "fa3", "fa4", "sdpa")] == [True, True, False, None]
    default = peers.get("sdpa")
    assert (default.wrote_lse("CUDNN_ATTENTION"), default.wrote_lse("FLASH_ATTENTION")) == (False, True)
    assert default.wrote_lse("OVERRIDEABLE") is None


def test_a_layout_is_a_contiguous_copy_and_back() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    tensors = tuple(torch.randn(2, heads, length, 16) for heads, length in ((4, 5), (2, 7), (2, 7)))
    assert peers.in_layout("bhsd", *tensors) == tensors
    given = peers.in_layout("bshd", *tensors)
    assert [tuple(one.shape) for one in given] == [(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)]
    for one, other in zip(given, tensors, strict=True):
        assert one.is_contiguous()
        assert one.data_ptr() != other.data_ptr()
        assert torch.equal(peers.bhsd_view("bshd", one), other)
    assert peers.bhsd_view("bhsd", tensors[0]) is tensors[0]


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_torchs_own_choice_is_named(mask: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    problem = Problem.parse("1x4x2x8x8x64", mask=mask)
    attend = peers.get("sdpa").build(problem)
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64)
    assert attend.choice == ""  # type: ignore[attr-defined]
    with torch.no_grad():
        out = attend(q, k, k)
    assert attend.choice in ("MATH", "FLASH_ATTENTION")  # type: ignore[attr-defined]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=problem.causal, enable_gqa=True)
    assert torch.equal(out, wanted)


_INTERPRETED = """
import sys
import importlib.util
import math
import torch
from flashlab.core.paths import KERNELS
from flashlab.core.problem import Problem
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

spec = importlib.util.spec_from_file_location("triton_fa2", KERNELS / "peers" / "triton_fa2.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for shape, rows, keys in (("1x4x2x65x131x64", 64, 32), ("1x1x1x33x64x128", 128, 64), ("1x1x1x1x7x64", 64, 128)):
    for mask in ("full", "causal"):
        problem = Problem.parse(shape, mask=mask)
        values = make_inputs(problem)
        q, k, v = map(torch.from_numpy, values)
        out = torch.full_like(q, float("nan"))
        module.attend[(-(-problem.q_len // rows), problem.batch * problem.q_heads)](
            q, k, v, out, problem.q_heads // problem.kv_heads, problem.q_len, problem.kv_len,
            problem.head_dim**-0.5 * math.log2(math.e),
            HEAD_DIM=problem.head_dim, CAUSAL=problem.causal, BLOCK_M=rows, BLOCK_N=keys,
        )
        verdict = check(out.numpy(), None, *values, causal=problem.causal, dtype=problem.dtype)
        assert verdict.passed, (problem.label, verdict.reason)
sizes = {(size.kwargs["BLOCK_M"], size.kwargs["BLOCK_N"], size.num_warps, size.num_stages) for size in module.SIZES}
assert len(sizes) == len(module.SIZES) > 20
print("all passed")
"""


@pytest.mark.skipif(
    triton_code.missing(interpreter=True) is not None,
    reason=f"needs Triton's interpreter: {triton_code.missing(interpreter=True)}",
)
def test_plain_triton_is_right_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "all passed"), ran.stderr


def test_plain_triton_says_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Size:
        def all_kwargs(self) -> dict[str, int]:
            return {"BLOCK_M": 64, "num_warps": 4}

        def __str__(self) -> str:
            return "BLOCK_M: 64, num_warps: 4"

    class Kernel:
        best_config = Size()

        def __init__(self, name: str) -> None:
            self.name = name

        def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> None:
            calls.append(("warmup", constants))

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: calls.append((self.name, (grid({"BLOCK_M": 64}), constants)))

    module = SimpleNamespace(tuned=Kernel("tuned"), attend=Kernel("attend"))
    torch = SimpleNamespace(empty_like=lambda q: "out")
    compilation = SimpleNamespace(AsyncCompileMode=lambda pool, ignore_errors: contextlib.nullcontext())
    known = {"torch": torch, "triton.runtime._async_compile": compilation}
    monkeypatch.setattr(peers, "_triton_fa2_module", lambda: module)
    monkeypatch.setattr(importlib, "import_module", known.__getitem__)
    attend = peers.get("triton_fa2").build(GROUPED)
    assert attend.choice == ""  # type: ignore[attr-defined]
    assert [attend("q", "k", "v") for _ in range(2)] == ["out", "out"]
    assert attend.choice == "BLOCK_M: 64, num_warps: 4"  # type: ignore[attr-defined]
    constants = {"HEAD_DIM": 64, "CAUSAL": False}
    assert calls == [
        ("warmup", constants),
        ("tuned", ((1, 4), constants)),
        ("attend", ((1, 4), {**constants, "BLOCK_M": 64, "num_warps": 4})),
    ]
