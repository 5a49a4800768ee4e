from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashlab.build import symbols
from flashlab.build.symbols import EMULATION, Frame
from flashlab.core.paths import KERNELS, ROOT

COMPILER = next((name for name in ("g++", "clang++") if shutil.which(name)), None)

# Each function records where it was called from: return addresses, as the emulator's hooks see them.
PROGRAM = """\
#include <cstdint>
#include <cstdio>

extern "C" char __executable_start;
__attribute__((noinline)) void hook() {
  const char* const place = static_cast<char*>(__builtin_return_address(0));
  std::printf("%zu\\n", static_cast<std::size_t>(place - &__executable_start));
}

inline __attribute__((always_inline)) void innermost() {
  hook();  // line 11
}

template <int N>
inline __attribute__((always_inline)) void middle() {
  innermost();  // line 16
}

__attribute__((noinline)) void outer() {
  hook();  // line 20
  middle<64>();  // line 21
}

int main() {
  outer();
  return 0;
}
"""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ or clang++")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """An executable, its source, and the places that it prints."""
    folder = tmp_path_factory.mktemp("symbols")
    source, executable = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM, encoding="utf-8")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-g1", "-O1", "-fPIE", "-pie", "-o", executable, source], check=True)
    done = subprocess.run([executable], check=True, capture_output=True, text=True)
    return executable, source, [int(line) for line in done.stdout.split()]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The choice of the tool is made anew in this test and after it."""
    symbols._tool.cache_clear()
    monkeypatch.setattr(symbols, "_tool", symbols._tool.__wrapped__)
    return monkeypatch


def frame(path: str, line: int = 1) -> Frame:
    return Frame(ROOT / path, line)


@needs_compiler
@pytest.mark.parametrize("tool", ["addr2line", "llvm-symbolizer"])
def test_inlined_calls_come_innermost_first(
    tool: str, program: tuple[Path, Path, list[int]], only: pytest.MonkeyPatch
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    only.setattr(symbols, "_TOOLS", {tool: symbols._TOOLS[tool]})
    executable, source, (plain, inlined) = program
    found = symbols.resolve(executable, [inlined, plain, plain])
    assert found[plain] == (Frame(source, 20),)
    assert [(f.file, f.line) for f in found[inlined]] == [(source, 11), (source, 16), (source, 21)]
    assert found[inlined][0].text == "hook();  // line 11"


@needs_compiler
def test_a_place_without_source_has_no_frames(program: tuple[Path, Path, list[int]]) -> None:
    executable, _, (plain, _) = program
    found = symbols.resolve(executable, [1 << 40, plain, 1])
    assert found[1 << 40] == found[1] == ()
    assert len(found[plain]) == 1 or symbols.missing() is not None
    assert symbols.site(()) is None


def test_no_executable_is_no_error(tmp_path: Path) -> None:
    assert symbols.resolve(tmp_path / "none", [1, 2]) == {1: (), 2: ()}
    assert symbols.resolve(tmp_path / "none", []) == {}


def test_without_a_tool_places_stay_numbers(tmp_path: Path, only: pytest.MonkeyPatch) -> None:
    only.setenv("PATH", str(tmp_path))
    assert symbols.resolve(tmp_path / "program", [7]) == {7: ()}
    note = symbols.missing()
    assert note is not None
    assert "places are shown as numbers" in note
    assert "Installing one works" in note


def test_a_tool_that_fails_or_babbles(tmp_path: Path, only: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake"
    only.setattr(symbols, "_TOOLS", {"/bin/sh": (str(fake),)})
    for babble in (
        "exit 1",
        "echo nonsense",
        "echo 0x1",
        "echo 0x1; echo ??:0; echo 0x2",
        "printf '\\377'",
    ):
        fake.write_text(f"#!/bin/sh\n{babble}\n", encoding="utf-8")
        fake.chmod(0o755)
        assert symbols.resolve(tmp_path, [1, 2]) == {1: (), 2: ()}


def test_the_site_is_outside_of_the_emulation() -> None:
    emulated = Frame(EMULATION / "ptx.cuh", 3)
    common, kernel = frame("kernels/common/tiles.cuh", 40), frame("kernels/05_wmma.cu", 120)
    wrapper = Frame(Path("/cache/generated.cpp"), 2)
    frames = (emulated, common, kernel, wrapper)
    assert symbols.site(frames) == common
    assert symbols.site((emulated,)) == emulated
    assert common.shown == "kernels/common/tiles.cuh:40"
    assert wrapper.shown == "/cache/generated.cpp:2"
    assert frame("kernels/05_wmma.cu", 0).shown == "kernels/05_wmma.cu"


def test_a_line_of_source_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "edited.cu"
    path.write_text("  first\nsecond", encoding="utf-8")
    assert Frame(path, 1).text == "first"
    path.write_text("now longer\nsecond", encoding="utf-8")
    assert Frame(path, 1).text == "now longer"
    assert Frame(path, 9).text == ""
    assert Frame(tmp_path / "none.cu", 1).text == ""
    first = next(KERNELS.glob("00_*.cu"))
    assert Frame(first, 1).text == first.read_text(encoding="utf-8").splitlines()[0].strip()


def test_what_addr2line_writes() -> None:
    text = (
        "0x0000000000001149\n/a/b/../tiles.cuh:12 (discriminator 3)\n/a/k.cu:?\n"
        "0x0000000000000001\n??:0\n0x0000000000000002\n??:?\n"
    )
    assert symbols._read(text) == [
        (Frame(Path("/a/tiles.cuh"), 12), Frame(Path("/a/k.cu"), 0)),
        (),
        (),
    ]
