"""Draw data/<gpu>/figures/ladder.svg, the chart that README.md shows, from the GPU's newest records.

python scripts/chart.py [GPU]...        default: every GPU with data
"""

from __future__ import annotations

import sys

from flashlab.core.errors import FlashlabError
from flashlab.query import select
from flashlab.record import store
from flashlab.show import charts


def main(gpus: list[str]) -> int:
    """Exit status 0 when every chart was drawn."""
    try:
        for gpu in gpus or store.gpus():
            shown = select.load(store.require_runs(gpu))
            chart = charts.ladder(shown.rows(), beside=shown.beside())
            # On a solid ground: a README is shown on light and on dark pages, and cannot know which.
            print(store.rewrite(gpu, f"figures/{chart.name}.svg", chart.svg["wide"]))
    except FlashlabError as error:
        print(f"chart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
