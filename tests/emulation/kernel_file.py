"""A kernel file that says how to run it: its first lines name the launch, the parameters and the result.

    // launch: grid=2x3 block=128 smem=4096 cluster=2       smem (dynamic, bytes) and cluster may be left out
    // parameter: K f16[64,64] normal                       an array, passed as a pointer: type, shape, content
    // parameter: out f32[64] written                       an array that the kernel writes
    // parameter: num_tiles int 4                           a number
    // parameter: K_map map K f16[64,64] normal box=8x64    a tensor map of an array; swizzle=128 may follow
    // expect: out = K.sum(0)                               NumPy, with the arrays' contents before the launch
    // tolerance: 1e-5                                      relative to the largest, or `2 ulp`; left out: the same bits

Contents: `normal` (random, of standard deviation 1), `range=8` (integers from 0 to 7), `bits` (random bits), `all`
(every value of 16 bits in turn), `grid=-150:150` (evenly spaced), `zeros` (read and written), `written` (0xff
everywhere, which is NaN). `stride=8` puts that many elements from one row's start to the next. An array is drawn from a
seed of its own name, the same on every machine.

The same description runs a file on the CPU emulation and on a GPU.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from emulation import on_gpu
from emulation.tensor_map import TensorMap

from flashlab.core.errors import EmulationError
from flashlab.run import emulator
from flashlab.run.emulator import Access, Emulated, Report

Array = npt.NDArray[Any]

TYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64, "u8": np.uint8, "u16": np.uint16,
    "i32": np.int32, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
"""bf16 arrays are held as their bits: NumPy has no such type."""
TENSOR_TYPES = {"u8": 0, "u16": 1, "u32": 2, "i32": 3, "u64": 4, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
"""CUtensorMapDataType."""
ALIGNMENT = 256
"""What a GPU's allocations start at a multiple of; the emulation keeps an array's own."""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle, by its bytes."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """An array in global memory."""

    name: str
    type: str
    shape: tuple[int, ...]
    content: str
    row_stride: int | None = None
    """Elements between the starts of rows; None: rows follow each other."""

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        strides = [1]
        for length in self.shape[:0:-1]:
            step = strides[-1] * length
            strides.append(self.row_stride if len(strides) == 1 and self.row_stride else step)
        return tuple(reversed(strides))

    @property
    def access(self) -> Access:
        """As the emulation's worker wants it: r, w (not written yet) or rw."""
        return "w" if self.content == "written" else "rw" if self.content == "zeros" else "r"

    def storage(self) -> Array:
        """Its memory before the launch: one-dimensional, the gaps between rows included."""
        dtype = np.dtype(TYPES[self.type])
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        room = np.empty(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        room[...] = 0xFF
        memory: Array = room[start : start + size * dtype.itemsize].view(dtype)
        if self.content != "written":
            self.view(memory)[...] = self._values(np.random.default_rng(zlib.crc32(self.name.encode())))
        return memory

    def view(self, memory: Array) -> Array:
        """The array in `memory`, which `storage` made or a launch left behind."""
        strides = tuple(stride * memory.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(memory, self.shape, strides)

    def _values(self, rng: np.random.Generator) -> Array:
        dtype = np.dtype(TYPES[self.type])
        kind, _, how = self.content.partition("=")
        size = int(np.prod(self.shape))
        if kind == "zeros":
            values = np.zeros(size, dtype)
        elif kind == "bits":
            values = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)
        elif kind == "range":
            values = rng.integers(0, int(how), size).astype(dtype)
        elif kind == "grid":
            low, _, high = how.partition(":")
            values = np.linspace(float(low), float(high), size).astype(dtype)
        elif kind == "all":  # every value of a 16-bit type
            values = np.arange(size, dtype=np.uint32).astype(np.uint16).view(dtype)
        elif kind == "normal":
            normal = rng.standard_normal(size)
            values = to_bf16(normal) if self.type == "bf16" else normal.astype(dtype)
        else:
            raise ValueError(f"{self.name}: unknown content {self.content!r}")
        return values.reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class MapSpec:
    """A tensor map of an array."""

    name: str
    array: ArraySpec
    box: tuple[int, ...]
    swizzle: int

    def innermost_first(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Dims, strides in bytes (the first, an element, left out) and box, as cuTensorMapEncodeTiled wants them."""
        itemsize = np.dtype(TYPES[self.array.type]).itemsize
        strides = tuple(stride * itemsize for stride in self.array.strides)
        return self.array.shape[::-1], strides[-2::-1], self.box[::-1]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A parameter passed by value."""

    name: str
    type: str
    value: float

    @property
    def raw(self) -> bytes:
        """Its bytes, little-endian."""
        return struct.pack("<f", self.value) if self.type == "float" else struct.pack("<i", int(self.value))


@dataclass(frozen=True, kw_only=True)
class KernelFile:
    """A kernel file's own description."""

    path: Path
    facts: dict[str, str]
    """Every `// key: text` of its first lines; of those that may repeat, the last."""
    parameters: tuple[ArraySpec | MapSpec | Number, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    expectations: tuple[str, ...]
    tolerance: float
    """Of the largest element."""
    ulps: int
    """Numbers of float32 that may lie between what is wanted and what came."""
    marks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Lines that end in `// here: first` or `// here: second`; `// here` alone is under the empty name."""

    @property
    def entry(self) -> str:
        """The kernel's name: the file's, without suffix."""
        return self.path.stem

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """In the order of the parameters."""
        return tuple(p.array if isinstance(p, MapSpec) else p for p in self.parameters if not isinstance(p, Number))

    def storages(self) -> dict[str, Array]:
        """Memory of each array before the launch."""
        return {array.name: array.storage() for array in self.arrays}

    def views(self, storages: dict[str, Array]) -> dict[str, Array]:
        """Each array in its memory."""
        return {array.name: array.view(storages[array.name]) for array in self.arrays}

    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that the kernel writes."""
        return tuple(array.name for array in self.arrays if array.access != "r")

    def expected(self) -> dict[str, Array]:
        """What the header says of the outputs."""
        names = {**self.views(self.storages()), **HELPERS}
        results = {}
        for expectation in self.expectations:
            name, _, expression = expectation.partition("=")
            results[name.strip()] = np.asarray(eval(expression, {"np": np, **names}))
        return results


def to_bf16(values: Array) -> Array:
    """The bits of the nearest bfloat16, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(np.asarray(values)), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """The float32 of bfloat16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


HELPERS = {"to_bf16": to_bf16, "from_bf16": from_bf16}


def _triple(text: str) -> tuple[int, int, int]:
    x, y, z = ([int(part) for part in text.split("x")] + [1, 1])[:3]
    return x, y, z


def _array(words: list[str]) -> ArraySpec:
    name, declared, content, *options = words
    match = re.fullmatch(r"(\w+)\[([\d,]+)\]", declared)
    if match is None or match[1] not in TYPES:
        raise ValueError(f"{name}: wanted a type and a shape like f16[64,64], got {declared!r}")
    stride = next((int(option[7:]) for option in options if option.startswith("stride=")), None)
    shape = tuple(int(n) for n in match[2].split(","))
    return ArraySpec(name=name, type=match[1], shape=shape, content=content, row_stride=stride)


def _parameter(text: str) -> ArraySpec | MapSpec | Number:
    words = text.split()
    if words[1] in ("int", "float"):
        return Number(name=words[0], type=words[1], value=float(words[2]))
    if words[1] != "map":
        return _array(words)
    options = dict(word.split("=") for word in words[5:])
    box = tuple(int(n) for n in options["box"].split("x"))
    return MapSpec(name=words[0], array=_array(words[2:5]), box=box, swizzle=int(options.get("swizzle", 0)))


def read(path: Path) -> KernelFile:
    """The description in a file's first lines."""
    facts: dict[str, str] = {}
    parameters: list[ArraySpec | MapSpec | Number] = []
    expectations: list[str] = []
    marks: dict[str, list[int]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    in_header = True
    for number, line in enumerate(lines, 1):
        fact = re.fullmatch(r"// ([a-z ]+): (.*)", line)
        in_header &= line.startswith("//")
        more = re.fullmatch(r"//  +(.*)", line)
        if more and in_header and expectations:  # a long expectation goes on
            expectations[-1] += f" {more[1]}"
        if fact and in_header:
            facts[fact[1]] = fact[2]
            if fact[1] == "parameter":
                parameters.append(_parameter(fact[2]))
            if fact[1] == "expect":
                expectations.append(fact[2])
        mark = re.search(r"// here(?:: (first, second|first|second))?$", line)
        if mark:
            for name in (mark[1] or "").split(", "):
                marks.setdefault(name, []).append(number)
    launch = dict(word.split("=") for word in facts["launch"].split())
    tolerance = facts.get("tolerance", "0")
    return KernelFile(
        path=path,
        facts=facts,
        parameters=tuple(parameters),
        grid=_triple(launch["grid"]),
        block=_triple(launch["block"]),
        cluster=_triple(launch.get("cluster", "1")),
        smem_bytes=int(launch.get("smem", 0)),
        expectations=tuple(expectations),
        tolerance=0.0 if tolerance.endswith(" ulp") else float(tolerance),
        ulps=int(tolerance.removesuffix(" ulp")) if tolerance.endswith(" ulp") else 0,
        marks={name: tuple(found) for name, found in marks.items()},
    )


@np.errstate(over="ignore", invalid="ignore")
def difference(file: KernelFile, got: dict[str, Array], wanted: dict[str, Array]) -> str:
    """Empty where every output is what was wanted, else where it is not."""
    types = {array.name: array.type for array in file.arrays}
    for name, want in wanted.items():
        have = got[name]
        want = np.broadcast_to(want, have.shape)
        if file.ulps and types[name] == "f32":
            want = want.astype(np.float32)
            tiny = np.finfo(np.float32).tiny  # where one side flushes to zero, the other may just not
            near = np.abs(_order(have) - _order(want)) <= file.ulps
            same = near | (np.abs(have) + np.abs(want) <= 2 * tiny) | (np.isnan(have) & np.isnan(want))
        elif file.tolerance and types[name] in ("f16", "bf16", "f32", "f64"):
            if types[name] == "bf16":
                have, want = from_bf16(have), from_bf16(want)
            have, want = have.astype(np.float64), want.astype(np.float64)
            finite = np.abs(want[np.isfinite(want)])
            allowed = file.tolerance * (float(finite.max()) if finite.size else 0.0)
            same = (have == want) | (np.abs(have - want) <= allowed) | (np.isnan(have) & np.isnan(want))
        else:
            want = want.astype(have.dtype)
            bits = np.dtype(f"u{have.itemsize}")
            same = np.ascontiguousarray(have).view(bits) == np.ascontiguousarray(want).view(bits)
            same |= _is_nan(have, types[name]) & _is_nan(want, types[name])
        if not same.all():
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            count = int(np.count_nonzero(~same))
            return f"{name}{list(at)}: wanted {want[at]!r}, got {have[at]!r}; {count} of {same.size} elements differ"
    return ""


def _order(values: Array) -> Array:
    """Float32 numbers counted from zero, so that neighbours differ by 1."""
    bits = np.ascontiguousarray(values).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _is_nan(values: Array, type_name: str) -> Array:
    if type_name == "bf16":
        return (values & 0x7FFF) > 0x7F80
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, dtype=bool)


# --- on the CPU ---


def emulate(file: KernelFile, emulated: Emulated, schedule: str = "ascending") -> tuple[Report, dict[str, Array]]:
    """Run a build of the file: the report, and every array afterwards (empty where the launch did not end well).

    Raises:
        EmulationError: the worker died and left no report.
    """
    arrays = file.views(file.storages())
    arguments: list[Any] = []
    for parameter in file.parameters:
        if isinstance(parameter, Number):
            arguments.append(parameter.raw)
            continue
        spec = parameter.array if isinstance(parameter, MapSpec) else parameter
        pointer = emulator.Pointer(array=arrays[spec.name], access=spec.access, name=spec.name)
        if isinstance(parameter, MapSpec):
            arguments.append(tensor_map(parameter, arrays).as_argument(pointer))
        else:
            arguments.append(pointer)
    try:
        report = emulator.launch(
            emulated,
            arguments,
            grid=file.grid,
            block=file.block,
            cluster=file.cluster,
            smem_bytes=file.smem_bytes,
            schedule=schedule,
            timeout_s=20,
        )
    except EmulationError as error:
        if error.report is None:
            raise
        return error.report, {}
    return report, arrays


def tensor_map(spec: MapSpec, arrays: Mapping[str, Array]) -> TensorMap:
    """The map of its array."""
    dims, strides, box = spec.innermost_first()
    return TensorMap(
        array=arrays[spec.array.name],
        data_type=TENSOR_TYPES[spec.array.type],
        dims=dims,
        strides=strides,
        box=box,
        swizzle=SWIZZLES[spec.swizzle],
    )


# --- on a GPU ---


def run_on_gpu(file: KernelFile, arch: str) -> dict[str, Array]:
    """Every array after the kernel ran on the first GPU.

    Raises:
        CompileError: the file does not compile.
        LaunchError: the driver refused the launch or broke it off, or the kernel did not end.
    """
    arrays = file.views(file.storages())
    arguments: list[Any] = []
    for parameter in file.parameters:
        if isinstance(parameter, Number):
            arguments.append(parameter.raw)
        elif isinstance(parameter, MapSpec):
            arguments.append(tensor_map(parameter, arrays))
        else:
            arguments.append(arrays[parameter.name])
    on_gpu.launch(
        file.path,
        arguments,
        entry=file.entry,
        arch=arch,
        grid=file.grid,
        block=file.block,
        smem_bytes=file.smem_bytes,
    )
    return arrays
