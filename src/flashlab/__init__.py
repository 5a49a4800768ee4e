"""flashlab: a reproducible lab for one question, how an attention kernel gets fast and what each step buys."""

from __future__ import annotations

from flashlab._version import __version__ as __version__

# Light: torch, CuPy and the driver are imported by the call, not by this.
from flashlab.attention import attention as attention
from flashlab.attention import emulate as emulate
from flashlab.attention import prepare as prepare
