"""Base model of the TOML tables (`paths.table`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Facts(BaseModel):
    """Frozen model that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
