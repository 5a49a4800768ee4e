"""`python -m flashlab` is `flashlab`."""

from __future__ import annotations

from flashlab.cli.app import main

if __name__ == "__main__":
    main()
