"""Facts as data: models of tables (`paths.table`) that refuse a field which there is not."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Facts(BaseModel):
    """A frozen model that takes its own fields alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)
