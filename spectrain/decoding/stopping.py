"""When an answer ends: at an end-of-sequence token, at a stop string, or with the budget. Token by token, in order, so
that every decoder ends where plain decoding does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from spectrain.errors import SpectrainError

Finish = Literal["eos", "stop", "budget"]


class TextStream:
    """Text of a growing list of ids, piece by piece.

    A piece is given out once no later token can change it: bytes of an unfinished character wait for their rest. (A
    stray byte behind one that was spelt in bytes is the exception, with tokenizers that then take back the whole run.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding goes on from ``start``, a piece before ``whole``, the last place between two characters: whether a
        # piece begins with a space depends on what it follows. ``shown`` characters from there on were given out.
        self._start = self._whole = self._shown = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """The new text after these tokens."""
        self._ids.extend(tokens)
        now = self._decode(self._ids[self._start :])
        certain = now.rstrip("�")  # one token may hold the end of a character and the beginning of the next
        piece = certain[self._shown :]
        self._shown += len(piece)
        if piece and certain == now:
            self._start, self._whole = self._whole, len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        return piece

    def flush(self) -> str:
        """What was still waiting; the answer has ended."""
        now = self._decode(self._ids[self._start :])
        piece, self._shown = now[self._shown :], len(now)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Stopping:
    """Ends one request's answer. ``text`` is the answer without the stop string, where there are stop strings.

    The first EOS ends it and is kept; so does the token that completes a stop string. Neither happens within the first
    ``shortest`` tokens: there the decoder forbids EOS, and stop strings are not looked for.
    """

    def __init__(self, budget: int, eos: Collection[int], stop: Sequence[str] = (), shortest: int = 0,
                 tokenizer: PreTrainedTokenizerBase | None = None) -> None:  # fmt: skip
        if stop and tokenizer is None:
            raise SpectrainError("stop strings need a tokenizer to read the answer with")
        self.budget, self.eos, self.stop, self.shortest = budget, frozenset(eos), tuple(stop), shortest
        self.count = 0
        self.finished: Finish | None = None if budget else "budget"
        self.text = ""
        self._stream = TextStream(tokenizer) if tokenizer is not None and stop else None

    @property
    def left(self) -> int:
        """Tokens that the budget still holds."""
        return self.budget - self.count

    def keep(self, tokens: Sequence[int]) -> list[int]:
        """As many of the new tokens as belong to the answer."""
        for number, token in enumerate(tokens, 1):
            self.count += 1
            if token in self.eos:
                self.finished = "eos"
            elif self._stream is not None and self._completes(token):
                self.finished = "stop"
            elif self.count == self.budget:
                self.finished = "budget"
            if self.finished:
                self._close(tokens[number - 1 : number])
                return list(tokens[:number])
        return list(tokens)

    def _close(self, last: Sequence[int]) -> None:
        """The text of an answer that no stop string ended is that of all its tokens."""
        if self._stream is not None and self.finished == "eos":
            self.text += self._stream.feed(last)
        if self._stream is not None and self.finished != "stop":
            self.text += self._stream.flush()

    def _completes(self, token: int) -> bool:
        assert self._stream is not None
        searched = len(self.text)
        self.text += self._stream.feed([token])
        if self.count < self.shortest:
            return False
        # A stop string may have begun before; what was searched already cannot hold a whole one.
        starts = [self.text.find(word, max(0, searched - len(word) + 1)) for word in self.stop]
        found = [start for start in starts if start >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; an empty one would end every answer at once."""
    if not isinstance(stop, str | Sequence):
        raise SpectrainError(f"stop {stop!r}: expected a string or a list of strings")
    words = (stop,) if isinstance(stop, str) else tuple(stop)
    for word in words:
        if not isinstance(word, str) or not word:
            raise SpectrainError(f"stop string {word!r}: expected text of at least one character")
    return words
