"""A target with its drafter, ready to answer: the short way in for programs.

from spectrain import load_bundle, generate, stream

speculator = load_bundle("runs/quickstart/bundle")
answer = generate(speculator, [{"role": "user", "content": "Which tables are there?"}], max_new_tokens=64)
print(answer.text, answer.tokens_per_round)
for piece in stream(speculator, "Once upon a time", temperature=0.7):
    print(piece.text, end="")
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from spectrain.bundle import load_drafter, resolve_bundle
from spectrain.data.conversations import Message, render_prompt
from spectrain.data.template import set_template_kwargs
from spectrain.decoding.decoder import Decoding
from spectrain.decoding.stopping import Finish, TextStream
from spectrain.decoding.trace import Generation
from spectrain.decoding.verification import Verification
from spectrain.drafters.base import Drafter
from spectrain.errors import SpectrainError
from spectrain.exact.penalties import Penalties
from spectrain.exact.sampler import Sampler
from spectrain.manifest import read_manifest, target_of, template_kwargs
from spectrain.shapes import Chain, Shape
from spectrain.target import Target, load_target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text taken as it is, token ids, or a chat (messages with role and content, through the target's chat template)."""

DEFAULT_K = 5


class Settings(TypedDict, total=False):
    """What ``generate`` and ``stream`` may be asked for, with the defaults."""

    max_new_tokens: int  # 256
    min_new_tokens: int  # 0
    temperature: float  # 0: greedy
    top_k: int | None  # it and top_p keep the likeliest token: at temperature 0 they change nothing
    top_p: float | None
    k: int | None  # draft tokens a round: 5
    shape: Shape | None  # or a tree
    stop: str | Sequence[str] | None
    eos_ids: Collection[int] | None  # None: the target's own
    seed: int  # 0; prompt i of a list draws from seed + i
    penalties: Penalties | None
    verification: Verification  # token, block; typical_lossy gives the target's law up
    timed: bool  # wait for the device between the parts of a round, so that their seconds are true


@dataclass(frozen=True)
class Speculator:
    """A target and the drafter that fits it; ``notes`` tell harmless differences of the pairing."""

    target: Target
    drafter: Drafter | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Generated ``tokens`` (EOS included), their ``text``, why it ended, and how: ``trace.rounds`` has what happened
    each round, ``trace`` the seconds of the whole."""

    tokens: list[int]
    text: str
    finished: Finish
    trace: Generation

    @property
    def lossy(self) -> bool:
        """Whether the verification that was asked for does not keep the target's law."""
        return self.trace.lossy

    @property
    def tokens_per_round(self) -> float | None:
        """Committed tokens a round (τ), the target's own included; None when the first token was the last."""
        rounds = self.trace.rounds
        return sum(r.committed for r in rounds) / len(rounds) if rounds else None


@dataclass(frozen=True)
class Piece:
    """What one round added: tokens, and the text that is final by now (bytes of a half-done character wait)."""

    tokens: list[int]
    text: str
    finished: Finish | None


def load_bundle(
    bundle: str | Path,
    *,
    target: str | Path | Target | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
) -> Speculator:
    """The drafter of a bundle (a folder, or a Hub id at ``revision``) and its target, checked against each other.

    ``target`` is a folder, a Hub id or a loaded one; by default the one that the bundle was trained for.
    Raises SpectrainError when either is damaged or they do not belong together.
    """
    for what, given, kinds in (("bundle", bundle, str | Path), ("target", target, str | Path | Target | None)):
        if not isinstance(given, kinds):
            raise SpectrainError(f"{what} {type(given).__name__}: expected a folder or a Hub id (or a loaded Target)")
    folder = resolve_bundle(bundle, revision)
    manifest = read_manifest(folder)
    recorded = manifest.target
    if not isinstance(target, Target):
        name = str(target) if target else target_of(folder, manifest)
        if not name:
            raise SpectrainError(f"{folder} does not say which target it belongs to; give target=")
        at = recorded.revision if name == recorded.name else None
        target = load_target(name, revision=at, dtype=dtype, device=device)
        set_template_kwargs(target.tokenizer, template_kwargs(manifest))
    drafter, _, notes = load_drafter(folder, target)
    return Speculator(target, drafter, notes)


# To the types a text is also a sequence of texts.
@overload
def generate(speculator: Speculator, prompt: Prompt, **settings: Unpack[Settings]) -> Answer: ...  # type: ignore[overload-overlap]
@overload
def generate(speculator: Speculator, prompt: Sequence[Prompt], **settings: Unpack[Settings]) -> list[Answer]: ...


def generate(speculator: Speculator, prompt: Any, **settings: Any) -> Any:
    """Answer a prompt, or a list of prompts in one batch.

    ``settings`` are those of `Settings`. The answer has the target's own law under them, whatever the drafter; only
    ``verification="typical_lossy"`` gives that up, and says so in ``answer.lossy``.
    """
    many = _is_batch(prompt)
    prompts = [_ids(one, speculator.target) for one in (prompt if many else [prompt])]
    decoding = _decoding(speculator, prompts, settings)
    for _ in decoding:
        pass
    answers = [_answer(result, speculator.target) for result in decoding.results]
    return answers if many else answers[0]


def stream(speculator: Speculator, prompt: Prompt, **settings: Unpack[Settings]) -> Iterator[Piece]:
    """Answer one prompt piece by piece, a round at a time; the texts add up to ``generate``'s.

    With stop strings, text that could still be the beginning of one is held back.
    """
    if _is_batch(prompt):
        raise SpectrainError(
            "stream answers one prompt: a text, token ids, or a chat; use generate for a list of prompts"
        )
    return _pieces(speculator, _decoding(speculator, [_ids(prompt, speculator.target)], settings))


def _pieces(speculator: Speculator, decoding: Decoding) -> Iterator[Piece]:
    text, given = "", 0
    reader = TextStream(speculator.target.tokenizer)
    for (event,) in decoding:
        text += reader.feed(event.tokens)
        if event.finished:
            text = _answer(decoding.results[0], speculator.target).text
        final = len(text) if event.finished else len(text) - _begun(text, decoding.stop)
        yield Piece(event.tokens, text[given:final], event.finished)
        given = final


def _seeds(seed: Any, count: int) -> list[int]:
    if type(seed) is not int:
        raise SpectrainError(f"seed {seed!r}: expected a whole number")
    return [seed + number for number in range(count)]


def _begun(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of the text that could be the beginning of a stop string."""
    return max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)


def _decoding(speculator: Speculator, prompts: list[list[int]], settings: Mapping[str, Any]) -> Decoding:
    known: dict[str, Any] = {"max_new_tokens": 256, "temperature": 0.0, "top_k": None, "top_p": None, "k": None,
                             "shape": None, "seed": 0}  # fmt: skip
    passed = set(Settings.__annotations__) - known.keys()
    for name in settings:
        if name not in known and name not in passed:
            raise SpectrainError(
                f"generate has no setting {name!r}; it has {', '.join(sorted({*known, *passed}))}. What is not listed "
                "would change the target's law in a way that is not verified exactly"
            )
    own = {**known, **{name: value for name, value in settings.items() if name in known}}
    if own["k"] is not None and own["shape"] is not None:
        raise SpectrainError("give k for a chain or shape for a tree, not both")
    drafter = speculator.drafter
    deepest = DEFAULT_K if drafter is None or drafter.deepest is None else min(DEFAULT_K, drafter.deepest)
    shape: Shape = own["shape"] or Chain(deepest if own["k"] is None else own["k"])
    more = {name: value for name, value in settings.items() if name in passed}
    if more.get("stop", ()) is None:
        more["stop"] = ()
    return Decoding(
        speculator.target,
        drafter,
        prompts,
        sampler=Sampler(own["temperature"], own["top_k"], own["top_p"]),
        shape=shape,
        max_new_tokens=own["max_new_tokens"],
        seeds=_seeds(own["seed"], len(prompts)),
        **{"timed": False, **more},
    )


def _is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts: anything in a list that is no token id and no message of a chat."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, list | tuple):
        raise SpectrainError(
            f"the prompt is a {type(prompt).__name__}; expected text, a list of token ids, a chat (a list of messages "
            "with role and content), or a list of those"
        )
    return not (prompt and isinstance(prompt[0], int | float | Mapping))


def _ids(prompt: Any, target: Target) -> list[int]:
    if isinstance(prompt, str):
        try:
            return list(target.tokenizer(prompt)["input_ids"])
        except TypeError as error:  # half a surrogate pair is no text
            raise SpectrainError(f"the prompt {prompt!r:.200} is no text that can be encoded: {error}") from error
    if not isinstance(prompt, list | tuple):
        raise SpectrainError(f"prompt {prompt!r:.200}: expected text, a list of token ids, or a chat")
    if prompt and isinstance(prompt[0], Mapping):
        return render_prompt([_message(turn) for turn in prompt], target.tokenizer)
    return list(prompt)


def _message(turn: Any) -> Message:
    fits = isinstance(turn, Mapping) and set(turn) == {"role", "content"}
    if not fits or not all(isinstance(value, str) for value in turn.values()):
        raise SpectrainError(f"a chat's message is {turn!r:.200}; expected role and content, both text")
    return Message(turn["role"], turn["content"])


def _answer(result: Generation, target: Target) -> Answer:
    text = result.text
    if text is None or result.finished != "stop":
        text = str(target.tokenizer.decode(result.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return Answer(result.tokens, text, result.finished, replace(result, text=text))
