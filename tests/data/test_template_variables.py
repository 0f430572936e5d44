"""Settings of a chat template that it does not read are refused, whatever form the template has."""

import pytest
from templates import STYLES, THINKING, byte_tokenizer

from spectrain.data.template import ChatTemplate
from spectrain.data.template_variables import choose_template_kwargs, variables
from spectrain.errors import SpectrainError


def refusal(tokenizer, **settings):
    with pytest.raises(SpectrainError) as error:
        choose_template_kwargs(tokenizer, settings)
    return str(error.value)


def test_a_misspelt_setting_is_refused_with_the_nearest_one():
    said = refusal(byte_tokenizer(THINKING), enable_thinkin=False)
    assert "data.chat_template_kwargs: the chat template of" in said
    assert said.endswith("reads no variable 'enable_thinkin'; did you mean 'enable_thinking'?")


def test_a_setting_that_is_read_is_set():
    tokenizer = byte_tokenizer(THINKING)
    asked = [{"role": "user", "content": "a"}]
    before = ChatTemplate(tokenizer).render(asked, True)
    choose_template_kwargs(tokenizer, {"enable_thinking": False})
    assert len(ChatTemplate(tokenizer).render(asked, True)) > len(before)
    choose_template_kwargs(tokenizer, {})
    assert ChatTemplate(tokenizer).render(asked, True) == before


def test_where_nothing_is_near_what_there_is_is_told():
    dated = byte_tokenizer("{{ date_string }}{{ bos_token }}{{ messages[0].content }}")
    assert refusal(dated, enable_thinking=True).endswith("reads no variable 'enable_thinking'; it reads date_string")
    assert refusal(STYLES["chatml"].tokenizer(), enable_thinking=False).endswith("leave the setting out")


@pytest.mark.parametrize("form", [lambda t: {"default": "x", "tool_use": t},
                                  lambda t: [{"name": "default", "template": t}]])  # fmt: skip
def test_any_of_several_templates_may_read_it(form):
    tokenizer = byte_tokenizer(THINKING)
    tokenizer.chat_template = form(THINKING)
    choose_template_kwargs(tokenizer, {"enable_thinking": False})
    assert "did you mean 'enable_thinking'?" in refusal(tokenizer, enable_thinkin=False)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if not style is defined %}{% set style = 'x' %}{% endif %}{{ style }}", {"style"}),
        ("{% set style = style | default('x') %}{{ style }}", {"style"}),
        ("{{ strftime_now('%d') }}{{ raise_exception('no') }}{% set ns = namespace(a=1) %}{{ ns.a }}", set()),
        ("{% macro show(one, two='') %}{{ one }}{{ kwargs }}{{ three }}{% endmacro %}{{ show(1, two=2) }}", {"three"}),
        ("{% for m in messages %}{% generation %}{{ m.content + end }}{% endgeneration %}{% break %}{% endfor %}",
         {"messages", "end"}),
        ("{{ (options or {}).get('depth') | tojson(indent=2) }}", {"options"}),
    ],
)  # fmt: skip
def test_what_a_template_reads(source, found):
    assert variables(source) == found


def test_settings_for_every_style_go_through_as_they_did():
    for style in STYLES.values():
        choose_template_kwargs(style.tokenizer(), style.kwargs)
    choose_template_kwargs(STYLES["opened"].tokenizer(), {"bos_token": ""})  # a token may be set, too


def test_a_broken_template_is_named():
    assert "is not valid Jinja: line 1" in refusal(byte_tokenizer("{% if %}"), a=1)
