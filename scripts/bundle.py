"""Fill build/bundle with what a GPU machine without internet lacks: wheels, and which commit its copy of the tree is.

The wheels are for Python 3.12 on x86-64 Linux. On the other machine, in a copy of this tree:

    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site build/bundle/*.whl
    export PYTHONPATH=/tmp/site:src
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from flashlab.record import provenance  # noqa: E402

PYTHON_VERSION = "3.12"
# pip takes only the platforms it is given, older ones not implied.
GLIBC_MINORS = (5, 12, *range(17, 40))
LIMIT_MB = 60


def names(path: Path) -> list[str]:
    """The package names in a list with `#` comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def pins(path: Path) -> dict[str, str]:
    """Package name to `name==version` from a constraints file."""
    return {line.split("==")[0]: line for line in names(path)}


def main() -> int:
    """Download the wheels and write provenance.json; exit status 0 when all came and they fit."""
    pinned = pins(ROOT / "constraints.txt")
    wanted = names(Path(__file__).with_name("bundle.txt"))
    unpinned = [name for name in wanted if name not in pinned]
    if unpinned:
        print(f"bundle.txt names what constraints.txt does not pin: {', '.join(unpinned)}", file=sys.stderr)
        return 1
    bundle = ROOT / "build" / "bundle"
    bundle.mkdir(parents=True, exist_ok=True)
    # Two versions of a package would stop the install on the other machine: start anew, pip's cache keeps it quick.
    for stale in bundle.glob("*.whl"):
        stale.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    command = [
        *(sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"),
        *(f"--python-version={PYTHON_VERSION}", "--implementation=cp", *platforms, "--platform=manylinux2014_x86_64"),
        *("--platform=manylinux1_x86_64", f"--dest={bundle}", *(pinned[name] for name in wanted)),
    ]
    status = subprocess.run(command, check=False).returncode
    if status:
        print(f"wanted {len(wanted)} wheels from pip, got exit status {status}", file=sys.stderr)
        return status
    wheels = sorted(bundle.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    provenance.write(bundle / "provenance.json")
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:7.2f} MB  {wheel.name}")
    total_mb = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{total_mb:7.2f} MB  {len(wheels)} wheels in {bundle}")
    source = provenance.source()
    dirty = ", dirty: commit first for a clean one" if source.dirty else ""
    print(f"records made from this bundle name commit {source.commit}{dirty}")
    if len(wheels) != len(wanted) or total_mb > LIMIT_MB:
        print(f"wanted {len(wanted)} wheels of at most {LIMIT_MB} MB together", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
