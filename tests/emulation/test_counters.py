"""kernels/emulation/runtime/counters.cpp: lanes' accesses into requests, and what a request costs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from flashlab.core.paths import DATA, KERNELS, ROOT

COMPILER = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++ or clang++")

LANES = range(32)
GLOBAL_BASE = 1 << 40

# Obeys one line of its input after another, then prints what was counted.
DRIVER = """\
#include <cstdio>
#include <string>

#include "runtime/counters.h"

using emu::Kind, emu::Space, emu::Place;

int main() {
  emu::Counters all, one;
  char command[16];
  while (std::scanf("%15s", command) == 1) {
    const std::string what = command;
    long a = 0, place = 0, address = 0;
    unsigned bytes = 0;
    int space = 0, write = 0, kind = 0;
    if (what == "block" && std::scanf("%ld", &a) == 1) one.begin_block(static_cast<int>(a));
    if (what == "flush" && std::scanf("%ld", &a) == 1) one.flush(static_cast<int>(a));
    if (what == "end") one.end_block();
    if (what == "merge") {
      all.merge(one);
      one = emu::Counters();
    }
    if (what == "access" &&
        std::scanf("%ld %ld %ld %u %d %d %d", &a, &place, &address, &bytes, &space, &write, &kind) == 7)
      one.access(static_cast<int>(a), reinterpret_cast<Place>(place), static_cast<unsigned long>(address), bytes,
                 static_cast<Space>(space), write != 0, static_cast<Kind>(kind));
  }
  all.merge(one);
  for (const auto& line : all.lines()) {
    std::printf("%lu %d %d %d %u", reinterpret_cast<unsigned long>(line.place), static_cast<int>(line.space),
                line.write, static_cast<int>(line.kind), line.bytes);
    for (const auto number :
         {line.requests, line.wavefronts, line.ideal_wavefronts, line.sectors, line.ideal_sectors})
      std::printf(" %lu", static_cast<unsigned long>(number));
    std::printf("\\n");
  }
}
"""


@dataclass(frozen=True)
class Line:
    place: int
    space: int
    write: int
    kind: int
    bytes: int
    requests: int
    wavefronts: int
    ideal_wavefronts: int
    sectors: int
    ideal_sectors: int


@dataclass(frozen=True)
class Access:
    """What one lane does; a place is a place of the program."""

    place: int = 0x100
    bytes: int = 4
    space: int = 0
    write: int = 0
    kind: int = 0

    def at(self, address: int, thread: int) -> str:
        return f"access {thread} {self.place} {address} {self.bytes} {self.space} {self.write} {self.kind}"


SHARED, GLOBAL = 0, 1
PLAIN, MATRIX, COPY, BULK = 0, 1, 2, 3

Driver = Callable[[str], str]
Count = Callable[[Iterable[str]], list[Line]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("counters")
    source, program = folder / "driver.cpp", folder / "driver"
    source.write_text(DRIVER, encoding="utf-8")
    emulation = KERNELS / "emulation"
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-I", emulation, "-o", program]
    subprocess.run([*command, source, emulation / "runtime" / "counters.cpp"], check=True)

    def run(commands: str) -> str:
        return subprocess.run([program], input=commands, text=True, capture_output=True, check=True).stdout

    return run


@pytest.fixture
def count(driver: Driver) -> Count:
    def run(commands: Iterable[str]) -> list[Line]:
        text = driver("\n".join(["block 64", *commands, "end"]))
        return [Line(*map(int, line.split())) for line in text.splitlines()]

    return run


def warp(access: Access, addresses: Sequence[int], order: Iterable[int] = LANES) -> Iterator[str]:
    """One request of a warp; a lane whose address is negative takes no part."""
    return (access.at(addresses[lane], lane) for lane in order if addresses[lane] >= 0)


def cost(count: Count, access: Access, addresses: Sequence[int]) -> tuple[int, int]:
    """Of one request: wavefronts and their ideal, or sectors and theirs."""
    (line,) = count(warp(access, addresses))
    assert line.requests == 1
    if access.space == GLOBAL:
        assert (line.wavefronts, line.ideal_wavefronts) == (0, 0)
        return line.sectors, line.ideal_sectors
    assert (line.sectors, line.ideal_sectors) == (0, 0)
    return line.wavefronts, line.ideal_wavefronts


@pytest.mark.parametrize(
    ("what", "offset", "wavefronts"),
    [
        ("floats side by side", lambda i: 4 * i, 1),
        ("halves side by side", lambda i: 2 * i, 1),
        ("backwards", lambda i: 4 * (31 - i), 1),
        ("every second float", lambda i: 8 * i, 2),
        ("every fourth", lambda i: 16 * i, 4),
        ("a column of 32 floats a row", lambda i: 128 * i, 32),
        ("a column of 33 floats a row", lambda i: 132 * i, 1),
        ("one for all", lambda i: 64, 1),
        ("two words of one bank", lambda i: i % 2 * 128, 2),
        ("31 lanes on one word, one beside it", lambda i: 128 if i == 31 else 0, 2),
        ("one for two", lambda i: i // 2 * 4, 1),
        ("even lanes only", lambda i: 4 * i if i % 2 == 0 else -1, 1),
        ("one lane", lambda i: 8 if i == 17 else -1, 1),
    ],
)
@pytest.mark.parametrize("write", [0, 1])
def test_banks_of_narrow_accesses(
    count: Count, what: str, offset: Callable[[int], int], wavefronts: int, write: int
) -> None:
    narrow = 2 if what.startswith("halves") else 4
    assert cost(count, Access(bytes=narrow, write=write), [offset(i) for i in LANES]) == (wavefronts, 1)


@pytest.mark.parametrize(
    ("what", "width", "offset", "load", "store", "ideal_load"),
    [
        ("side by side", 8, lambda i: 8 * i, 2, 2, 2),
        ("side by side", 16, lambda i: 16 * i, 4, 4, 4),
        ("every second", 8, lambda i: 16 * i, 4, 4, 2),
        ("every second", 16, lambda i: 32 * i, 8, 8, 4),
        ("rows of 64 halves", 16, lambda i: 128 * i, 32, 32, 4),
        ("rows of 72 halves", 16, lambda i: 144 * i, 4, 4, 4),
        ("swizzled rows of 64 halves", 16, lambda i: 128 * i + (i % 8 ^ 5) * 16, 4, 4, 4),
        ("one for all", 8, lambda i: 8, 1, 2, 1),
        ("one for all", 16, lambda i: 16, 2, 4, 2),
        ("one for two", 8, lambda i: i // 2 * 8, 1, 2, 1),
        ("one for two", 16, lambda i: i // 2 * 16, 2, 4, 2),
        ("one for two, two apart", 16, lambda i: (i // 4 * 2 + i % 2) * 16, 2, 4, 2),
        ("one for two, four apart", 16, lambda i: (i // 8 * 4 + i % 4) * 16, 4, 4, 2),
        ("one for two, but in the same banks", 8, lambda i: i % 16 // 2 * 8 + i // 16 * 128, 2, 2, 1),
        ("eight lanes", 16, lambda i: 16 * i if i < 8 else -1, 1, 1, 1),
        ("sixteen lanes", 8, lambda i: 8 * i if i < 16 else -1, 1, 1, 1),
    ],
)
def test_banks_of_wide_accesses(
    count: Count, what: str, width: int, offset: Callable[[int], int], load: int, store: int, ideal_load: int
) -> None:
    addresses = [offset(i) for i in LANES]
    assert cost(count, Access(bytes=width), addresses) == (load, ideal_load), what
    active_parts = len({lane * width // 128 for lane in LANES if addresses[lane] >= 0})
    assert cost(count, Access(bytes=width, write=1), addresses) == (store, active_parts), what


@pytest.mark.parametrize(
    ("stride", "swizzle", "wavefronts"),
    [(128, False, 32), (144, False, 4), (128, True, 4), (256, False, 32)],
)
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_banks_of_matrices(count: Count, stride: int, swizzle: bool, wavefronts: int, matrices: int) -> None:
    lanes = 8 * matrices
    rows = [stride * i + (i % 8 * 16 if swizzle else 0) if i < lanes else -1 for i in LANES]
    expected = (wavefronts * matrices // 4, matrices)
    assert cost(count, Access(bytes=16, kind=MATRIX), rows) == expected
    assert cost(count, Access(bytes=16, kind=MATRIX, write=1), rows) == expected


def test_matrices_that_share_rows_do_not_share_wavefronts(count: Count) -> None:
    assert cost(count, Access(bytes=16, kind=MATRIX), [0] * 32) == (4, 4)


@pytest.mark.parametrize(
    ("what", "width", "offset", "sectors", "ideal"),
    [
        ("side by side", 2, lambda i: 2 * i, 2, 2),
        ("side by side", 4, lambda i: 4 * i, 4, 4),
        ("side by side", 16, lambda i: 16 * i, 16, 16),
        ("backwards", 4, lambda i: 124 - 4 * i, 4, 4),
        ("off by a half", 2, lambda i: 2 * i + 2, 3, 2),
        ("every second", 4, lambda i: 8 * i, 8, 4),
        ("a row each", 2, lambda i: 128 * i, 32, 2),
        ("a row each", 16, lambda i: 256 * i, 32, 16),
        ("one for all", 2, lambda i: 66, 1, 1),
        ("shuffled", 4, lambda i: 4 * (i * 13 % 32), 4, 4),
        ("shuffled, a sector each", 4, lambda i: 32 * (i * 13 % 32), 32, 4),
        ("a few lanes", 4, lambda i: 4 * i if i < 3 else -1, 1, 1),
    ],
)
def test_sectors(count: Count, what: str, width: int, offset: Callable[[int], int], sectors: int, ideal: int) -> None:
    addresses = [-1 if offset(i) < 0 else GLOBAL_BASE + offset(i) for i in LANES]
    for write in (0, 1):
        assert cost(count, Access(bytes=width, space=GLOBAL, write=write), addresses) == (sectors, ideal), what


@pytest.mark.parametrize("order", [list(LANES), list(reversed(LANES)), [i * 13 % 32 for i in LANES]], ids=str)
@pytest.mark.parametrize("steps", [3, 100])
def test_lanes_run_one_after_another(count: Count, order: list[int], steps: int) -> None:
    load, store = Access(place=0x10), Access(place=0x20, write=1)
    commands = []
    for lane in order:
        for step in range(steps):
            commands.append(load.at(1024 * step + 4 * lane, lane))
            commands.append(store.at(128 * lane, lane))
    found = count(commands)
    assert [(line.place, line.write) for line in found] == [(0x10, 0), (0x20, 1)]
    assert [line.requests for line in found] == [steps, steps]
    assert [line.wavefronts for line in found] == [steps, 32 * steps]
    assert [line.ideal_wavefronts for line in found] == [steps, steps]


def test_warps_are_apart_and_flushes_part_requests(count: Count) -> None:
    access = Access()
    first, second = ([access.at(4 * lane, lane + base) for lane in LANES] for base in (0, 32))
    assert [line.requests for line in count([*first, *second])] == [2]
    # Half a warp before a barrier and half of it after are two requests; a flush of the other warp changes nothing.
    assert [line.requests for line in count([*first[:16], "flush 0", *first[16:]])] == [2]
    assert [line.requests for line in count([*first[:16], "flush 1", *first[16:]])] == [1]
    assert count(["flush 0", "flush 1"]) == []


def test_divergence(count: Count) -> None:
    one_side, other_side = Access(place=0x10), Access(place=0x20)
    found = count([(one_side if lane % 2 else other_side).at(4 * lane, lane) for lane in LANES])
    assert [(line.place, line.requests, line.wavefronts) for line in found] == [(0x10, 1, 1), (0x20, 1, 1)]
    # A loop whose lanes leave it one after another: the longest one's steps.
    found = count([one_side.at(128 * step + 4 * lane, lane) for lane in LANES for step in range(lane)])
    assert [(line.requests, line.wavefronts) for line in found] == [(31, 31)]


def test_one_place_may_do_several_things(count: Count) -> None:
    accesses = [Access(), Access(write=1), Access(space=GLOBAL), Access(bytes=8), Access(bytes=16, kind=MATRIX)]
    found = count([access.at(16 * lane, lane) for lane in LANES for access in accesses])
    assert {(line.bytes, line.space, line.write, line.kind) for line in found} == {
        (access.bytes, access.space, access.write, access.kind) for access in accesses
    }
    assert len({line.place for line in found}) == 1


def test_a_copy_reads_and_writes(count: Count) -> None:
    read, write = Access(bytes=16, space=GLOBAL, kind=COPY), Access(bytes=16, write=1, kind=COPY)
    commands = [a.at(address, i) for i in LANES for a, address in ((read, GLOBAL_BASE + 16 * i), (write, 144 * i))]
    to_shared, from_global = count(commands)
    assert (to_shared.kind, to_shared.write, to_shared.wavefronts, to_shared.ideal_wavefronts) == (COPY, 1, 4, 4)
    assert (from_global.kind, from_global.write, from_global.sectors, from_global.ideal_sectors) == (COPY, 0, 16, 16)


def test_bulk_copies_are_not_counted(count: Count) -> None:
    assert count(warp(Access(bytes=16, kind=BULK), [16 * i for i in LANES])) == []


def test_what_no_instruction_moves_at_once_is_several_accesses(count: Count) -> None:
    found = count(warp(Access(bytes=44), [44 * i for i in LANES]))
    assert {line.bytes: line.requests for line in found} == {16: 2, 8: 1, 4: 1}
    assert count(warp(Access(bytes=0), [0] * 32)) == []


def test_counters_are_merged(count: Count) -> None:
    def once(places: Iterable[int]) -> list[str]:
        return [line for place in places for line in warp(Access(place=place), [128 * i for i in LANES])]

    # More places than the table of them starts with, so that it grows.
    many = range(0x1000, 0x1000 + 8 * 1000, 8)
    found = count([*once(many), "end", "merge", "block 32", *once(many[::2]), "end", "merge", "block 32"])
    assert [line.place for line in found] == list(many)
    assert [(line.requests, line.wavefronts, line.ideal_wavefronts) for line in found] == [(2, 64, 2), (1, 32, 1)] * 500


def test_a_loop_too_long_to_log_is_extrapolated(count: Count) -> None:
    # 64 MiB of log hold 8192 chunks of 32 steps of a warp: these places would need 9420.
    steps = 5000
    places = [Access(place=0x1000 + 16 * i) for i in range(60)]
    commands = [
        access.at(128 * step + 4 * lane * (1 + i % 2), lane)
        for lane in (0, 31)
        for i, access in enumerate(places)
        for step in range(steps)
    ]
    found = count(commands)
    assert [line.requests for line in found] == [steps] * 60
    assert [line.wavefronts for line in found] == [steps] * 60


RECORDED = [
    pytest.param(json.loads(line), id=f"{path.parent.parent.name}-{path.stem}-{number}")
    for path in sorted(DATA.glob("*/counters/*.jsonl"))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines())
    if '"pattern"' in line and "pattern_copy" not in line
] or [pytest.param(None, marks=pytest.mark.skip(reason="needs data/<gpu>/counters: no GPU's counters are recorded"))]


@pytest.mark.parametrize("record", RECORDED)
def test_the_model_is_the_hardware(count: Count, record: dict[str, object]) -> None:
    """The patterns of scripts/counters_ncu.py, as Nsight Compute counted them."""
    kernel, offsets, metrics = str(record["kernel"]), record["offsets"], record["metrics"]
    assert isinstance(offsets, list)
    assert isinstance(metrics, dict)
    _, access, *width = kernel.split("_")
    kind = MATRIX if access == "matrix" else PLAIN
    write = int(access == "store")
    taken, _ = cost(count, Access(bytes=int(width[0]) if width else 16, write=write, kind=kind), offsets)
    prefix = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_"
    measured = metrics[f"{prefix}st.sum"] if write else metrics[f"{prefix}ld.sum"]
    assert taken == measured, record["pattern"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/counters_ncu.py."""
    spec = importlib.util.spec_from_file_location("counters_ncu", ROOT / "scripts" / "counters_ncu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_patterns_fit_their_kernels(script: ModuleType) -> None:
    patterns = script.patterns()
    assert len({(kernel, name) for kernel, name, _ in patterns}) == len(patterns)
    for kernel, name, offsets in patterns:
        width, _ = script.KERNELS[kernel]
        assert len(offsets) == 32, name
        assert all(at == -1 or (at % width == 0 and 0 <= at <= 8192 - width) for at in offsets), (kernel, name)


def test_sources_stand_alone() -> None:
    """Nothing of the scheduler or detector is needed to count."""
    text = "".join((KERNELS / "emulation" / "runtime" / name).read_text() for name in ("counters.h", "counters.cpp"))
    assert [line for line in text.splitlines() if line.startswith('#include "')] == [
        '#include "../runtime.h"',
        '#include "counters.h"',
    ]
    assert Path(KERNELS / "emulation" / "runtime.h").is_file()
