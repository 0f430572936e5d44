"""What a command says: text for people; with ``--json`` one object on stdout, and all that is for people on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def telling(as_json: bool) -> Iterator[Callable[[Mapping[str, Any], str], None]]:
    """Yields what tells a result, given as values and as text; with JSON, whatever is printed here goes to stderr.

    NaN and infinity, which are no JSON, are refused.
    """
    stdout = sys.stdout

    def tell(document: Mapping[str, Any], text: str) -> None:
        print(text)
        if as_json:
            print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), file=stdout, flush=True)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield tell
