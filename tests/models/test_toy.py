"""The toy model's folder: equal bytes, loadable by transformers, and the chat template by golden strings."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import TemplateError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.toy import write_toy
from models.weights import read_tensors, tensors_digest

TOOL = {"type": "function", "function": {"name": "calculator", "description": "Adds."}}
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12+34?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "The answer is 46."},
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(toy):
    return AutoTokenizer.from_pretrained(toy)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_two_processes_write_equal_bytes_and_another_seed_other_weights(toy, tmp_path):
    code = "import sys; from models.toy import write_toy; write_toy(sys.argv[1])"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, env=env)
    assert digests(tmp_path / "a") == digests(toy)
    write_toy(tmp_path / "b", seed=1)
    differing = {name for name, digest in digests(tmp_path / "b").items() if digest != digests(toy)[name]}
    assert differing == {"model.safetensors"}


def test_transformers_loads_exactly_the_written_weights(toy):
    model = AutoModelForCausalLM.from_pretrained(toy, dtype="auto")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert tensors_digest(model.state_dict()) == tensors_digest(read_tensors(toy))
    # By hand: embedding 512*96 = 49,152; a layer has 4 attention matrices 128*96 = 49,152, 3 MLP matrices 256*96 =
    # 73,728, norms 96+96+64+64 = 320, together 123,200; final norm 96. 49,152 + 2*123,200 + 96 = 295,648.
    assert sum(p.numel() for p in model.parameters()) == 295_648
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == 2


def test_weights_have_the_configured_spread(toy):
    for name, tensor in read_tensors(toy).items():
        if tensor.ndim == 1:
            assert (tensor == 1).all(), name
            continue
        # Uniform on ±.02·√3 = ±.034641: mean 0, standard deviation .02; the sample's own error is below .02/√12288·4.
        assert tensor.abs().max() <= 0.0346411, name
        assert abs(tensor.mean().item()) < 0.0008, name
        assert tensor.std().item() == pytest.approx(0.02, abs=0.0004), name


def test_special_tokens(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>", None)
    assert len(tokenizer) <= 512
    assert max(tokenizer.get_vocab().values()) < 512


def test_digits_are_split_one_by_one(tokenizer):
    pieces = tokenizer.tokenize("Sort: 482913")
    assert pieces[-6:] == list("482913")
    # The phrase is one token, so the prompt is 1 + 6.
    assert len(pieces) == 7


def test_every_byte_is_a_token_of_its_own(tokenizer):
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256
    text = "".join(chr(point) for point in [*range(0x250), *range(0x800, 0x900, 7), 0x20AC, 0x1F600, 0x10FFFF])
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_chat_template_golden(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nTools:\n"
        '{"type": "function", "function": {"name": "calculator", "description": "Adds."}}<|im_end|>\n'
        "<|im_start|>user\nWhat is 12+34?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThe answer is 46.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "tools", "text"),
    [
        ([{"role": "user", "content": "x"}], None, "<|im_start|>user\nx<|im_end|>\n"),
        ([{"role": "user", "content": " x\n"}], None, "<|im_start|>user\n x\n<|im_end|>\n"),
        (
            [{"role": "user", "content": "x"}],
            [{"a": 1}],
            '<|im_start|>system\nTools:\n{"a": 1}<|im_end|>\n<|im_start|>user\nx<|im_end|>\n',
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"n":1}'}]}],
            None,
            '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"n":1}}\n</tool_call><|im_end|>\n',
        ),
    ],
    ids=["user", "whitespace stays", "tools without system", "arguments as text"],
)
def test_chat_template_cases(tokenizer, messages, tools, text):
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == text


def test_a_longer_conversation_only_appends_tokens(tokenizer):
    full = tokenizer.apply_chat_template(CONVERSATION)["input_ids"]
    for turns in range(1, len(CONVERSATION)):
        part = tokenizer.apply_chat_template(CONVERSATION[:turns])["input_ids"]
        assert full[: len(part)] == part


def test_generation_mask_covers_exactly_what_the_policy_writes(tokenizer):
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    written = [token for token, mask in pairs if mask]
    assert tokenizer.decode(written) == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call><|im_end|>'
        "The answer is 46.<|im_end|>"
    )


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "bob", "content": "x"}], "role bob; it must be system, user, assistant or tool"),
        (
            [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}],
            "message 1 has the role system; only the first message may have it",
        ),
    ],
)
def test_chat_template_refuses(tokenizer, messages, error):
    with pytest.raises(TemplateError, match=error):
        tokenizer.apply_chat_template(messages)
