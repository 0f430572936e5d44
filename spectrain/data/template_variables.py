"""Which variables a chat template reads: one that it does not read would change nothing, silently."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spectrain.data.template import RESERVED, ChatTemplate, set_template_kwargs
from spectrain.errors import SpectrainError

# What transformers gives every template: not a setting of its own.
FUNCTIONS = ("raise_exception", "strftime_now")


class _Generation(Extension):
    """The tags around an answer that transformers knows beside Jinja's own; what they hold is read as any other."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def choose_template_kwargs(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Render every chat of this tokenizer with ``settings``, a recipe's data.chat_template_kwargs.

    SpectrainError where it has no template, and for the first setting that none of its templates reads, with the
    nearest that one does. A setting that a bundle was trained with needs no such check: it is what its prompts were
    made with.
    """
    set_template_kwargs(tokenizer, settings)
    whose, read = ChatTemplate(tokenizer).name, set[str]()
    if not settings:
        return
    for source in _sources(tokenizer.chat_template):
        try:
            read |= variables(source)
        except TemplateSyntaxError as error:
            raise SpectrainError(f"{whose} is not valid Jinja: line {error.lineno}: {error.message}") from error
    own = sorted(name for name in read - RESERVED if not name.endswith("_token"))  # bos_token and the like
    for key in settings:
        if key not in read:
            near = difflib.get_close_matches(key, own, n=1)
            others = f"it reads {', '.join(own)}" if own else "it reads none of its own; leave the setting out"
            hint = f"did you mean {near[0]!r}?" if near else others
            raise SpectrainError(f"data.chat_template_kwargs: {whose} reads no variable {key!r}; {hint}")


def variables(source: str) -> set[str]:
    """Names that a template takes from outside, those that transformers always gives among them."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    environment.globals.update(dict.fromkeys(FUNCTIONS))
    return meta.find_undeclared_variables(environment.parse(source))


def _sources(template: Any) -> Iterator[str]:
    """The templates of a tokenizer: one, several by name, or a list of such."""
    if isinstance(template, str):
        yield template
    elif isinstance(template, Mapping):
        yield from template.values()
    else:
        yield from (entry["template"] for entry in template or ())
