"""Chat templates in the styles that models come with, written small, over a tokenizer whose tokens are characters.

Each style says which of a conversation's features its template can show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]")  # added, but no special tokens


def byte_tokenizer(template: str, bos: str | None = None, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """Bytes, and a double line end as one token: text that is cut at a boundary may cut into other tokens."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template)


CHATML = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen3: a trace stays in the newest turns only, a final turn without one gets an empty one, tool results are the
# user's, and thinking can be turned off by an empty trace in the generation prompt.
THINKING = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set trace = m.reasoning_content or '' %}{% set text = m.content %}
{%- if '</think>' in text %}
{%- set trace = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or trace) %}<think>
{{ trace.strip('\n') }}
</think>

{{ text.lstrip('\n') }}{% else %}{{ text }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# As DeepSeek-R1 and QwQ: the generation prompt opens the trace, and finished turns are shown without theirs.
OPENED = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>{{ m.content.split('</think>')[-1].lstrip() }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name + ' ' + call.function.arguments }}</tool_call>
{%- endfor %}<eos>
{%- else %}[INST]{{ m.content }}[/INST]{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|><think>
{% endif %}"""

# As Llama 3.1: a turn of tool calls ends with a token of its own.
CALLING = """
{{- bos_token }}
{%- for m in messages %}<|im_start|>{{ m.role }}

{% if m.tool_calls %}{% set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eom_id|>
{%- else %}{{ m.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""

# As Mistral: no generation prompt, the system message goes into the first question, roles take turns.
INST = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ (system if loop.first else '') + m.content }}[/INST]
{%- else %} {{ m.content }}<eos>{% endif %}
{%- endfor %}"""

# As Gemma: no system role, the assistant is called model.
GEMMA = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@dataclass(frozen=True)
class Style:
    template: str
    bos: str | None = None
    system: bool = True
    tools: bool = False
    strict_turns: bool = False
    traces: bool = False  # answers may have one
    needs_trace: bool = False
    trims: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return byte_tokenizer(self.template, self.bos)


STYLES = {
    "chatml": Style(CHATML, tools=True),
    "thinking": Style(THINKING, tools=True, traces=True, trims=True),
    "thinking_off": Style(THINKING, tools=True, trims=True, kwargs={"enable_thinking": False}),
    "opened": Style(OPENED, "<bos>", traces=True, needs_trace=True, trims=True),
    "calling": Style(CALLING, "<bos>", tools=True, trims=True),
    "inst": Style(INST, "<bos>", strict_turns=True),
    "gemma": Style(GEMMA, "<bos>", system=False, trims=True),
}
