"""Chat templates of five kinds over the toy's tokenizer, as folders."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from models.toy import write_toy

QWEN3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or parts | length > 1) -%}
<think>
{{ parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' }}
</think>

{% endif -%}
{{ parts[-1].lstrip('\\n') }}<|im_end|>
{% elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
LLAMA3 = """\
<|begin|>
{%- for m in messages -%}
<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>

{{ m.content | trim }}<|eot|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|header|>assistant<|/header|>

{% endif -%}
"""
STRIPS_THINKING = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' and not loop.last -%}
<|im_start|>assistant
{{ m.content.split('</think>')[-1] | trim }}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}
"""
NO_CONTROL_TOKENS = """\
{%- for m in messages -%}
{{ m.role | capitalize }}: {{ m.content }}
{% endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Kind:
    """A chat template and what is known of it."""

    name: str
    template: str | None  # None: the one that is shipped, ChatML
    control: tuple[str, ...] = ()  # tokens besides the toy's own
    eos: tuple[str, ...] = ("<|im_end|>",)  # the tokenizer's own first
    rewrites: bool = False
    lower: bool = False  # the tokenizer folds capitals: what it decodes is not what it was given


KINDS = [
    Kind("chatml", None),
    Kind("qwen3", QWEN3, rewrites=True),
    Kind("llama3", LLAMA3, ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"), ("<|endoftext|>", "<|eot|>")),
    Kind("strips thinking", STRIPS_THINKING, rewrites=True),
    Kind("no control tokens", NO_CONTROL_TOKENS),
    Kind("folds capitals", None, lower=True),
]


def write_kind(folder: Path, kind: Kind) -> Path:
    """The toy with another template and tokens."""
    write_toy(folder)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in kind.control])
    told = json.loads(backend.to_str())
    if kind.lower:
        told["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(told))
    ids = [backend.token_to_id(token) for token in kind.eos]
    _change(folder / "tokenizer_config.json", eos_token=kind.eos[0])
    _change(folder / "generation_config.json", eos_token_id=ids)
    if kind.template is not None:
        (folder / "chat_template.jinja").write_text(kind.template)
    return folder


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
