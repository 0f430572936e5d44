"""What the Hub and the way to it refuse, in words: why, and what to do. What their libraries say comes after."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

LONGEST = 300  # letters of what a library says itself


def refused(error: BaseException, name: str, revision: str | None = None) -> str:
    """Why the repository ``name`` was not to be had, for people, and the error's own words."""
    own = textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST)
    reason = _reason(list(_chain(error)), name, revision)
    return f"{reason} ({own})" if reason else own


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from: libraries wrap those of others."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(errors: list[BaseException], name: str, revision: str | None) -> str:
    if Path(name).exists():  # nobody was asked for it
        return ""

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in errors)

    answers = (error.response for error in errors if isinstance(error, HfHubHTTPError))
    status = next((answer.status_code for answer in answers if answer is not None), 0)
    login = "log in with hf auth login, or set HF_TOKEN"
    if among(GatedRepoError):
        return f"{name} is gated: ask for access on {constants.ENDPOINT}/{name}, and {login}"
    if among(RepositoryNotFoundError):
        return f"the Hub has no {name}, or does not show it to you: check the id; if it is private, {login}"
    if among(RevisionNotFoundError):
        return f"{name} has no revision {revision or 'main'}: give a branch, a tag or a commit that it has"
    if status in (401, 403):
        return f"the Hub does not let you read {name}: {login}, with a token that may"
    if status == 429:
        return "the Hub has had too many requests from here: wait a few minutes, and log in, which allows more"
    if status >= 500:
        return f"the Hub is in trouble itself (status {status}): try again later"
    if among(HFValidationError):
        return f"{name} is no Hub id, which is ORG/NAME"
    if among(OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and among(LocalEntryNotFoundError)):
        return f"HF_HUB_OFFLINE is set, and {name} is not in the cache: fetch it before, with hf download {name}"
    if among(LocalEntryNotFoundError, ConnectionError, TimeoutError):
        return (
            f"the Hub does not answer, and {name} is not in the cache: check the network (HTTPS_PROXY, HF_ENDPOINT), "
            "and try again"
        )
    return ""
