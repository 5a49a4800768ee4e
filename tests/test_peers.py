"""Why a peer is not measured, in words; the peers themselves run in tests/gpu."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import Any

import pytest

from flashlab import errors, peers
from flashlab.problem import Problem

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
    assert list(peers.PEERS) == [
        "sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_math", "cublas_unfused", "flex", "fa3",
    ]  # fmt: skip
    assert all(peer.title and peer.how for peer in peers.PEERS.values())
    with pytest.raises(errors.ParameterError, match="sdpa_cudnn"):
        peers.get("cudnn")


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_missing_package_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    reason = peers.get(name).why_not(BFLOAT16)
    assert reason is not None
    assert reason.kind == "missing"
    assert name in reason.reason
    assert "pip install" in reason.reason


def test_a_missing_wheel_is_told_from_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: spec if module == "torch" else None)
    assert peers.get("sdpa").why_not(FULL) is None
    reason = peers.get("fa3").why_not(BFLOAT16)
    assert reason is not None
    assert "pip install 'fa3-fwd'" in reason.reason


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
    ],
)
def test_what_a_peer_cannot_do_is_said(name: str, problem: Problem, options: Any, words: str) -> None:
    import re

    reason = peers.get(name).why_not(problem, **options)
    assert reason is not None
    assert reason.kind == "unsupported"
    assert re.search(words, reason.reason), reason.reason


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
    ],
)
def test_what_a_peer_can_do_is_not_refused(name: str, problem: Problem, options: Any) -> None:
    assert peers.get(name).why_not(problem, **options) is None
