"""Which folders are accepted, what is reported of them, and how the others are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from models.folder import FolderError
from models.huggingface import inspect
from models.toy import write_toy
from models.weights import read_tensors, write_tensors

TINY = {
    "vocab_size": 400,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    return folder


@pytest.fixture
def copy(toy, tmp_path):
    return shutil.copytree(toy, tmp_path / "copy")


def change(folder, name: str, **changes) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def test_report_of_the_toy(toy):
    report = inspect(toy)
    assert (report.family, report.architecture) == ("Qwen3", "Qwen3ForCausalLM")
    # The parameters are worked out in test_toy.py.
    assert (report.parameters, report.vocab, report.context) == (295_648, 512, 512)
    assert (report.tied, report.dtype, report.eos_ids) == (True, "float32", (2,))


@pytest.mark.parametrize(
    ("config", "model", "family", "parameters"),
    [
        # By hand, heads of 4: embedding and head 2*400*8 = 6,400; q and o 2*8*8 = 128, k and v 2*4*8 = 64, MLP
        # 3*16*8 = 384, norms 3*8 = 24: 7,000. Qwen2 has biases on q, k and v: 8 + 4 + 4 = 16 more.
        (LlamaConfig, LlamaForCausalLM, "Llama", 7_000),
        (Qwen2Config, Qwen2ForCausalLM, "Qwen2.5", 7_016),
    ],
)
def test_other_families_and_shards(copy, config, model, family, parameters):
    for name in ("config.json", "model.safetensors"):
        (copy / name).unlink()
    model(config(**TINY)).to(torch.bfloat16).save_pretrained(copy, max_shard_size="8KB")
    assert len(list(copy.glob("model-*.safetensors"))) > 1
    report = inspect(copy)
    assert (report.family, report.parameters, report.tied, report.dtype) == (family, parameters, False, "bfloat16")
    next(copy.glob("model-*.safetensors")).unlink()
    with pytest.raises(FolderError, match=r"which are not there; copy every shard"):
        inspect(copy)


def test_a_stored_tied_head_counts_once(copy):
    tensors = read_tensors(copy)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, copy / "model.safetensors")
    assert inspect(copy).parameters == 295_648


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            r"architecture 'MixtralForCausalLM' with model_type 'mixtral' is not supported; use one of "
            r"Qwen2.5 \(Qwen2ForCausalLM\), Qwen3 \(Qwen3ForCausalLM\), Qwen3-MoE \(Qwen3MoeForCausalLM\), "
            r"Llama \(LlamaForCausalLM\)",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "architecture 'gpt2' with model_type 'gpt2' is not supported"),
        ({"model_type": "llama"}, "architecture 'Qwen3ForCausalLM' with model_type 'llama' is not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "'Qwen3ForSequenceClassification'"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None; it must be a whole number of at least 1"),
        ({"vocab_size": "512"}, "vocab_size is '512'; it must be a whole number"),
        ({"vocab_size": 300}, r"token id 364, the model 300 embeddings; ids must be below"),
        ({"quantization_config": {"bits": 4}}, "quantization_config; weights must be float"),
        ({"tie_word_embeddings": False}, r"no lm_head.weight, and tie_word_embeddings is false; set it to true"),
    ],
)
def test_refused_configs(copy, changes, error):
    change(copy, "config.json", **changes)
    with pytest.raises(FolderError, match=error):
        inspect(copy)


def test_an_architecture_left_out_follows_from_the_model_type(copy):
    change(copy, "config.json", architectures=None)
    assert inspect(copy).architecture == "Qwen3ForCausalLM"


def test_missing_and_broken_files(copy, tmp_path):
    with pytest.raises(FolderError, match=r"no config.json; give a Hugging Face folder"):
        inspect(tmp_path / "nowhere")
    tensors = read_tensors(copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FolderError, match="not a readable safetensors file"):
        inspect(copy)
    write_tensors(copy, tensors | {"extra": torch.tensor([1, 2])})
    with pytest.raises(FolderError, match=r"weights of type \['F32', 'I64'\]; all must be one of"):
        inspect(copy)
    path.unlink()
    with pytest.raises(FolderError, match=r"no model.safetensors and no model.safetensors.index.json"):
        inspect(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(FolderError, match=r"config.json: a JSON list; it must be an object"):
        inspect(copy)
    (copy / "config.json").write_bytes(b"\xff")
    with pytest.raises(FolderError, match=r"config.json: not JSON .* copy the file again"):
        inspect(copy)


def test_missing_eos_or_template(copy):
    change(copy, "tokenizer_config.json", eos_token=None)
    with pytest.raises(FolderError, match="no eos_token; name one"):
        inspect(copy)
    change(copy, "tokenizer_config.json", eos_token="<|im_end|>")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(FolderError, match="no chat template"):
        inspect(copy)
