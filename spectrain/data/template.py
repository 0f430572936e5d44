"""A tokenizer's chat template as a function to ids, and where in them an answer begins and ends.

*Render boundaries*: an answer spans from the end of ``render(history + generation prompt)`` to the
end-of-turn token of ``render(history + answer)``. No generation tags are needed; a template without such
boundaries is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from spectrain.errors import SpectrainError

Turn = Mapping[str, str]  # {"role": ..., "content": ...}


class ChatTemplate:
    """A tokenizer's chat template as a function from messages to ids, with the place where an answer ends."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
        if not getattr(tokenizer, "chat_template", None):
            raise SpectrainError(
                f"{self.name} is missing; set tokenizer.chat_template (chat_template.jinja beside it) "
                "to the template that the model was trained and is served with"
            )

    def render(self, messages: Sequence[Turn], generation_prompt: bool) -> list[int]:
        """Ids of ``messages``; no special tokens beyond the template's own."""
        try:
            # return_dict: transformers 5 would give a BatchEncoding otherwise.
            ids = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
            )
        except Exception as error:  # templates raise whatever jinja or raise_exception() gives
            roles = ", ".join(message["role"] for message in messages)
            raise SpectrainError(f"{self.name} fails on a conversation of {roles}: {error}") from error
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise SpectrainError(f"{self.name} begins with two BOS tokens (id {bos}); remove one from the template")
        return list(ids)

    @cached_property
    def ending(self) -> list[int]:
        """What follows an answer's content, from the end-of-turn token on: ``[<|im_end|>, newline]``."""
        asked = {"role": "user", "content": "a"}
        answers = ({"role": "assistant", "content": content} for content in ("0", "1"))
        one, other = (self.render([asked, answer], generation_prompt=False) for answer in answers)
        after = one[len(one) - _common(one[::-1], other[::-1]) :]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        start = next((i for i, token in enumerate(after) if token in special), None)
        if start is None or one == other:
            raise SpectrainError(
                f"{self.name} puts no special token after an answer, so its end cannot be found; use a "
                "template that closes the assistant's turn with one, such as <|im_end|> or the EOS token"
            )
        return after[start:]

    def span(self, history: Sequence[Turn], answer: Turn) -> tuple[list[int], int]:
        """(ids up to the end-of-turn token, where the answer begins) for one answer after its history."""
        prompt = self.render(history, generation_prompt=True)
        full = self.render([*history, answer], generation_prompt=False)
        same = _common(prompt, full)
        end = len(full) - len(self.ending) + 1
        if same < len(prompt) or full[end - 1 :] != self.ending or end <= same:
            found = self.tokenizer.convert_ids_to_tokens(full[same : same + 3])
            wanted = self.tokenizer.convert_ids_to_tokens(prompt[same : same + 3])
            raise SpectrainError(
                f"{self.name} has no boundary between prompt and answer: at token {same} the prompt has "
                f"{wanted}, the finished turn {found}; expected prompt, answer, end of turn (the generation "
                "prompt must open the turn as the finished turn does)"
            )
        return full[:end], same


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
