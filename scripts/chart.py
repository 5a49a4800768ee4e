"""Draw data/<gpu>/figures/ladder.svg, the chart that README.md shows, from the GPU's newest records.

python scripts/chart.py [GPU]...        default: every GPU with data
"""

from __future__ import annotations

import sys

from flashlab.core.errors import FlashlabError
from flashlab.core.paths import DATA, writable_dir
from flashlab.query import select
from flashlab.record import store
from flashlab.show import charts


def main(gpus: list[str]) -> int:
    """Exit status 0 when every chart was drawn."""
    try:
        for gpu in gpus or store.gpus():
            shown = select.load(gpu)
            chart = charts.ladder(shown.rows(), beside=shown.beside())
            path = writable_dir(DATA / gpu / "figures", "charts") / f"{chart.name}.svg"
            # On a solid ground: a README is shown on light and on dark pages, and cannot know which.
            path.write_text(chart.svg["wide"], encoding="utf-8")
            store.write_checksums(gpu)
            print(path)
    except FlashlabError as error:
        print(f"chart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
