"""Answers by a server: how it is spoken to is found out first, then many requests run at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from spectrain.data.conversations import Conversation
from spectrain.data.template import ChatTemplate
from spectrain.decoding.requests import stream_seed
from spectrain.errors import SpectrainError
from spectrain.identity import common_prefix
from spectrain.regenerate.answers import Row, answer_row
from spectrain.regenerate.client import Client, FailingError, RefusedError, UnreadableError
from spectrain.regenerate.config import RegenerateConfig
from spectrain.regenerate.dialect import DIALECTS, Answer, Chat, Dialect, read_answer, request
from spectrain.target import Target

NOT_THE_DIALECT = {0, 401, 403, 408, 425, 429, 502, 503, 504}  # faults that say nothing about how it was asked
FEW = 3  # conversations that an error names
GOES_ON = "answers so far are kept, and the same command goes on with the others"
PROBE = ({"role": "user", "content": "Hello"},)


class Server:
    """The target as a server has it. ``recorded`` is the record of answers that are there: how those were asked for
    is how the others are. Without one the server is tried out: FailingError where it never answers, SpectrainError
    where it cannot be used."""

    def __init__(self, target: Target, config: RegenerateConfig, recorded: Any = None) -> None:
        assert config.server is not None
        self._target, self._config, self._server = target, config, config.server
        self._template = ChatTemplate(target.tokenizer)
        self._otherwise, self._asked = 0, dict[str, str]()
        try:
            self._dialect = Dialect.model_validate((recorded or {}).get("dialect"))
        except (ValidationError, AttributeError):
            self._dialect = asyncio.run(self._try_out())

    @property
    def record(self) -> Row:
        """What the answers depend on; where the server stands is no part of it."""
        return {"model": self._server.model, "dialect": self._dialect.model_dump()}

    def notes(self) -> list[str]:
        """What was seen and is no error."""
        if not self._otherwise:
            return []
        return [
            f"the server counted other prompt tokens than the local template gives in {self._otherwise} requests; is "
            "its chat template the local one?"
        ]

    def answer(self, todo: Sequence[Conversation], prompts: Mapping[str, list[int]],
               keep: Callable[[list[Row]], None], on_retry: Callable[[], None]) -> None:  # fmt: skip
        """Answer every conversation, and hand each row to ``keep`` as soon as it is there. A server that fails for good
        is a SpectrainError that names the conversations without an answer then."""
        try:
            asyncio.run(self._answer_all(todo, prompts, keep, on_retry))
        except FailingError as error:  # when it was asked what models it has
            raise SpectrainError(f"{error}; {GOES_ON}") from error
        except ExceptionGroup as group:  # one request failed for good, and the others were called off
            raise group.exceptions[0] from None

    async def _answer_all(self, todo: Sequence[Conversation], prompts: Mapping[str, list[int]],
                          keep: Callable[[list[Row]], None], on_retry: Callable[[], None]) -> None:  # fmt: skip
        waiting = iter(todo)

        async def work() -> None:
            for conversation in waiting:  # shared: each takes the next
                answer = await self._ask(client, conversation, prompts[conversation.id])
                keep([self._row(conversation, prompts[conversation.id], answer)])

        async with Client(self._server, on_retry) as client:
            await self._check_model(client)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._server.concurrency, len(todo))):
                    group.create_task(work())

    async def _ask(self, client: Client, conversation: Conversation, prompt: list[int]) -> Answer:
        seed = stream_seed(self._config.seed, conversation.id)
        chat = Chat([message.turn for message in conversation.prompt], conversation.tools, self._template.settings)
        body = request(self._dialect, self._config, self._server.model, prompt, chat, seed)
        try:
            self._asked[conversation.id] = conversation.named
            answer = await client.ask(f"/{self._dialect.endpoint}", read_answer, body)
            self._check_prompt(answer, prompt)
        except FailingError as error:
            raise SpectrainError(f"{self._unanswered(conversation)}: {error}; {GOES_ON}") from error
        except SpectrainError as error:
            raise SpectrainError(f"conversation {conversation.id!r}: {error}") from error
        del self._asked[conversation.id]
        self._otherwise += answer.prompt_tokens not in (None, len(prompt))
        return answer

    def _unanswered(self, conversation: Conversation) -> str:
        """The conversation whose answer was given up, and those that were asked for with it."""
        others = [named for name, named in self._asked.items() if name != conversation.id]
        more = f", nor have {', '.join(others[:FEW])}" if others else ""
        rest = f" and {len(others) - FEW} more" if len(others) > FEW else ""
        return f"conversation {conversation.named} has no answer{more}{rest}"

    # --- finding out ------------------------------------------------------------------------------------------

    async def _try_out(self) -> Dialect:
        """The first dialect that the server takes, asked for a prompt of ours."""
        prompt, chat = self._template.render(PROBE, True), Chat(PROBE, settings=self._template.settings)
        config = self._config.model_copy(update={"max_new_tokens": 2})
        sampler, refusals = config.sampler, []
        async with Client(self._server) as client:
            await self._check_model(client)
            for dialect in DIALECTS:
                body = request(dialect, config, self._server.model, prompt, chat, seed=0)
                try:
                    answer = await client.ask(f"/{dialect.endpoint}", read_answer, body)
                except RefusedError as refusal:
                    if refusal.status in NOT_THE_DIALECT:
                        raise
                    refusals.append(refusal)
                    continue
                if dialect.endpoint == "completions" and not _same_prompt(answer, prompt):
                    continue  # a list of numbers was something else to it
                self._check_prompt(answer, prompt)
                if not dialect.extended and sampler.top_k and not sampler.greedy:
                    raise SpectrainError(
                        f"the server does not take top_k: {refusals[-1]}; leave out regenerate.sampler.top_k, or use a "
                        "server that has it"
                    )
                return dialect.model_copy(update={"token_ids": answer.ids is not None})
        failing = [refusal for refusal in refusals if isinstance(refusal, FailingError)]
        if failing:  # one that breaks on each way that it does not refuse is broken
            last = f"{failing[-1]} ({len(failing)} ways of asking were tried, each as often)"
            raise FailingError(last, failing[-1].status)
        raise SpectrainError(f"no way of asking this server for answers is accepted; the last: {refusals[-1]}")

    async def _check_model(self, client: Client) -> None:
        """That the server has the model, and lets it see as many tokens as the recipe wants."""
        names = await client.ask("/models", _model_names)
        if self._server.model not in names:
            raise SpectrainError(
                f"{self._server.url} does not serve {self._server.model!r}; regenerate.server.model may be "
                f"{', '.join(map(repr, names)) or 'nothing: it lists no models'}"
            )

    # --- an answer's ids --------------------------------------------------------------------------------------

    def _check_prompt(self, answer: Answer, prompt: list[int]) -> None:
        """Training sees these prompt ids: the server must have seen them too."""
        found = answer.prompt_ids
        if found is None or found == prompt:
            return
        first = common_prefix(found, prompt)
        theirs, ours = (f"id {ids[first]}" if first < len(ids) else "nothing more" for ids in (found, prompt))
        raise SpectrainError(
            f"the server reads the prompt as other ids than the local tokenizer and chat template give: at token "
            f"{first} it has {theirs}, here it is {ours} ({len(found)} tokens against {len(prompt)}); serve the model "
            "with the target's tokenizer and chat template"
        )

    def _row(self, conversation: Conversation, prompt: list[int], answer: Answer) -> Row:
        if answer.ids is None:
            ids = self._tokenized(conversation, answer)
            return answer_row(conversation, answer.message, prompt, ids, answer.finished) | {"retokenized": True}
        target, ids, finished = self._target, answer.ids, answer.finished
        foreign = next((i for i in ids if i >= target.tokenizer_size), None)
        if foreign is not None:
            raise SpectrainError(
                f"conversation {conversation.id!r}: the server sampled id {foreign}, but the target's tokenizer has "
                f"{target.tokenizer_size} ids; is {self._server.model!r} the target of this recipe?"
            )
        if ids and ids[-1] in target.eos_ids:
            finished = "eos"
        elif finished == "eos":
            ids = [*ids, *self._end()]  # some servers leave it out; that it was sampled they say by "stop"
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        return answer_row(conversation, {"role": "assistant", "content": text}, prompt, ids, finished)

    def _end(self) -> list[int]:
        """The token that ended an answer: the template's end of turn where it is one of the EOS ids."""
        ids = (self._template.ending[0], self._target.tokenizer.eos_token_id, *self._target.eos_ids)
        return [i for i in ids if i in self._target.eos_ids][:1]

    def _tokenized(self, conversation: Conversation, answer: Answer) -> list[int]:
        """The ids of an answer's text in its finished turn, up to the end of turn; without that one if it was cut."""
        turn = {**answer.message}
        if "tool_calls" in turn:
            turn["tool_calls"] = [_with_objects(call) for call in turn["tool_calls"]]
        try:
            history = [message.turn for message in conversation.prompt]
            whole, start = self._template.span(history, turn, conversation.tools)
        except SpectrainError as error:
            raise SpectrainError(f"conversation {conversation.id!r}: {error}") from error
        return whole[start:] if answer.finished == "eos" else whole[start:-1]


def _model_names(found: Any) -> list[str]:
    listed = found.get("data") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise UnreadableError("no list of models")
    return [str(model["id"]) for model in listed if isinstance(model, dict) and "id" in model]


def _same_prompt(answer: Answer, prompt: list[int]) -> bool:
    """Whether a server took ids as ids, as far as its answer tells."""
    return answer.prompt_ids in (None, prompt) and answer.prompt_tokens in (None, len(prompt))


def _with_objects(call: Any) -> Any:
    """A tool call with its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call  # cut in the middle: the text as it is
