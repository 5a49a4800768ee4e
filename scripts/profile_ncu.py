"""What Nsight Compute sees of each stage: units, issue slots, what warps wait for (src/flashlab/profiler.py).

On a GPU machine with `ncu`, torch and this tree:

    PYTHONPATH=src python3 scripts/profile_ncu.py --data data

profiles one launch of each stage at the first shape and appends to data/<gpu>/profiles/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from flashlab import profiler  # noqa: E402
from flashlab.errors import FlashlabError  # noqa: E402
from flashlab.paths import DATA  # noqa: E402
from flashlab.problem import DTYPES, FIRST_SHAPE, MASKS, Problem  # noqa: E402


def main() -> int:
    """Exit status 0 when every stage that takes the problem was profiled."""
    parser = argparse.ArgumentParser(description="Nsight Compute's profile of each stage.")
    parser.add_argument("--stages", nargs="*", help="ids; all if not given")
    parser.add_argument("--shape", default=FIRST_SHAPE, help="BxHxSxD or BxHxHkvxSqxSkxD")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--mask", choices=MASKS, default=MASKS[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded data")
    options = parser.parse_args()
    missed: list[str] = []

    def say(line: str) -> None:
        print(line, file=sys.stderr)
        if line.endswith("not profiled"):
            missed.append(line)

    try:
        problem = Problem.parse(options.shape, dtype=options.dtype, mask=options.mask)
        path, profiles = profiler.profile(options.stages, problem, data=options.data, say=say)
    except FlashlabError as error:
        print(f"profile_ncu: {error}", file=sys.stderr)
        return 1
    for found in profiles:
        waits = ", ".join(f"{name} {share:.0f} %" for name, share in list(found.states.items())[:3])
        print(f"{found.stage}: tensor {found.tensor_percent} %, issue {found.issue_percent} %, warps: {waits}")
    print(f"{len(profiles)} profiles in {path}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
