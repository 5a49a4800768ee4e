"""The emulation's arithmetic, bit for bit: fp16, bfloat16 and fp8 against NumPy, ml_dtypes and exact fractions."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from shared import source_file

from flashlab.build import compiler
from flashlab.core.errors import CompileError, EmulationError
from flashlab.core.paths import KERNELS
from flashlab.run import emulator
from flashlab.run.emulator import Emulated

Bits = NDArray[Any]
Run = Callable[..., Bits]
"""type, operation, operands, the result's NumPy type."""

SOURCE = Path(__file__).with_name("numerics.cpp")
COMPILER = next((path for path in map(shutil.which, ("g++", "clang++")) if path), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: neither g++ nor clang++ is on the PATH")

RANDOM_PATTERNS = 1_000_000
EXACT_CASES = 4_000
"""Fractions are slow."""


@dataclass(frozen=True)
class Format:
    """A narrow format, as the tests need it."""

    dtype: Any
    bits: type[np.unsignedinteger[Any]]
    mantissa: int
    """Bits that are stored."""
    min_exponent: int
    """Of the smallest normal number."""
    infinite: bool

    @property
    def sign(self) -> int:
        return 1 << (np.dtype(self.bits).itemsize * 8 - 1)

    @property
    def nan(self) -> int:
        """CUDA's canonical one."""
        return self.sign - 1

    def values(self) -> Bits:
        """Every finite magnitude, in ascending order; a number's index is its code."""
        codes = np.arange(self.sign, dtype=self.bits).view(self.dtype).astype(np.float64)
        finite_codes: Bits = codes[np.isfinite(codes)]
        return finite_codes


FORMATS = {
    "float16": Format(np.float16, np.uint16, 10, -14, True),
    "bfloat16": Format(ml_dtypes.bfloat16, np.uint16, 7, -126, True),
    "float8_e4m3fn": Format(ml_dtypes.float8_e4m3fn, np.uint8, 3, -6, False),
    "float8_e5m2": Format(ml_dtypes.float8_e5m2, np.uint8, 2, -14, True),
}
WIDE = ("float16", "bfloat16")
NARROW = ("float8_e4m3fn", "float8_e5m2")
every_format = pytest.mark.parametrize("name", FORMATS)
every_16_bit_format = pytest.mark.parametrize("name", WIDE)
every_8_bit_format = pytest.mark.parametrize("name", NARROW)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The headers compiled alone: what they define needs no runtime."""
    assert COMPILER is not None
    program = tmp_path_factory.mktemp("numerics") / "numerics"
    command = [COMPILER, "-O2", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS / 'emulation'}"]
    subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True)

    def call(type_name: str, operation: str, *operands: NDArray[Any], result: Any) -> Bits:
        data = b"".join(np.ascontiguousarray(operand).tobytes() for operand in operands)
        done = subprocess.run([str(program), type_name, operation], input=data, capture_output=True, check=True)
        return np.frombuffer(done.stdout, dtype=result)

    return call


@pytest.fixture(autouse=True)
def _overflow_is_meant() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def random_floats(rng: np.random.Generator) -> NDArray[np.float32]:
    """Any bits: every exponent, subnormal numbers, infinities and NaN among them."""
    return rng.integers(0, 2**32, RANDOM_PATTERNS, dtype=np.uint32).view(np.float32)


def hard_floats(format: Format) -> NDArray[np.float32]:
    """Midpoints between neighbours, those on either side of each, and both ends of the range."""
    values = format.values()
    overflow = values[-1] + (values[-1] - values[-2]) / 2
    bits = np.append((values[1:] + values[:-1]) / 2, overflow).astype(np.float32).view(np.uint32)
    near = np.concatenate([bits - 1, bits, bits + 1, values.astype(np.float32).view(np.uint32)])
    extra = np.array([0, 1e-45, 3.4e38, np.inf, np.nan], np.float32).view(np.uint32)
    near = np.concatenate([near, extra])
    return np.concatenate([near, near | np.uint32(2**31)]).view(np.float32)


def narrowed(format: Format, values: NDArray[Any]) -> Bits:
    """Rounded by NumPy or ml_dtypes; CUDA's NaN."""
    bits = values.astype(format.dtype).view(format.bits).copy()
    bits[np.isnan(values)] = format.nan
    return bits


def rounded(format: Format, x: Fraction) -> int:
    """The bits nearest to `x`, ties to even: exact, and independent of any floating-point unit."""
    sign = format.sign if x < 0 else 0
    x = abs(x)
    if x == 0:
        return sign
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent = max(exponent - (x < Fraction(2) ** exponent), format.min_exponent)
    unit = Fraction(2) ** (exponent - format.mantissa)
    steps = round(x / unit)  # Python rounds ties to even
    code = steps + ((exponent - format.min_exponent) << format.mantissa)
    return sign | min(code, len(format.values()) if format.infinite else format.nan)


def assert_same(got: Bits, wanted: Bits, *operands: Bits) -> None:
    assert got.shape == wanted.shape
    (wrong,) = np.nonzero(got != wanted)
    shown = [[hex(int(array[i])) for array in (*operands, got, wanted)] for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)} of {len(got)} differ; operands, got and wanted: {shown}"


def random_codes(rng: np.random.Generator, count: int) -> list[NDArray[np.uint16]]:
    return [rng.integers(0, 2**16, RANDOM_PATTERNS, dtype=np.uint16) for _ in range(count)]


# --- conversions ---


@every_format
def test_every_number_widens_exactly(run: Run, name: str) -> None:
    format = FORMATS[name]
    codes = np.arange(2 * format.sign, dtype=np.uint32).astype(format.bits)
    got = run(name, "to_float", codes, result=np.uint32)
    wanted = codes.view(format.dtype).astype(np.float32)
    numbers = ~np.isnan(wanted)
    assert_same(got[numbers], wanted.view(np.uint32)[numbers], codes[numbers])
    if name == "bfloat16":  # the upper half of a float: bits stay
        assert_same(got, codes.astype(np.uint32) << 16)
    else:
        assert set(got[~numbers].tolist()) == {0x7FFFFFFF}


@every_format
def test_floats_round_to_nearest_even(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    floats = np.concatenate([hard_floats(format), random_floats(rng)])
    wanted = narrowed(format, floats)
    assert_same(run(name, "from_float", floats, result=format.bits), wanted, floats.view(np.uint32))


@every_format
def test_the_reference_rounds_as_fractions_do(rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    floats = rng.choice(hard_floats(format), EXACT_CASES)
    floats = floats[np.isfinite(floats) & (floats != 0)]
    wanted = np.array([rounded(format, Fraction(float(x))) for x in floats], format.bits)
    assert_same(narrowed(format, floats), wanted, floats.view(np.uint32))


@every_format
def test_doubles_round_once(run: Run, rng: np.random.Generator, name: str) -> None:
    """Just beside a midpoint, so that rounding to float on the way would end on the wrong side."""
    format = FORMATS[name]
    values = format.values()
    middles = rng.choice((values[1:] + values[:-1]) / 2, EXACT_CASES)
    doubles = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    doubles[::2] *= -1
    wanted = np.array([rounded(format, Fraction(float(x))) for x in doubles], format.bits)
    assert_same(run(name, "from_double", doubles, result=format.bits), wanted, doubles.view(np.uint64))


@every_16_bit_format
def test_integers_round_once(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    integers = rng.integers(-(2**63), 2**63, EXACT_CASES, dtype=np.int64) >> rng.integers(0, 64, EXACT_CASES)
    midpoint = ((2 << format.mantissa) + 1) << (62 - format.mantissa - 1)
    integers[:5] = [midpoint, midpoint - 1, midpoint + 1, -(2**63), 2**63 - 1]
    wanted = np.array([rounded(format, Fraction(int(x))) for x in integers], format.bits)
    assert_same(run(name, "from_ll", integers, result=format.bits), wanted, integers.view(np.uint64))


@every_16_bit_format
def test_directed_rounding_brackets_the_number(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    floats = np.concatenate([hard_floats(format), random_floats(rng)])
    floats = floats[np.isfinite(floats)]
    nearest = narrowed(format, floats).view(format.dtype)
    below = np.where(nearest.astype(np.float32) > floats, np.nextafter(nearest, format.dtype(-np.inf)), nearest)
    above = np.where(nearest.astype(np.float32) < floats, np.nextafter(nearest, format.dtype(np.inf)), nearest)
    down, up, inward = (run(name, way, floats, result=format.dtype).astype(np.float32) for way in ("rd", "ru", "rz"))
    assert (down == below.astype(np.float32)).all()
    assert (up == above.astype(np.float32)).all()
    assert (inward == np.where(np.signbit(floats), up, down)).all()


@every_8_bit_format
def test_fp8_saturates(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    floats = np.concatenate([hard_floats(format), random_floats(rng)])
    largest = np.float32(format.values()[-1])
    wanted = narrowed(format, np.clip(floats, -largest, largest))
    assert_same(run(name, "saturated", floats, result=np.uint8), wanted, floats.view(np.uint32))
    half = len(floats) // 2 * 2
    assert run(name, "pairs", floats[:half], result=np.uint8).all()


@every_8_bit_format
def test_every_fp8_number_fits_a_half(run: Run, name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = narrowed(FORMATS["float16"], codes.view(FORMATS[name].dtype).astype(np.float32))
    assert_same(run(name, "to_half", codes, result=np.uint16), wanted, codes)


# --- arithmetic ---


@every_16_bit_format
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div"])
def test_arithmetic_on_random_pairs(run: Run, rng: np.random.Generator, name: str, operation: str) -> None:
    format = FORMATS[name]
    a, b = random_codes(rng, 2)
    x, y = (codes.view(format.dtype).astype(np.float32) for codes in (a, b))
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[operation]
    exact = function(x, y)
    # A subnormal float has been rounded once already; test_products_round_once has such results.
    sure = ~((np.abs(exact) < 2.0**-126) & (exact != 0))
    got = run(name, operation, a, b, result=np.uint16)
    assert_same(got[sure], narrowed(format, exact)[sure], a[sure], b[sure])


def finite(format: Format, rng: np.random.Generator, count: int) -> Bits:
    codes = rng.integers(0, len(format.values()), count, dtype=np.uint16)
    return codes | (rng.integers(0, 2, count, dtype=np.uint16) << 15)


def as_fractions(format: Format, codes: Bits) -> list[Fraction]:
    return [Fraction(float(x)) for x in codes.view(format.dtype).astype(np.float64)]


@every_16_bit_format
def test_products_round_once(run: Run, rng: np.random.Generator, name: str) -> None:
    """Subnormal results too."""
    format = FORMATS[name]
    a, b = (finite(format, rng, EXACT_CASES) for _ in range(2))
    bias = 1 - format.min_exponent
    small = rng.integers(0, 1 << format.mantissa, EXACT_CASES // 2).astype(np.uint16)
    b[: EXACT_CASES // 2] = small | ((bias // 2) << format.mantissa)
    a[: EXACT_CASES // 2] = small[::-1] | (max(1, bias - bias // 2 - format.mantissa // 2) << format.mantissa)
    wanted = np.array(
        [rounded(format, x * y) for x, y in zip(as_fractions(format, a), as_fractions(format, b), strict=True)],
        np.uint16,
    )
    zero = (wanted & 0x7FFF) == 0
    wanted[zero] = (a[zero] ^ b[zero]) & 0x8000
    assert_same(run(name, "mul", a, b, result=np.uint16), wanted, a, b)


@every_16_bit_format
def test_fma_rounds_exactly_once(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    a, b, c = (finite(format, rng, EXACT_CASES) for _ in range(3))
    # Half of the cases: a product within the range, and a third operand that is about as large, or decides a tie.
    half = EXACT_CASES // 2
    one = (1 - format.min_exponent) << format.mantissa
    a[:half] = one + rng.integers(0, 4 << format.mantissa, half)
    b[:half] = one - rng.integers(0, 4 << format.mantissa, half)
    c[:half] = np.where(rng.random(half) < 0.5, c[:half], one + rng.integers(0, 2 << format.mantissa, half)) ^ (
        rng.integers(0, 2, half, dtype=np.uint16) << 15
    )
    triples = zip(as_fractions(format, a), as_fractions(format, b), as_fractions(format, c), strict=True)
    exact = [x * y + z for x, y, z in triples]
    wanted = np.array([rounded(format, x) for x in exact], np.uint16)
    # An exact zero, or what rounds to it: the sign is that of the sum, which fractions have not.
    keep = np.array([x != 0 for x in exact])
    got = run(name, "fma", a, b, c, result=np.uint16)
    assert_same(got[keep], wanted[keep], a[keep], b[keep], c[keep])


@every_16_bit_format
def test_fma_where_a_tiny_addend_breaks_a_tie(run: Run, rng: np.random.Generator, name: str) -> None:
    """A product that is a midpoint, plus or minus the smallest number: 2^100 apart in bfloat16."""
    format = FORMATS[name]
    one = (1 - format.min_exponent) << format.mantissa
    mantissas = np.arange(1 << format.mantissa, dtype=np.uint32)
    x, y = (grid.ravel() for grid in np.meshgrid(mantissas, mantissas[-128:]))
    full = (x + (1 << format.mantissa)) * (y + (1 << format.mantissa))
    dropped = format.mantissa + (full >> (2 * format.mantissa + 1) > 0)
    ties = (full & ((1 << dropped) - 1)) == (1 << (dropped - 1))
    a, b = ((one + grid[ties]).astype(np.uint16) for grid in (x, y))
    assert len(a) > 20
    for tiny in (0x0001, 0x8001):
        c = np.full(len(a), tiny, np.uint16)
        triples = zip(as_fractions(format, a), as_fractions(format, b), as_fractions(format, c), strict=True)
        wanted = np.array([rounded(format, p * q + r) for p, q, r in triples], np.uint16)
        assert_same(run(name, "fma", a, b, c, result=np.uint16), wanted, a, b, c)


@every_16_bit_format
def test_square_roots_round_once(run: Run, name: str) -> None:
    format = FORMATS[name]
    codes = np.arange(len(format.values()), dtype=np.uint16)
    wanted = narrowed(format, np.sqrt(codes.view(format.dtype).astype(np.float32)))
    assert_same(run(name, "sqrt", codes, result=np.uint16), wanted, codes)


@every_16_bit_format
def test_minimum_maximum_and_comparisons(run: Run, rng: np.random.Generator, name: str) -> None:
    format = FORMATS[name]
    infinity = len(format.values())
    special = np.array([0, 1, infinity - 1, infinity, infinity + 1, 0x7FFF], np.uint16)
    special = np.concatenate([special, special | 0x8000])
    a, b = (
        np.concatenate([grid.ravel(), rng.integers(0, 2**16, 4000, dtype=np.uint16)])
        for grid in np.meshgrid(special, special)
    )
    x, y = (codes.view(format.dtype).astype(np.float64) for codes in (a, b))
    nan = np.isnan(x) | np.isnan(y)
    both = np.isnan(x) & np.isnan(y)
    zeros = (x == 0) & (y == 0)
    for operation, larger in (("max", x > y), ("min", x < y)):
        wanted = np.where(np.isnan(y) | larger, a, b)
        wanted[zeros] = (a & b if operation == "max" else a | b)[zeros]
        wanted[both] = format.nan
        assert_same(run(name, operation, a, b, result=np.uint16), wanted, a, b)
        wanted[nan] = format.nan
        assert_same(run(name, f"{operation}_nan", a, b, result=np.uint16), wanted, a, b)
    ordered = [x == y, (x != y) & ~nan, x < y, x <= y, x > y, x >= y]
    relations = [*ordered, *(relation | nan for relation in ordered)]
    bits = sum(relation.astype(np.uint16) << i for i, relation in enumerate(relations))
    assert_same(run(name, "compare", a, b, result=np.uint16), np.asarray(bits, np.uint16), a, b)


@every_16_bit_format
def test_pairs_do_what_numbers_do(run: Run, rng: np.random.Generator, name: str) -> None:
    assert run(name, "pairs", *(codes[:20_000] for codes in random_codes(rng, 3)), result=np.uint8).all()


# --- integers and float ---


def test_integer_intrinsics(run: Run, rng: np.random.Generator) -> None:
    a, b, c = (
        rng.integers(0, 2**32, 2000, dtype=np.uint32) >> rng.integers(0, 33, 2000).astype(np.uint32) for _ in range(3)
    )
    a[:3] = [0, 1, 2**32 - 1]
    texts = [f"{x:032b}" for x in a.tolist()]
    both = (b.astype(np.uint64) << 32) | a
    shift = (c & 31).astype(np.uint64)
    selectors = [[(s >> (4 * i)) & 7 for i in range(4)] for s in c.tolist()]
    wanted: dict[str, tuple[list[NDArray[np.uint32]], Any]] = {
        "popc": ([a], [text.count("1") for text in texts]),
        "clz": ([a], [32 - len(text.lstrip("0")) for text in texts]),
        "ffs": ([a], [32 - text.rindex("1") if "1" in text else 0 for text in texts]),
        "brev": ([a], [int(text[::-1], 2) for text in texts]),
        "umulhi": ([a, b], (a.astype(np.uint64) * b) >> 32),
        "mulhi": ([a, b], (a.view(np.int32).astype(np.int64) * b.view(np.int32)) >> 32),
        "byte_perm": (
            [a, b, c],
            [
                sum(((y >> (8 * d)) & 255) << (8 * i) for i, d in enumerate(digits))
                for y, digits in zip(both.tolist(), selectors, strict=True)
            ],
        ),
        "funnelshift_r": ([a, b, c], both >> shift),
        "funnelshift_l": ([a, b, c], (both << shift) >> 32),
    }
    for operation, (operands, result) in wanted.items():
        expected = (np.array(result).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        assert_same(run("math", operation, *operands, result=np.uint32), expected, *operands)


def test_floats_become_integers(run: Run, rng: np.random.Generator) -> None:
    """Too large saturates, NaN becomes 0."""
    edges = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 2.0**31, -(2.0**31), 2.0**32, 3e38, -3e38, np.inf, -np.inf], np.float32
    )
    floats = np.concatenate([edges, random_floats(rng)[:20_000], rng.normal(0, 1e5, 20_000).astype(np.float32)])
    signed, unsigned = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
    for operation, function, (low, high) in (
        ("float2int_rn", np.rint, signed),
        ("float2int_rz", np.trunc, signed),
        ("float2int_rd", np.floor, signed),
        ("float2uint_ru", np.ceil, unsigned),
    ):
        exact = np.clip(function(np.nan_to_num(floats.astype(np.float64), nan=0.0)), low, high).astype(np.int64)
        got = run("math", operation, floats, result=np.uint32)
        assert_same(got, (exact & 0xFFFFFFFF).astype(np.uint32), floats.view(np.uint32))


def test_float_minimum_and_maximum(run: Run, rng: np.random.Generator) -> None:
    """The number where one is NaN, and -0 below 0."""
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32)
    a, b = (grid.ravel() for grid in np.meshgrid(special, special))
    zeros = (a == 0) & (b == 0)
    for operation, function, sign in (("fmaxf", np.fmax, 1.0), ("fminf", np.fmin, -1.0), ("max", np.fmax, 1.0)):
        wanted = function(a, b)
        wanted[zeros] = np.where(np.signbit(a) == np.signbit(b), a, np.float32(0.0 * sign))[zeros]
        got = run("math", operation, a, b, result=np.float32)
        numbers = ~np.isnan(wanted)
        assert_same(got.view(np.uint32)[numbers], wanted.view(np.uint32)[numbers], a.view(np.uint32), b.view(np.uint32))
        assert np.isnan(got[~numbers]).all()
    got = run("math", "saturate", np.array([-1, -0.0, 0.25, 1, 7, np.inf, np.nan], np.float32), result=np.float32)
    assert got.tolist() == [0, 0, 0.25, 1, 1, 1, 0]


# --- matrices, through the runtime ---

WMMA = """
#include <mma.h>
using namespace nvcuda;
constexpr int TILE_K = 16, STRIDE = 40, SIZE = 32 * STRIDE;

// Case `index`: D = 2 · A · B + C, with C and D in `layout`.
template <int TILE_M, int TILE_N, class LayoutA, class LayoutB, class Sum>
__device__ void multiply(const ELEMENT* A_smem, const ELEMENT* B_smem, const float* C, float* D, Sum* CD_smem,
                         int index, wmma::layout_t layout) {
  for (int i = threadIdx.x; i < SIZE; i += 32) CD_smem[i] = static_cast<Sum>(C[i]);
  __syncwarp();
  wmma::fragment<wmma::matrix_a, TILE_M, TILE_N, TILE_K, ELEMENT, LayoutA> a;
  wmma::fragment<wmma::matrix_b, TILE_M, TILE_N, TILE_K, ELEMENT, LayoutB> b;
  wmma::fragment<wmma::accumulator, TILE_M, TILE_N, TILE_K, Sum> c, d;
  wmma::load_matrix_sync(a, A_smem, STRIDE);
  wmma::load_matrix_sync(b, B_smem, STRIDE);
  wmma::load_matrix_sync(c, CD_smem, STRIDE, layout);
  for (int i = 0; i < a.num_elements; ++i) a.x[i] += a.x[i];
  wmma::mma_sync(d, a, b, c);
  __syncwarp();
  wmma::store_matrix_sync(CD_smem, d, STRIDE, layout);
  __syncwarp();
  for (int i = threadIdx.x; i < SIZE; i += 32) D[index * SIZE + i] = static_cast<float>(CD_smem[i]);
  __syncwarp();
}

template <class Sum>
__device__ void all_shapes(const ELEMENT* A_smem, const ELEMENT* B_smem, const float* C, float* D, Sum* CD_smem) {
  using Row = wmma::row_major;
  using Col = wmma::col_major;
  multiply<16, 16, Row, Col>(A_smem, B_smem, C, D, CD_smem, 0, wmma::mem_row_major);
  multiply<16, 16, Col, Row>(A_smem, B_smem, C, D, CD_smem, 1, wmma::mem_col_major);
  multiply<32, 8, Row, Col>(A_smem, B_smem, C, D, CD_smem, 2, wmma::mem_row_major);
  multiply<32, 8, Col, Row>(A_smem, B_smem, C, D, CD_smem, 3, wmma::mem_col_major);
  multiply<8, 32, Row, Col>(A_smem, B_smem, C, D, CD_smem, 4, wmma::mem_row_major);
  multiply<8, 32, Col, Row>(A_smem, B_smem, C, D, CD_smem, 5, wmma::mem_col_major);
}

extern "C" __global__ void kernel(const ELEMENT* A, const ELEMENT* B, const float* C, float* D) {
  __shared__ __align__(32) ELEMENT A_smem[SIZE], B_smem[SIZE];
  __shared__ __align__(32) float CD_smem[SIZE];
  for (int i = threadIdx.x; i < SIZE; i += 32) {
    A_smem[i] = A[i];
    B_smem[i] = B[i];
  }
  __syncwarp();
  all_shapes(A_smem, B_smem, C, D, CD_smem);
#ifdef HALF_SUMS
  all_shapes(A_smem, B_smem, C, D + 6 * SIZE, reinterpret_cast<__half*>(CD_smem));
#endif
}
"""
WMMA_SHAPES = [(16, 16), (32, 8), (8, 32)]
MMA = """
#include "ptx.cuh"
constexpr int STRIDE = 24;
extern "C" __global__ void kernel(const unsigned short* A, const unsigned short* B, float* D,
                                  unsigned short* A_copies) {
  __shared__ __align__(16) unsigned short A_smem[16 * STRIDE], B_smem[16 * STRIDE], Bt_smem[8 * STRIDE];
  __shared__ __align__(16) unsigned short copy_smem[3][16 * STRIDE];
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 16; i += 32) A_smem[i / 16 * STRIDE + i % 16] = A[i];
  for (int i = lane; i < 16 * 8; i += 32) {
    B_smem[i / 8 * STRIDE + i % 8] = B[i];
    Bt_smem[i % 8 * STRIDE + i / 8] = B[i];
  }
  __syncwarp();
  const int corner = lane % 16 * STRIDE + lane / 16 * 8;   // of a row of 8, where lanes 16 and up have the right half
  unsigned a[4], b[2], b_trans[2], a_trans[4];
  ptx::ldmatrix_x4(a, A_smem + corner);
  ptx::ldmatrix_x2(b, Bt_smem + lane % 8 * STRIDE + lane / 8 % 2 * 8);
  ptx::ldmatrix_x2_trans(b_trans, B_smem + lane % 16 * STRIDE);
  ptx::ldmatrix_x4_trans(a_trans, A_smem + corner);
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  ptx::MULTIPLY(d, a, b);
  ptx::MULTIPLY(d, a, b_trans);
  for (int i = 0; i < 4; ++i) D[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];

  ptx::stmatrix_x4(copy_smem[0] + corner, a);
  ptx::stmatrix_x4_trans(copy_smem[1] + corner, a_trans);
  for (int i = 0; i < 4; i += 2) {
    const unsigned pair[2] = {a[i], a[i + 1]};
    if (i == 0) ptx::stmatrix_x2(copy_smem[2] + lane % 16 * STRIDE, pair);
  }
  for (int i = 2; i < 4; ++i) {
    unsigned single[1];
    ptx::ldmatrix_x1_trans(single, A_smem + (i % 2 * 8 + lane % 8) * STRIDE + i / 2 * 8);
    ptx::stmatrix_x1_trans(copy_smem[2] + (i % 2 * 8 + lane % 8) * STRIDE + i / 2 * 8, single);
  }
  __syncwarp();
  for (int i = lane; i < 3 * 16 * 16; i += 32) A_copies[i] = copy_smem[i / 256][i % 256 / 16 * STRIDE + i % 16];
}
"""
ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
both_builds = pytest.mark.parametrize("hooks", [False, True], ids=["fast", "hooks"])


def build(text: str, *, hooks: bool = False, **defines: Any) -> Emulated:
    return emulator.build_file(source_file("kernel.cu", text), entry="kernel", defines=defines, hooks=hooks)


def small_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Any sum of their products is exact, in whatever order."""
    return rng.integers(-4, 5, shape).astype(np.float32)


@every_16_bit_format
@pytest.mark.parametrize("text", [WMMA, MMA], ids=["wmma", "mma"])
def test_the_same_kernels_compile_for_a_gpu(tmp_path: Path, name: str, text: str) -> None:
    source = tmp_path / "kernel.cu"
    multiply = f"mma_m16n8k16_{'f16' if name == 'float16' else 'bf16'}"
    defines = {"ELEMENT": ELEMENTS[name], "MULTIPLY": multiply}
    includes = f"#include <{'cuda_fp16' if name == 'float16' else 'cuda_bf16'}.h>\n"
    source.write_text(includes + text, encoding="utf-8")
    assert compiler.compile_file(source, entry="kernel", arch="sm_90a", defines=defines).code


@every_16_bit_format
@both_builds
def test_wmma(rng: np.random.Generator, name: str, hooks: bool) -> None:
    defines = {"HALF_SUMS": 1} if name == "float16" else {}
    kernel = build(WMMA, hooks=hooks, ELEMENT=ELEMENTS[name], **defines)
    a, b, c = (small_integers(rng, (32, 40)) for _ in range(3))
    d = np.zeros((12 if defines else 6, 32, 40), np.float32)
    operands = [array.astype(FORMATS[name].dtype).view(np.uint16) for array in (a, b)]
    report = emulator.launch(kernel, [*operands, c, d], grid=(1,), block=(32,))
    assert not report.findings
    for index, got in enumerate(d):
        m, n = WMMA_SHAPES[index % 6 // 2]
        wanted = c.copy()
        if index % 2 == 0:
            wanted[:m, :n] += 2 * a[:m, :16] @ b[:n, :16].T
        else:
            wanted[:n, :m] += (2 * a[:16, :m].T @ b[:16, :n]).T
        np.testing.assert_array_equal(got, wanted, f"case {index}")


@every_16_bit_format
@both_builds
def test_ldmatrix_mma_stmatrix(rng: np.random.Generator, name: str, hooks: bool) -> None:
    kernel = build(MMA, hooks=hooks, MULTIPLY=f"mma_m16n8k16_{'f16' if name == 'float16' else 'bf16'}")
    a, b = small_integers(rng, (16, 16)), small_integers(rng, (16, 8))
    a_bits, b_bits = (array.astype(FORMATS[name].dtype).view(np.uint16) for array in (a, b))
    d = np.zeros((16, 8), np.float32)
    copies = np.zeros((3, 16, 16), np.uint16)
    report = emulator.launch(kernel, [a_bits, b_bits, d, copies], grid=(1,), block=(32,))
    assert not report.findings
    np.testing.assert_array_equal(d, 1 + 2 * (a @ b))
    for copy in copies:
        np.testing.assert_array_equal(copy, a_bits)


def test_the_exponential_flushes_subnormal_results(rng: np.random.Generator) -> None:
    text = """
#include "ptx.cuh"
extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = ptx::ex2_approx_ftz(x[threadIdx.x]); }
"""
    edges = [0, -0.0, 1, -126, -126.0001, -149, -150, 127.99, 128, 1e-45, np.inf, -np.inf, np.nan]
    x = np.concatenate([np.array(edges, np.float32), rng.uniform(-140, 130, 500).astype(np.float32)])
    wanted = np.exp2(x.astype(np.float64)).astype(np.float32)
    wanted[wanted < np.finfo(np.float32).tiny] = 0
    emulator.launch(build(text), [x], grid=(1,), block=(len(x),))
    np.testing.assert_array_max_ulp(x[~np.isnan(x)], wanted[~np.isnan(wanted)], maxulp=1)


MISUSE_KERNEL = """
#include <mma.h>
#include "ptx.cuh"
using namespace nvcuda;
extern "C" __global__ void kernel(unsigned char* global, int which) {
  __shared__ __align__(128) unsigned char smem[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) smem[i] = global[i];
  __syncthreads();
  unsigned one[1] = {}, two[2] = {}, four[4] = {};
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a;
  if (which == 0) ptx::ldmatrix_x4(four, smem + threadIdx.x * 16 + 2);
  if (which == 1) ptx::ldmatrix_x1_trans(one, global);
  if (which == 2) ptx::stmatrix_x2(global, two);
  if (which == 3) wmma::load_matrix_sync(c, reinterpret_cast<float*>(smem + 16), 16, wmma::mem_row_major);
  if (which == 4) wmma::load_matrix_sync(a, reinterpret_cast<__half*>(smem), 20);
}
"""
MISUSE = (
    "ldmatrix.x4: wanted a row that starts on a 16-byte boundary",
    "ldmatrix.x1.trans: wanted the address of a row in shared memory, got an address outside shared memory",
    "stmatrix.x2: wanted the address of a row in shared memory, got an address outside shared memory",
    "load_matrix_sync: wanted a matrix that starts on a 32-byte boundary",
    "load_matrix_sync: wanted a leading dimension that is a multiple of 8 elements (16 bytes), got 20",
)


def test_misuse_says_what_was_wanted() -> None:
    kernel = build(MISUSE_KERNEL)
    for which, message in enumerate(MISUSE):
        with pytest.raises(EmulationError, match=re.escape(message)):
            emulator.launch(kernel, [np.zeros(1024, np.uint8), np.int32(which)], grid=(1,), block=(32,))


def test_what_does_not_exist_is_named() -> None:
    for statement, name in (
        ("x[0] = __fadd_rz(x[0], x[1]);", "__fadd_rz"),
        ("nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 8, float> c; x[0] = c.x[0];", "fragment"),
    ):
        with pytest.raises(CompileError, match=name):
            build(f'#include <mma.h>\nextern "C" __global__ void kernel(float* x) {{ {statement} }}')
