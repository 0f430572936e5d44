"""Whatever the Hub refuses is told in words: which repository, why, and what to do; the library's own come after."""

from types import SimpleNamespace

import pytest
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

from spectrain.fetching import refused


def answered(kind, status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("Client Error.\n\n\nRequest ID: 1", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            answered(GatedRepoError, 403),
            "is gated: ask for access on https://huggingface.co/org/name, and log in",
        ),
        (answered(RepositoryNotFoundError, 401), "the Hub has no org/name, or does not show it to you: check the id"),
        (answered(RevisionNotFoundError, 404), "org/name has no revision v2: give a branch"),
        (answered(HfHubHTTPError, 403), "does not let you read org/name: log in with hf auth login, or set HF_TOKEN"),
        (answered(HfHubHTTPError, 429), "too many requests"),
        (answered(HfHubHTTPError, 503), "in trouble itself (status 503)"),
        (HFValidationError("bad"), "org/name is no Hub id"),
        (OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set"),
        (
            LocalEntryNotFoundError("gone"),
            "does not answer, and org/name is not in the cache: check the network",
        ),
        (ConnectionError("reset"), "the Hub does not answer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_refusal_says_what_to_do_and_then_what_the_library_said(monkeypatch, error, said):
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    wrapped = OSError("org/name is not a local folder")
    wrapped.__cause__ = error
    for found in (error, wrapped):
        text = refused(found, "org/name", "v2")
        assert said in text
        assert text.endswith(f"({type(found).__name__}: {' '.join(str(found).split())})")


def test_offline_is_told_from_a_network_that_is_down(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hf download org/name" in refused(LocalEntryNotFoundError("gone"), "org/name")


def test_what_did_not_come_from_the_hub_is_told_as_it_is(tmp_path):
    assert refused(ValueError("a b"), "org/name") == "ValueError: a b"
    error = OSError("no config.json")
    error.__cause__ = HFValidationError("a path is no id")
    assert refused(error, str(tmp_path)) == "OSError: no config.json"
