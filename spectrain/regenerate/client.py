"""Requests to one server, each sent again while its fault may pass. Messages never hold prompts or the key."""

from __future__ import annotations

import asyncio
import os
import random
import textwrap
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from spectrain.errors import SpectrainError
from spectrain.regenerate.config import ServerConfig

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a request is sent again, doubling
LONGEST_ORDER = 600.0  # seconds that a server may tell us to wait
PASSING = {408, 425, 429}  # of the refusals, those that may pass
WINDOW = 24  # characters that a server's message may not share with the prompt


class RefusedError(SpectrainError):
    """The server answered with this HTTP status; 0 where it gave none that says what is wrong."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class FailingError(RefusedError):
    """What may pass did not, in all tries; ``status`` is the last one's."""


class UnreadableError(Exception):
    """An answer that is none; worth another try."""


class Client:
    """Speaks JSON with ``config.url``, inside one event loop. ``on_retry`` hears of every request sent again."""

    def __init__(self, config: ServerConfig, on_retry: Callable[[], None] = lambda: None) -> None:
        self._config, self._on_retry, self._key = config, on_retry, _key(config)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # One deadline of our own, for the whole answer: the library's are for its parts.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    async def ask(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """What ``read`` makes of the server's answer to GET ``path``, or to POST with a ``body``.

        Busy and failing servers, broken connections, timeouts and answers that ``read`` finds UnreadableError are asked
        again ``retries`` times, then they are a FailingError. Raises RefusedError for what is refused at once.
        """
        url, tries = f"{self._config.url}{path}", self._config.retries + 1
        for attempt in range(tries):
            status, order = 0, None
            try:
                async with asyncio.timeout(self._config.timeout):
                    response = await self._http.request("POST" if body else "GET", url, json=body)
                if response.is_success:
                    return read(_json(response))
                status, fault = response.status_code, f"HTTP {self._fault(response, body)}"
                if status not in PASSING and (status < 500 or status == 501):
                    raise RefusedError(f"{url} refuses ({fault})", status)
                order = _ordered_wait(response)
            except TimeoutError:
                fault = f"no answer within {self._config.timeout:g} seconds; regenerate.server.timeout sets them"
            except httpx.RequestError as error:
                fault = f"{type(error).__name__}: {error}".rstrip(": ")
            except UnreadableError as error:
                fault = f"answered with {error}"
            if attempt < tries - 1:
                self._on_retry()
                await asyncio.sleep(_wait(attempt, order))
        raise FailingError(
            f"{url}: asked {tries} times in vain; the last time: {fault}. {_remedy(status)}, or have it "
            "asked more often with regenerate.server.retries",
            status,
        )

    def _fault(self, response: httpx.Response, body: dict[str, Any] | None) -> str:
        """Status and the server's own words."""
        status, said = f"{response.status_code} {response.reason_phrase}".strip(), _said(response)
        if self._key:
            said = said.replace(self._key, "***")
        if body and _repeats(said, body):
            said = "its message repeats the prompt and is left out"
        return f"{status}: {said}" if said else status


def _remedy(status: int) -> str:
    if status == 429:
        return "Lower regenerate.server.concurrency"
    if status >= 500:
        return "Mend the server, whose own log may say more"
    return "See that the server runs and that regenerate.server.url is its address"


def _key(config: ServerConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise SpectrainError(
            f"regenerate.server.api_key_env names {config.api_key_env}, which is not set in the environment; set it, "
            "or leave the key out"
        )
    return key


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise UnreadableError("what is not JSON") from None


def _ordered_wait(response: httpx.Response) -> float | None:
    """Seconds of a Retry-After header, which gives them or a date."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_ORDER) if seconds == seconds else None


def _wait(attempt: int, order: float | None) -> float:
    """Seconds before try ``attempt`` + 2; spread, so that those refused together do not come back together."""
    return max(order or 0.0, min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1))


def _said(response: httpx.Response) -> str:
    """The message of an error as OpenAI (error.message), FastAPI (detail) and others word it."""
    try:
        found = response.json()
    except ValueError:
        return ""  # a proxy's page
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    if isinstance(found, list):  # FastAPI names each wrong field; what it found there is left out
        found = "; ".join(
            f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in found if isinstance(e, dict)
        )
    return textwrap.shorten(found, 400, placeholder=" …") if isinstance(found, str) else ""


def _repeats(said: str, body: dict[str, Any]) -> bool:
    """Whether a server's message quotes what was asked."""
    said = said.replace("\\n", "\n").replace('\\"', '"')
    windows = {said[i : i + WINDOW] for i in range(max(1, len(said) - WINDOW + 1))}
    for text in map(str.strip, _texts(body.get("messages", []))):
        if len(text) >= WINDOW and any(window in " ".join(text.split()) or window in text for window in windows):
            return True
        if 3 < len(text) < WINDOW and text in said:
            return True
    ids = body.get("prompt", [])
    return any(str(ids[i : i + 4])[1:-1] in said for i in range(max(0, len(ids) - 3)))


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, roles and keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("role", "type"):
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
