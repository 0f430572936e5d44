"""A bar over answers, with tokens a second and how often a server was asked again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from spectrain.regenerate.answers import Row


class Progress:
    """``total`` answers, of which ``done`` were there before."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self._bar = tqdm(total=total, initial=done, desc="answers by the target", unit="chat", disable=not shown)
        self._started, self._tokens, self._retries = time.monotonic(), 0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._bar.close()

    def add(self, rows: Sequence[Row]) -> None:
        """Count finished rows and their tokens."""
        self._tokens += sum(len(row["answer_ids"]) for row in rows)
        self._show()
        self._bar.update(len(rows))

    def retried(self) -> None:
        """Count a request that has to be sent again."""
        self._retries += 1
        self._show()

    def _show(self) -> None:
        speed = self._tokens / max(time.monotonic() - self._started, 1e-9)
        retries = {"retries": self._retries} if self._retries else {}
        self._bar.set_postfix({"tokens": self._tokens, "tokens/s": f"{speed:.0f}", **retries}, refresh=False)
