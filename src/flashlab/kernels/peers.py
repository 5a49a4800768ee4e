"""Libraries (peers) that are measured with the stages, in the same run and on the same inputs.

A peer takes contiguous torch tensors in its own layout (`Peer.layout`), `bhsd`: Q (batch, q_heads, q_len, head_dim), K
and V (batch, kv_heads, kv_len, head_dim), or `bshd`, length before heads; and returns O like Q. Each reports why it
does not support a problem, so that a missing one is named and never silently dropped.

Causal masks: flashlab aligns them bottom right (as FlashAttention does); torch's `is_causal` aligns top left. They
agree only for square problems; if q_len and kv_len differ, a peer gets an explicit bottom-right mask, or is
unsupported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from flashlab.core.errors import MissingPackageError, UnsupportedError, refuse_unknown
from flashlab.core.inputs import TRAINED
from flashlab.core.paths import KERNELS
from flashlab.core.problem import UNLIMITED, Feature, Precision, Problem

Attention = Callable[[Any, Any, Any], Any]
"""(q, k, v) -> out, torch tensors; enqueues on torch's current stream."""
Limits = Mapping[str, Callable[[Problem], bool]]
"""By reason, which may name fields of the `problem` in braces: whether a peer does not support a problem on any
machine."""
Layout = Literal["bhsd", "bshd"]
"""Dimension order in memory: batch, heads, sequence, head dim; or sequence before heads."""


_ROWS_WITHOUT_KEYS: Limits = {
    "its answer for a query that sees no key is not 0; it needs q_len ≤ kv_len under a causal mask": (
        lambda problem: problem.causal and problem.q_len > problem.kv_len
    )
}
_TORCH = (("torch", "flashlab[gpu]"),)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library's attention: an entry of `PEERS`."""

    name: str
    title: str
    how: str
    """The call, for display."""
    build: Callable[[Problem], Attention]
    """Builds the callable for a problem, importing what it needs. May compile then or at the first call.

    A callable that selects among implementations has an attribute `choice`, empty before the first call.
    """
    refuses: Limits = field(default_factory=lambda: _ROWS_WITHOUT_KEYS)
    packages: tuple[tuple[str, str], ...] = _TORCH
    """(module, what to `pip install` for it)."""
    min_capability: tuple[int, int] = (7, 5)
    max_capability: tuple[int, int] | None = None
    needs_memory: bool = False
    """Whether it materialises all scores."""
    max_q_len: int | None = None
    """Maximum query length at which it is measured; None: no limit."""
    layout: Layout = "bhsd"
    """Its native layout, in which it gets its inputs."""
    features: tuple[Feature, ...] = ()
    """Supported optional features."""
    writes_lse: bool | None = None
    """Whether a call under `torch.no_grad()` also writes a log-sum-exp, by its source; None if that depends on its
    choice."""
    compile_s: float = 0.0
    """Approximate compilation time for a new shape, in seconds."""
    wheel: str = ""
    """Third-party wheel used, which lacks data types that the library's source supports."""
    precision: Precision = "input"
    """Precision of its inputs. An FP8 peer is measured only if named, judged against the same computation in FP8, and
    never counts as the fastest library."""

    def limits(self, problem: Problem) -> str | None:
        """Explain why it does not support a problem, independent of the machine; None if it does."""
        if self.max_q_len is not None and problem.q_len > self.max_q_len:
            return f"it is measured with at most {self.max_q_len} query rows a sequence, got {problem.q_len}"
        for name in problem.features:
            if name not in self.features:
                return f"it is called without a {name}"
        return next((why.format(problem=problem) for why, is_so in self.refuses.items() if is_so(problem)), None)

    def wrote_lse(self, choice: str = "") -> bool | None:
        """Whether the timed call wrote a log-sum-exp, given its choice; None if unknown."""
        return _BACKENDS_WRITE_LSE.get(choice, self.writes_lse)

    def require(
        self, problem: Problem, *, compute_capability: tuple[int, int] | None = None, free_bytes: int | None = None
    ) -> None:
        """Check that this peer supports `problem` here.

        `compute_capability` and `free_bytes` (device memory) are checked if given.

        Raises:
            MissingPackageError: it is not installed.
            UnsupportedError: it does not support this problem, or not here.
        """
        for module, requirement in self.packages:
            if not _installed(module):
                raise MissingPackageError(
                    f"{self.name} needs the Python package {module}; `pip install '{requirement}'` installs it"
                )
        if compute_capability is not None:
            have = ".".join(map(str, compute_capability))
            if compute_capability < self.min_capability or (
                self.max_capability is not None and compute_capability > self.max_capability
            ):
                low = ".".join(map(str, self.min_capability))
                high = f" to {'.'.join(map(str, self.max_capability))}" if self.max_capability else " or newer"
                raise UnsupportedError(f"{self.name} needs compute capability {low}{high}; this GPU has {have}")
            if problem.dtype == "bfloat16" and compute_capability < (8, 0):
                raise UnsupportedError(f"bfloat16 needs compute capability 8.0 or newer; this GPU has {have}")
        if limit := self.limits(problem):
            raise UnsupportedError(f"{self.name}: {limit}")
        if self.needs_memory and free_bytes is not None:
            # Scores and probabilities, with one temporary, and two float32 copies of a softmax that is done in float32.
            needed_bytes = problem.batch * problem.q_heads * problem.q_len * problem.kv_len * (3 * 2 + 2 * 4)
            if needed_bytes > free_bytes:
                raise UnsupportedError(
                    f"{self.name} holds all scores in memory: about {needed_bytes / 1e9:.1f} GB for {problem.label}; "
                    f"{free_bytes / 1e9:.1f} GB are free"
                )


def in_layout(layout: Layout, *tensors: Any) -> tuple[Any, ...]:
    """Convert contiguous torch tensors (batch, heads, length, head_dim) to the layout of a peer.

    Returns the tensors themselves for `bhsd`, copies for `bshd`.
    """
    return tensors if layout == "bhsd" else tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


def bhsd_view(layout: Layout, out: Any) -> Any:
    """View a peer's output as (batch, heads, length, head_dim)."""
    return out if layout == "bhsd" else out.transpose(1, 2)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that `module` is in
        return False


def _bottom_right_mask(problem: Problem) -> Any:
    """Bottom-right causal mask, bool (q_len, kv_len) on the current GPU; True if visible."""
    torch = importlib.import_module("torch")
    ones = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool, device="cuda")
    return ones.tril(problem.kv_len - problem.q_len)


# --- torch ------------------------------------------------------------------------------------------------------------


_BACKENDS_WRITE_LSE: Mapping[str, bool] = {
    "CUDNN_ATTENTION": False,
    "FLASH_ATTENTION": True,
    "EFFICIENT_ATTENTION": False,
    "MATH": False,
}
"""Backends of torch without gradients (aten/src/ATen/native/transformers/attention.cpp): cuDNN and the
memory-efficient kernel are called with `compute_logsumexp` false, flash has no such switch and allocates it always."""


def _sdpa_arguments(problem: Problem) -> dict[str, Any]:
    square = problem.q_len == problem.kv_len
    return {
        "attn_mask": _bottom_right_mask(problem) if problem.causal and not square else None,
        "is_causal": problem.causal and square,
        "enable_gqa": problem.q_heads != problem.kv_heads,
    }


class _DefaultSdpa:
    """torch's SDPA with its own choice of backend, queried at the first call."""

    def __init__(self, problem: Problem) -> None:
        self._torch = importlib.import_module("torch")
        self._arguments = _sdpa_arguments(problem)
        self.choice = ""
        """Name of the backend; empty before the first call."""

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        if not self.choice:
            backends = importlib.import_module("torch.nn.attention").SDPBackend
            self.choice = backends(self._torch._fused_sdp_choice(q, k, v, **self._arguments)).name
        return self._torch.nn.functional.scaled_dot_product_attention(q, k, v, **self._arguments)


def _pinned_sdpa(backend: str, **others: Any) -> Peer:
    """Build a peer for torch's SDPA with a fixed backend; `others` are fields of `Peer`."""

    def build(problem: Problem) -> Attention:
        attend = importlib.import_module("torch").nn.functional.scaled_dot_product_attention
        kernel = importlib.import_module("torch.nn.attention")
        chosen, arguments = getattr(kernel.SDPBackend, backend), _sdpa_arguments(problem)

        def pinned(q: Any, k: Any, v: Any) -> Any:
            with kernel.sdpa_kernel(chosen):
                return attend(q, k, v, **arguments)

        return pinned

    return Peer(how=f"SDPBackend.{backend}", writes_lse=_BACKENDS_WRITE_LSE[backend], build=build, **others)


def _causal_of_other_lengths(problem: Problem) -> bool:
    return problem.causal and problem.q_len != problem.kv_len


def _cublas_unfused(problem: Problem) -> Attention:
    """Two GEMMs with a softmax between them."""
    torch = importlib.import_module("torch")
    mask = _bottom_right_mask(problem) if problem.causal else None
    scale = problem.head_dim**-0.5
    group = problem.q_heads // problem.kv_heads

    def attend(q: Any, k: Any, v: Any) -> Any:
        if group > 1:
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
        scores = torch.matmul(q * scale, k.transpose(-2, -1))
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1), v)

    return attend


# --- compilers --------------------------------------------------------------------------------------------------------


_TRITON = (*_TORCH, ("triton", "flashlab[gpu]"))


def _flex(problem: Problem) -> Attention:
    """torch's FlexAttention."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    # Every problem is a compilation of its own; past its limit of them dynamo would run the unfused fallback.
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    mask = cap = None
    if problem.causal or "window" in problem.features:
        shift = problem.kv_len - problem.q_len
        left, right = problem.reach

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            before = query + shift + right >= key
            return before & (key >= query + shift - left) if "window" in problem.features else before

        mask = flex.create_block_mask(sees, None, None, problem.q_len, problem.kv_len, device="cuda")
    if problem.softcap:

        def cap(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return problem.softcap * torch.tanh(score / problem.softcap)

    grouped = problem.q_heads != problem.kv_heads

    def attend(q: Any, k: Any, v: Any) -> Any:
        return compiled(q, k, v, score_mod=cap, block_mask=mask, enable_gqa=grouped)

    return attend


class _TritonFA2:
    """kernels/peers/triton_fa2.py on one problem. The first call autotunes, for some seconds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sizes: Mapping[str, Any] | None = None
        self.choice = ""
        """Tile sizes, for display; empty before the first call."""

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        problem = self._problem
        kernel = _triton_fa2_module()
        out = importlib.import_module("torch").empty_like(q)
        group, scale_log2 = problem.q_heads // problem.kv_heads, problem.head_dim**-0.5 * math.log2(math.e)
        arguments = (q, k, v, out, group, problem.q_len, problem.kv_len, scale_log2)
        constants = {"HEAD_DIM": problem.head_dim, "CAUSAL": problem.causal}
        if self._sizes is None:
            self._compile(kernel.tuned, arguments, constants)
            kernel.tuned[self._grid](*arguments, **constants)
            self._sizes, self.choice = kernel.tuned.best_config.all_kwargs(), str(kernel.tuned.best_config)
        else:
            kernel.attend[self._grid](*arguments, **constants, **self._sizes)
        return out

    def _grid(self, chosen: Mapping[str, Any]) -> tuple[int, int]:
        return -(-self._problem.q_len // chosen["BLOCK_M"]), self._problem.batch * self._problem.q_heads

    def _compile(self, tuned: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
        """Compile all configurations in parallel, since the autotuner would compile them sequentially."""
        compilation = importlib.import_module("triton.runtime._async_compile")
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            compilation.AsyncCompileMode(pool, ignore_errors=True),
        ):
            tuned.warmup(*arguments, grid=self._grid, **constants)


@cache
def _triton_fa2_module() -> Any:
    """Import the file as a module, once per process, so that its caches persist."""
    spec = importlib.util.spec_from_file_location("flashlab_triton_fa2", KERNELS / "peers" / "triton_fa2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- flash-attention --------------------------------------------------------------------------------------------------


BESIDE = "sdpa"
"""The library with which selections are compared: torch's SDPA with its own choice of kernels."""
FEW_ROWS = 64
"""Query rows below which libraries may split keys (decoding)."""


_FA3, _FA4 = "fa3_fwd_interface", "flash_attn.cute"


def _flash_attention(module: str, unlimited: int | None, problem: Problem) -> Attention:
    """Build a call of a flash-attention package; `unlimited` is its value for a window side without limit."""
    attention = importlib.import_module(module).flash_attn_func
    # It splits no keys by default; 0 leaves the number of splits to it, as its own function for a cache does.
    can_split = "num_splits" in inspect.signature(attention).parameters
    options: dict[str, Any] = {"num_splits": 0} if can_split and problem.q_len < FEW_ROWS else {}
    if "window" in problem.features:
        sides = (problem.window[0], 0) if problem.causal else problem.window
        options["window_size"] = tuple(unlimited if side == UNLIMITED else side for side in sides)
    if "softcap" in problem.features:
        options["softcap"] = problem.softcap

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = attention(q, k, v, causal=problem.causal, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


class _Fp8:
    """FlashAttention-3 in FP8 on one problem and set of tensors, which the first call quantises."""

    def __init__(self, attention: Callable[..., Any], problem: Problem) -> None:
        self._attention, self._problem = attention, problem
        self._given: dict[str, Any] = {}
        self._stored: dict[str, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        given = {"q": q, "k": k, "v": v}
        if any(self._given.get(name) is not x for name, x in given.items()):
            self._given = given
            for name, x in given.items():
                self._stored[name], self._stored[f"{name}_descale"] = self._rounded(x)
        out = self._attention(**self._stored, causal=self._problem.causal)
        return out[0] if isinstance(out, tuple) else out

    def _rounded(self, x: Any) -> tuple[Any, Any]:
        """Quantise (batch, length, heads, head_dim) to e4m3 with scales (batch, kv_heads); the maximum becomes 448."""
        torch = importlib.import_module("torch")
        by_head = x.float().unflatten(2, (self._problem.kv_heads, -1))
        scale = by_head.abs().amax(dim=(1, 3, 4)).clamp(min=torch.finfo(torch.float32).tiny) / 448
        return (by_head / scale[:, None, :, None, None]).flatten(2, 3).to(torch.float8_e4m3fn), scale


# --- serving ----------------------------------------------------------------------------------------------------------


_PAGE = 16
"""Keys per page, the default of vLLM and SGLang."""


class FlashInferPages:
    """FlashInfer's decoding over a paged KV cache, on CUDA or tensor cores, whichever the first call finds faster.

    Planning a call (how keys are split) is done once and not timed, as a model plans once for all layers.
    """

    def __init__(self, problem: Problem, ends: Any, order: Any, last: Any) -> None:
        """Plan for the heads, head dim and dtype of `problem`.

        Args:
            ends: int32 (batch + 1,), boundaries of the sequences in `order`.
            order: int32, concatenated page numbers of all sequences.
            last: int32 (batch,), number of keys in the last page of each sequence.
        """
        self._torch = torch = importlib.import_module("torch")
        flashinfer = importlib.import_module("flashinfer")
        dtype = getattr(torch, problem.dtype)

        def planned(use_tensor_cores: bool) -> Any:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=use_tensor_cores)
            wrapper.plan(
                *(torch.as_tensor(x, dtype=torch.int32, device="cuda") for x in (ends, order, last)),
                *(problem.q_heads, problem.kv_heads, problem.head_dim, _PAGE),
                q_data_type=dtype,
                kv_data_type=dtype,
            )
            return wrapper

        self._ways = {"tensor cores": planned(True)}
        if problem.q_heads // problem.kv_heads in _GROUPS_ON_CUDA_CORES:
            self._ways["CUDA cores"] = planned(False)
        self.choice = ""
        """The way, for people; empty before the first call."""

    def __call__(self, q: Any, cache: tuple[Any, Any]) -> Any:
        """Compute the output for q (batch, q_heads, head_dim) and page pools (pages, page size, kv_heads, head_dim)."""
        if not self.choice:
            self.choice = min(self._ways, key=lambda way: self._gpu_ms(self._ways[way], q, cache))
        return self._ways[self.choice].run(q, cache)

    def _gpu_ms(self, wrapper: Any, rows: Any, cache: tuple[Any, Any]) -> float:
        """GPU time of ten calls, queued behind a spin, so that host time is excluded."""
        cuda = self._torch.cuda
        wrapper.run(rows, cache)
        began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(_WAIT_CYCLES)
        began.record()
        for _ in range(10):
            wrapper.run(rows, cache)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))


class _FlashInfer:
    """FlashInfer on one problem, whose contiguous cache is passed as consecutive pages."""

    def __init__(self, problem: Problem) -> None:
        pages = problem.kv_len // _PAGE
        numbers = importlib.import_module("torch").arange(problem.batch * pages + 1)
        self._cache = (-1, _PAGE, problem.kv_heads, problem.head_dim)
        self._run = FlashInferPages(problem, numbers[::pages], numbers[:-1], [_PAGE] * problem.batch)

    @property
    def choice(self) -> str:
        """The way, for people; empty before the first call."""
        return self._run.choice

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self._run(q.squeeze(1), (k.view(self._cache), v.view(self._cache))).unsqueeze(1)


_GROUPS_ON_CUDA_CORES = (1, 2, 3, 4, 8)
"""Query heads per K/V head that FlashInfer 0.5.3 compiles for: `DISPATCH_GQA_GROUP_SIZE` in its utils.cuh."""
_WAIT_CYCLES = 20_000_000
"""About ten milliseconds, in which the host enqueues all calls."""
_WORKSPACE_BYTES = 128 << 20
"""Size recommended by FlashInfer's documentation."""


# --- all of them ------------------------------------------------------------------------------------------------------


_FLASH_ATTENTION_3 = Peer(
    name="fa3",
    title="FlashAttention-3",
    how=f"{_FA3}.flash_attn_func",
    build=partial(_flash_attention, _FA3, UNLIMITED),
    refuses={
        "the wheel (fa3-fwd) lacks {problem.dtype}, which FlashAttention-3's source has; it has bfloat16": (
            lambda problem: problem.dtype != "bfloat16"
        )
    },
    packages=(*_TORCH, (_FA3, "fa3-fwd")),
    wheel="fa3-fwd",
    layout="bshd",
    features=("window", "softcap"),
    writes_lse=True,  # allocates and fills one in every call
    min_capability=(9, 0),
    max_capability=(9, 0),
)
PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="sdpa",
            title="PyTorch SDPA (its own choice)",
            how="torch.nn.functional.scaled_dot_product_attention",
            build=_DefaultSdpa,
        ),
        _pinned_sdpa(
            "CUDNN_ATTENTION",
            name="sdpa_cudnn",
            title="cuDNN (SDPA)",
            refuses={
                "its causal mask is aligned top left, flashlab's bottom right; they agree where q_len equals kv_len": (
                    _causal_of_other_lengths
                )
            },
            min_capability=(8, 0),
        ),
        _pinned_sdpa(
            "FLASH_ATTENTION",
            name="sdpa_flash",
            title="FlashAttention-2 (SDPA)",
            refuses={
                "torch's flash kernel takes no explicit mask, and its own causal mask is aligned top left": (
                    _causal_of_other_lengths
                )
            },
            min_capability=(8, 0),
        ),
        _pinned_sdpa(
            "EFFICIENT_ATTENTION",
            name="sdpa_efficient",
            title="memory-efficient (SDPA)",
            refuses={
                "torch's memory-efficient kernel takes no grouped-query heads": (
                    lambda problem: problem.q_heads != problem.kv_heads
                ),
                **_ROWS_WITHOUT_KEYS,
            },
        ),
        _pinned_sdpa("MATH", name="sdpa_math", title="unfused (SDPA math)", needs_memory=True),
        Peer(
            name="cublas_unfused",
            title="cuBLAS, unfused",
            how="torch.matmul, softmax, torch.matmul",
            build=_cublas_unfused,
            writes_lse=False,
            needs_memory=True,
        ),
        Peer(
            name="flex",
            title="FlexAttention",
            how="torch.compile(flex_attention, dynamic=False)",
            build=_flex,
            packages=_TRITON,
            compile_s=5.0,
            features=("window", "softcap"),
            writes_lse=False,  # its OUTPUT_LOGSUMEXP is torch.is_grad_enabled()
            min_capability=(8, 0),
        ),
        Peer(
            name="triton_fa2",
            title="FlashAttention-2 in plain Triton",
            how="kernels/peers/triton_fa2.py, by triton.autotune",
            build=_TritonFA2,
            refuses={
                "Triton's tiles want a head dim that is a power of two": (
                    lambda problem: problem.head_dim.bit_count() != 1
                ),
                **_ROWS_WITHOUT_KEYS,
            },
            packages=_TRITON,
            compile_s=5.0,
            writes_lse=False,
            min_capability=(8, 0),
        ),
        _FLASH_ATTENTION_3,
        replace(
            _FLASH_ATTENTION_3,
            name="fa3_fp8",
            title="FlashAttention-3 in FP8",
            build=lambda problem: _Fp8(importlib.import_module(_FA3).flash_attn_func, problem),
            refuses={
                f"its inputs are rounded once, and those of the kind {TRAINED} change from layer to layer": (
                    lambda problem: problem.inputs == TRAINED
                ),
                f"its inputs are rounded once, and calls of fewer than {FEW_ROWS} query rows rotate over several": (
                    lambda problem: problem.q_len < FEW_ROWS
                ),
                **_FLASH_ATTENTION_3.refuses,
            },
            precision="e4m3_scaled",  # with a scale a K/V head, rounded before it is called
        ),
        Peer(
            name="fa4",
            title="FlashAttention-4 (CuTe DSL)",
            how=f"{_FA4}.flash_attn_func",
            build=partial(_flash_attention, _FA4, None),
            refuses={},
            packages=(*_TORCH, (_FA4, "flash-attn-4")),
            layout="bshd",
            features=("window", "softcap"),
            compile_s=5.0,  # at its first call of a head dim, type and mask
            writes_lse=False,  # allocates one where a gradient or return_lse is wanted
            min_capability=(8, 0),
        ),
        Peer(
            name="flashinfer",
            title="FlashInfer",
            how="flashinfer.BatchDecodeWithPagedKVCacheWrapper",
            build=_FlashInfer,
            refuses={
                f"it is given whole pages of {_PAGE} keys, got {{problem.kv_len}} keys": (
                    lambda problem: problem.kv_len % _PAGE != 0
                ),
                # `DISPATCH_HEAD_DIM` in its utils.cuh; with others its merge of split keys fails.
                "it adds up split keys at head dims 64, 128 and 256, got {problem.head_dim}": (
                    lambda problem: problem.head_dim not in (64, 128, 256)
                ),
            },
            # Both are imported; of its other requirements it needs none for this.
            packages=(*_TORCH, ("flashinfer", "flashinfer-python"), ("tvm_ffi", "apache-tvm-ffi")),
            layout="bshd",
            compile_s=60.0,
            writes_lse=False,  # allocates one where return_lse is True
            min_capability=(8, 0),
            max_q_len=1,
        ),
    )
}


def default_names(problems: Sequence[Problem]) -> list[str]:
    """Libraries measured on problems by default: none in FP8, and none limited to fewer query rows."""
    rows = min((problem.q_len for problem in problems), default=1)
    return [name for name in PEERS if is_rival(name) and (PEERS[name].max_q_len or rows) >= rows]


def is_rival(name: str) -> bool:
    """Whether it may count as the fastest library, i.e. computes in the dtype of its inputs."""
    return name not in PEERS or PEERS[name].precision == "input"


DISTRIBUTIONS = tuple(
    dict.fromkeys(
        requirement
        for peer in PEERS.values()
        for _, requirement in peer.packages
        if not requirement.startswith("flashlab[")
    )
)
"""Packages installed only for libraries; records name their versions."""


def get(name: str) -> Peer:
    """Look up a peer by name.

    Raises:
        ParameterError: there is none.
    """
    refuse_unknown("peer", PEERS, name)
    return PEERS[name]
