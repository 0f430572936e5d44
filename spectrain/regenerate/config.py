"""How the target answers: sampling, and where it runs."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spectrain.exact.sampler import Sampler


class ServerConfig(BaseModel):
    """A server of the target with OpenAI's endpoints. Sampled ids come from those that return them, as vLLM does."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    url: str = Field(description="up to the version: http://localhost:8000/v1")
    model: str = Field(min_length=1, description="the name that the server gives it")
    concurrency: int = Field(16, ge=1, description="requests at a time")
    timeout: float = Field(120, gt=0, description="seconds for one answer")
    retries: int = Field(5, ge=0, description="of a request that the server was too busy for, or that broke off")
    api_key_env: str | None = Field(None, description="environment variable with the key; without it none is sent")

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"found {url!r}, expected http:// or https://, for instance http://localhost:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:  # recipes and messages show it
            raise ValueError(
                "credentials or parameters in the address; give a key by api_key_env, and the address alone"
            )
        return url.rstrip("/")


class RegenerateConfig(BaseModel):
    """How the target answers the prompts that a drafter will be trained on: here, or by ``server``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    sampler: Sampler = Field(default_factory=Sampler, description="the one you serve with")
    max_new_tokens: int = Field(256, ge=1)
    batch_size: int = Field(48, ge=1)
    seed: int = 0
    server: ServerConfig | None = Field(None, description="answers from a server; null answers here, in batches")
