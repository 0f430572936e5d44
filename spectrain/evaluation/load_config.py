"""What is measured under load."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Batch = Annotated[int, Field(ge=1, le=4096)]
Context = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class LoadConfig(BaseModel):
    """Batches of requests, and the request rates that goodput is told for.

    ``request_rates`` change no measurement: they may be asked for later, of what was measured before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    batch: tuple[Batch, ...] = Field((1, 2, 4, 8, 16), min_length=1, description="requests a batch")
    context: tuple[Context, ...] = Field(
        (), description="cached tokens behind a verification; default as the measured requests have them half-way"
    )
    groups: int = Field(8, ge=2, description="batches of each size")
    repeats: int = Field(15, ge=1, description="forwards for each verification cost")
    request_rates: tuple[Rate, ...] = Field((), description="requests a second that goodput is told for")
