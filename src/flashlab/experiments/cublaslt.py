"""Attention in three passes: Q·K by cuBLASLt, a softmax kernel, P·V by cuBLASLt; between them, scores in global memory.

cuBLASLt is called through ctypes, because neither torch nor CuPy lets its algorithm be chosen. Its matrices are
column-major, so that everything here is transposed: Sᵀ = K · Qᵀ and Oᵀ = Vᵀ · Pᵀ, on the tensors as they lie.

A GEMM's batch is a run of heads whose addresses are evenly spaced, in Q, K, V and O alike: all of them where tensors
are contiguous, those that share keys under grouped-query attention, one where nothing is regular.

The stage's tunables say how: `HEADS_A_CALL`, `SETUP_EACH_CALL`, `SCORES_FP32`, `SPLIT_K`. On a CPU, NumPy takes
cuBLASLt's place (`emulated_passes`), and the softmax is the kernel's own code.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlab.core.errors import LaunchError, MissingPackageError, UnsupportedError
from flashlab.core.problem import BYTES_PER_ELEMENT, Problem
from flashlab.kernels.text import fields
from flashlab.run import emulator, gpu
from flashlab.run.arguments import AttentionParams
from flashlab.run.arrays import DeviceArray
from flashlab.verify.oracle import pack, to_float

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashlab.run.attention import EmulatedCall
    from flashlab.run.recipes import Recipe

WORKSPACE_BYTES = 32 << 20
"""What cuBLASLt may use besides its operands: its documentation's advice for Hopper."""
PITCH = 8
"""Rows of scores are padded to a multiple of so many elements: the softmax reads 8 at once."""
_MAX_HEADS = 65535
"""A CUDA grid's limit in its second dimension."""
_MAX_ALIGNMENT_BYTES = 256

# cuda_runtime's cudaDataType_t, cublasLt.h's enumerations.
_CUDA_R_32F, _CUDA_R_16F, _CUDA_R_16BF = 0, 2, 14
_DATA_TYPES: Mapping[str, int] = {"float16": _CUDA_R_16F, "bfloat16": _CUDA_R_16BF, "float32": _CUDA_R_32F}
_COMPUTE_32F = 68
_OP_N, _OP_T = 0, 1
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_OFFSET = 5, 6
_PREF_WORKSPACE = 1
_PREF_ALIGNMENTS = (5, 6, 7, 8)
_CONFIG_SPLIT_K, _CONFIG_REDUCTION = 2, 3
_REDUCTIONS = (2, 4, 1)
"""How the parts of a split sum meet: in FP32 in the workspace, in the output's type, in place."""
_MANY_ALGORITHMS = 64
"""How many are asked for when one that can be split is looked for."""


class SoftmaxParams(ctypes.Structure):
    """kernels/dead_ends/cublaslt_unfused.cu, `SoftmaxParams`."""

    _fields_ = fields("dead_ends/cublaslt_unfused.cu", "SoftmaxParams")


class _Algorithm(ctypes.Structure):
    """cublasLt.h, `cublasLtMatmulAlgo_t`."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLt.h, `cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


# --- which heads go together ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of Q that one call multiplies, evenly spaced in every tensor."""

    first: int
    """Index of the first, counted through batch and heads."""
    count: int
    pointers: Mapping[str, int]
    """Address of the first head's first row in Q, K, V and O."""
    strides: Mapping[str, int]
    """Elements from one head to the next; 0 where all read the same one."""


def groups(problem: Problem, arrays: Mapping[str, DeviceArray], most: int) -> tuple[Heads, ...]:
    """The problem's heads in as few calls as their addresses allow, of `most` heads each at most (0: any number)."""
    per_key_head = problem.q_heads // problem.kv_heads

    def address(name: str, index: int) -> int:
        array = arrays[name]
        batch, head = divmod(index, problem.q_heads)
        own = head if name in "QO" else head // per_key_head
        return array.pointer + BYTES_PER_ELEMENT * (batch * array.strides[0] + own * array.strides[1])

    total = problem.batch * problem.q_heads
    limit = min(most or total, _MAX_HEADS)
    calls: list[Heads] = []
    first = 0
    while first < total:
        pointers = {name: address(name, first) for name in arrays}
        count = 1
        steps: dict[str, int] = dict.fromkeys(arrays, 0)
        while first + count < total and count < limit:
            following = {name: address(name, first + count) - address(name, first + count - 1) for name in arrays}
            if count > 1 and following != steps:
                break
            steps = following
            count += 1
        strides = {name: step // BYTES_PER_ELEMENT for name, step in steps.items()}
        calls.append(Heads(first=first, count=count, pointers=pointers, strides=strides))
        first += count
    return tuple(calls)


# --- GEMMs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix, and how many of it lie how far apart."""

    dtype: str
    rows: int
    columns: int
    pitch: int
    """Elements from a column to the next."""
    stride: int
    """Elements from a matrix to the next."""
    alignment_bytes: int
    """That every column of every one starts on."""


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """d = alpha · op(a) · b, `count` times; FP32 sums. op transposes where `transpose_a`."""

    a: Matrix
    b: Matrix
    d: Matrix
    transpose_a: bool
    alpha: float
    count: int
    split_k: int = 1
    """Parts that the sum is split into."""


def gemms(
    problem: Problem,
    arrays: Mapping[str, DeviceArray],
    heads: Heads,
    *,
    scale_log2: float,
    parameters: Mapping[str, int],
) -> tuple[Gemm, Gemm]:
    """Q·K and P·V of some heads. The scores come out scaled, in units of log2."""
    pitch = pitch_of(problem)

    def matrix(rows: int, columns: int, pitch: int, stride: int, pointer: int = 0, *, wide: bool = False) -> Matrix:
        dtype, itemsize = ("float32", 4) if wide else (problem.dtype, BYTES_PER_ELEMENT)
        alignment = math.gcd(pointer or _MAX_ALIGNMENT_BYTES, pitch * itemsize, stride * itemsize, _MAX_ALIGNMENT_BYTES)
        return Matrix(dtype, rows, columns, pitch, stride, alignment)

    def of_tensor(name: str, length: int) -> Matrix:
        row_stride = arrays[name].strides[2] if length > 1 else problem.head_dim
        return matrix(problem.head_dim, length, row_stride, heads.strides[name], heads.pointers[name])

    of_scores = (problem.kv_len, problem.q_len, pitch, problem.q_len * pitch)
    q, out = of_tensor("Q", problem.q_len), of_tensor("O", problem.q_len)
    k, v = of_tensor("K", problem.kv_len), of_tensor("V", problem.kv_len)
    scores, probs = matrix(*of_scores, wide=bool(parameters["SCORES_FP32"])), matrix(*of_scores)
    return (
        Gemm(a=k, b=q, d=scores, transpose_a=True, alpha=scale_log2, count=heads.count),
        Gemm(
            a=v, b=probs, d=out, transpose_a=False, alpha=1.0, count=heads.count, split_k=max(1, parameters["SPLIT_K"])
        ),
    )


def pitch_of(problem: Problem) -> int:
    """Elements from a row of scores to the next."""
    return -(-problem.kv_len // PITCH) * PITCH


@cache
def _library() -> ctypes.CDLL:
    """cuBLASLt.

    Raises:
        MissingPackageError: it is not there.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        loaded = pathfinder.load_nvidia_dynamic_lib("cublasLt")
        library = ctypes.CDLL(loaded.abs_path or "libcublasLt.so.13")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingPackageError(
            f"wanted the library cuBLASLt, got: {str(error).splitlines()[0]}. "
            "`pip install 'nvidia-cublas>=13,<14'` installs it; so does torch."
        ) from error
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    return library


def _call(function: str, *arguments: Any) -> None:
    """Call cuBLASLt. Pointers must be ctypes values: a bare Python integer would be cut to 32 bits.

    Raises:
        LaunchError: it returned an error.
    """
    status = getattr(_library(), function)(*arguments)
    if status:
        text = _library().cublasLtGetStatusString(status).decode()
        raise LaunchError(f"{function}: {text} ({status})")


def _set(function: str, target: Any, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
    _call(function, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Matmul:
    """A GEMM described to cuBLASLt on the current device, with an algorithm chosen and a handle of its own."""

    def __init__(self, gemm: Gemm) -> None:
        with ExitStack() as self._made:
            self._handle = self._new("")
            self._describe(gemm)
            self.algorithm = self._choose(gemm)
            self.close = self._made.pop_all().close
            """Gives its descriptions and its handle back."""

    def _new(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """What cuBLASLt creates of a kind, and hands out through its first argument."""
        created = ctypes.c_void_p()
        _call(f"cublasLt{kind}Create", ctypes.byref(created), *arguments)
        self._made.callback(_call, f"cublasLt{kind}Destroy", created)
        return created

    def _layout(self, matrix: Matrix, count: int) -> ctypes.c_void_p:
        shape = (ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.pitch))
        layout = self._new("MatrixLayout", _DATA_TYPES[matrix.dtype], *shape)
        if count > 1:
            set_layout = "cublasLtMatrixLayoutSetAttribute"
            _set(set_layout, layout, _LAYOUT_BATCH_COUNT, ctypes.c_int32(count))
            _set(set_layout, layout, _LAYOUT_BATCH_OFFSET, ctypes.c_int64(matrix.stride))
        return layout

    def _describe(self, gemm: Gemm) -> None:
        self._alpha, self._beta = ctypes.c_float(gemm.alpha), ctypes.c_float(0.0)
        self._operation = self._new("MatmulDesc", _COMPUTE_32F, _CUDA_R_32F)
        for attribute, transposed in ((_DESC_TRANSA, gemm.transpose_a), (_DESC_TRANSB, False)):
            choice = ctypes.c_int32(_OP_T if transposed else _OP_N)
            _set("cublasLtMatmulDescSetAttribute", self._operation, attribute, choice)
        self._a, self._b, self._d = (self._layout(m, gemm.count) for m in (gemm.a, gemm.b, gemm.d))
        self._preference = self._new("MatmulPreference")
        set_preference = "cublasLtMatmulPreferenceSetAttribute"
        _set(set_preference, self._preference, _PREF_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        for attribute, matrix in zip(_PREF_ALIGNMENTS, (gemm.a, gemm.b, gemm.d, gemm.d), strict=True):
            _set(set_preference, self._preference, attribute, ctypes.c_uint32(matrix.alignment_bytes))

    def _layouts(self) -> tuple[ctypes.c_void_p, ...]:
        return (self._operation, self._a, self._b, self._d, self._d)

    def _choose(self, gemm: Gemm) -> _Algorithm:
        limit = _MANY_ALGORITHMS if gemm.split_k > 1 else 1
        heuristics, count = (_Heuristic * limit)(), ctypes.c_int(0)
        operands = ", ".join(
            f"{name} {m.rows}x{m.columns} {m.dtype}, columns {m.pitch} apart, aligned to {m.alignment_bytes} bytes"
            for name, m in (("a", gemm.a), ("b", gemm.b), ("d", gemm.d))
        )
        split = f", its sum split in {gemm.split_k}" if gemm.split_k > 1 else ""
        none = UnsupportedError(f"cuBLASLt has no algorithm for a GEMM of {operands}{split}")
        try:
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                *self._layouts(),
                self._preference,
                limit,
                heuristics,
                ctypes.byref(count),
            )
        except LaunchError as error:
            raise none from error
        offered: list[_Algorithm] = [
            heuristic.algorithm for heuristic in heuristics[: count.value] if heuristic.state == 0
        ]
        if gemm.split_k == 1 and offered:
            return offered[0]
        for algorithm in offered:
            if self._split(algorithm, gemm.split_k):
                return algorithm
        raise none

    def _split(self, algorithm: _Algorithm, parts: int) -> bool:
        """Whether an algorithm can split the sum; then it is set to."""
        configure, pointer = "cublasLtMatmulAlgoConfigSetAttribute", ctypes.byref(algorithm)
        for reduction in _REDUCTIONS:
            checked = _Heuristic()
            try:
                _set(configure, pointer, _CONFIG_SPLIT_K, ctypes.c_int32(parts))
                _set(configure, pointer, _CONFIG_REDUCTION, ctypes.c_uint32(reduction))
                _call("cublasLtMatmulAlgoCheck", self._handle, *self._layouts(), pointer, ctypes.byref(checked))
            except LaunchError:
                continue  # Not this one: cuBLASLt says so by an error.
            if checked.workspace_bytes <= WORKSPACE_BYTES:
                return True
        return False

    def __call__(self, a: int, b: int, d: int, workspace: int, stream: int) -> None:
        """Enqueue it on addresses on the device."""
        out = ctypes.c_void_p(d)
        _call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            ctypes.byref(self._alpha),
            ctypes.c_void_p(a),
            self._a,
            ctypes.c_void_p(b),
            self._b,
            ctypes.byref(self._beta),
            out,
            self._d,
            out,
            self._d,
            ctypes.byref(self.algorithm),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )


@contextmanager
def _set_up(gemm: Gemm) -> Iterator[tuple[Matmul, int]]:
    """A GEMM with a handle, descriptions and workspace of its own, and the workspace's address."""
    with closing(Matmul(gemm)) as matmul:
        workspace = int(gpu.call("cuMemAlloc", WORKSPACE_BYTES))
        try:
            yield matmul, workspace
        finally:
            gpu.call("cuMemFree", workspace)  # waits until the device is done


# --- the three passes, on a GPU ---------------------------------------------------------------------------------------


class _Passes:
    """All three passes over all heads, ready: calling it enqueues them."""

    def __init__(self, recipe: Recipe, arrays: Mapping[str, DeviceArray], params: AttentionParams, stream: int) -> None:
        """Choose algorithms and allocate memory; see `attention._runner`.

        Raises:
            UnsupportedError: the scores do not fit in memory, or cuBLASLt has no algorithm for a GEMM.
            MissingPackageError: no cuBLASLt.
            LaunchError: cuBLASLt or the driver refuses.
        """
        problem, device, shape = recipe.plan.problem, recipe.plan.device, recipe.shape
        parameters = recipe.code.cubin.parameters
        calls = groups(problem, arrays, parameters["HEADS_A_CALL"])
        most = max(heads.count for heads in calls)
        rows = most * problem.q_len * pitch_of(problem)
        probs_bytes, wide_bytes = rows * BYTES_PER_ELEMENT, rows * 4 if parameters["SCORES_FP32"] else 0
        scores_bytes = probs_bytes + wide_bytes
        free = gpu.memory_free_bytes(device)
        if scores_bytes + WORKSPACE_BYTES > free:
            raise UnsupportedError(
                f"wanted {scores_bytes / 1e9:.1f} GB for the scores of {most} heads of {problem.label}, got a GPU with "
                f"{free / 1e9:.1f} GB free. Fewer HEADS_A_CALL need less."
            )
        self._probs = gpu.Zeroed(device, probs_bytes, stream)
        self._wide = gpu.Zeroed(device, wide_bytes, stream) if wide_bytes else None
        self._scores = (self._wide or self._probs).pointer
        self._stream = stream
        self._steps: list[tuple[Heads, Gemm, gpu.Launch, Gemm]] = []
        for heads in calls:
            qk, pv = gemms(problem, arrays, heads, scale_log2=params.scale_log2, parameters=parameters)
            lse = None if params.LSE is None else params.LSE + 4 * heads.first * problem.q_len
            of_softmax = SoftmaxParams(
                self._scores, self._probs.pointer, lse, pitch_of(problem), problem.q_len, problem.kv_len
            )
            softmax = gpu.Launch(
                recipe.code.function,
                grid=(-(-problem.q_len // shape.tile_q), heads.count, 1),
                block=(shape.threads, 1, 1),
                smem_bytes=shape.smem_bytes,
                params=[of_softmax],
                stream=stream,
            )
            self._steps.append((heads, qk, softmax, pv))
        wanted_gemms = {gemm for _, qk, _, pv in self._steps for gemm in (qk, pv)}
        self._matmuls: dict[Gemm, Matmul] = {}
        self._workspace: gpu.Zeroed | None = None
        with gpu.context(device):
            if parameters["SETUP_EACH_CALL"]:
                for gemm in wanted_gemms:
                    with _set_up(gemm):  # so that a GEMM that cannot be done is refused now
                        pass
            else:
                self._workspace = gpu.Zeroed(device, WORKSPACE_BYTES, stream)
                for gemm in wanted_gemms:
                    self._matmuls[gemm] = Matmul(gemm)

    def _multiply(self, gemm: Gemm, a: int, b: int, d: int) -> None:
        if self._workspace is None:
            with _set_up(gemm) as (matmul, workspace):
                matmul(a, b, d, workspace, self._stream)
        else:
            self._matmuls[gemm](a, b, d, self._workspace.pointer, self._stream)

    def __call__(self) -> None:
        """Enqueue everything, a group of heads after the other. The device's context must be current."""
        for heads, qk, softmax, pv in self._steps:
            pointers = heads.pointers
            self._multiply(qk, pointers["K"], pointers["Q"], self._scores)
            softmax()
            self._multiply(pv, pointers["V"], self._probs.pointer, pointers["O"])

    def __del__(self) -> None:
        # At exit, or after a kernel broke the context, the process's end frees it; there is nobody to tell.
        with suppress(Exception):
            for matmul in self._matmuls.values():
                matmul.close()


passes = _Passes
"""For `attention._runner`."""


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def emulated_passes(run: EmulatedCall) -> list[emulator.Structure]:
    """The argument of the softmax kernel between NumPy's GEMMs: see `attention._runner`."""
    problem, parameters = run.planned.problem, run.kernel.parameters
    q, k, v = (to_float(run.views[name].owner) for name in "QKV")
    group = problem.q_heads // problem.kv_heads
    heads, pitch = problem.batch * problem.q_heads, pitch_of(problem)
    scores = np.full((heads, problem.q_len, pitch), np.nan, dtype=np.float32)
    scaled = (q @ np.repeat(k, group, axis=1).swapaxes(-1, -2)) * np.float32(run.params.scale_log2)
    probs = pack(scores, problem.dtype)
    scores[..., : problem.kv_len] = scaled.reshape(heads, problem.q_len, problem.kv_len)
    pointers = dict(run.pointers)
    if parameters["SCORES_FP32"]:
        pointers["scores"] = emulator.Pointer(array=scores, access="r", name="scores")
    else:
        probs = pack(scores, problem.dtype)
    pointers["probs"] = emulator.Pointer(array=probs, access="rw", name="probs")
    run.grid = (-(-problem.q_len // run.shape.tile_q), heads, 1)

    def multiply() -> None:
        """What the kernel made of the scores by V, into O."""
        weights = to_float(probs[..., : problem.kv_len]).reshape(problem.batch, problem.q_heads, problem.q_len, -1)
        out = pack(weights @ np.repeat(v, group, axis=1), problem.dtype)
        run.views["O"].owner.view(out.dtype)[...] = out

    run.after = multiply
    softmax = SoftmaxParams(None, None, None, pitch, problem.q_len, problem.kv_len)
    return [emulator.Structure(value=softmax, pointers=pointers)]
