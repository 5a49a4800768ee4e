"""compute-sanitizer over every stage: memcheck, racecheck, initcheck, synccheck (experiments/sanitizer.py).

On a GPU machine with `compute-sanitizer`, torch and this tree:

    PYTHONPATH=src python3 scripts/sanitize.py --data data

launches each stage over head dims, masks, types and ragged lengths under each tool, and appends to
data/<gpu>/sanitizer/.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from flashlab.core.errors import FlashlabError  # noqa: E402
from flashlab.core.paths import DATA  # noqa: E402
from flashlab.experiments import sanitizer  # noqa: E402


def main() -> int:
    """Exit status 0 when every tool came to its end over every stage and found nothing."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over every stage.")
    parser.add_argument("--stages", nargs="*", help="ids; all if not given")
    parser.add_argument("--tools", nargs="*", default=list(sanitizer.TOOLS), help="all if not given")
    parser.add_argument("--timeout", type=float, default=sanitizer.OPTIONS.timeout_s, help="seconds for each tool")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded data")
    options = parser.parse_args()
    try:
        path, found = sanitizer.sanitize(
            options.stages,
            tools=options.tools,
            options=replace(
                sanitizer.OPTIONS,
                data=options.data,
                timeout_s=options.timeout,
                note=lambda line: print(line, file=sys.stderr),
            ),
        )
    except FlashlabError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 1
    for record in found:
        print(f"{record.tool} {record.stage}: {record.launches} launches, {record.errors} errors", *record.findings[:1])
    print(f"{len(found)} records in {path}")
    return 0 if all(record.clean for record in found) else 1


if __name__ == "__main__":
    sys.exit(main())
