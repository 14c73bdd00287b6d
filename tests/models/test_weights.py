"""Digest and files of named tensors."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from models.upload import upload
from models.weights import (
    FLOAT_TYPES,
    WeightsMismatch,
    read_tensors,
    require_digest,
    stored_dtype,
    tensors_digest,
    write_tensors,
)

A = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor([1, 2], dtype=torch.int64)}


def test_digest_is_the_documented_hash():
    # By hand: per tensor, in the order of names, a JSON header line and the sha256 of the little-endian bytes.
    expected = hashlib.sha256()
    a = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    expected.update(b'["a", "int64", [2]]\n' + hashlib.sha256(a).digest())
    # 1.0 = 0x3f800000, 2.0 = 0x40000000, 3.0 = 0x40400000, 4.0 = 0x40800000
    b = bytes.fromhex("0000803f 00000040 00004040 00008040")
    expected.update(b'["b", "float32", [2, 2]]\n' + hashlib.sha256(b).digest())
    assert tensors_digest(A) == expected.hexdigest()


@pytest.mark.parametrize("extra", [0, 1])
def test_digest_of_large_tensors_is_of_pieces(extra):
    piece = 4 * 1024 * 1024
    large = torch.randint(0, 256, (3 * piece + extra,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = large.numpy().tobytes()
    parts = [data[i : i + piece] for i in range(0, len(data), piece)]
    assert len(parts) == 3 + extra
    hashed = hashlib.sha256(b'["empty", "float32", [0, 2]]\n' + b'["x", "uint8", [%d]]\n' % len(data))
    for part in parts:
        hashed.update(hashlib.sha256(part).digest())
    assert tensors_digest({"x": large, "empty": torch.zeros(0, 2)}) == hashed.hexdigest()


def test_digest_ignores_order_and_memory_layout():
    transposed = A["b"].t().contiguous().t()
    assert not transposed.is_contiguous()
    assert tensors_digest({"a": A["a"], "b": transposed}) == tensors_digest(A)


@pytest.mark.parametrize(
    "changed",
    [
        {"c": A["b"], "a": A["a"]},
        {"b": A["b"].double(), "a": A["a"]},
        {"b": A["b"].reshape(4), "a": A["a"]},
        {"b": torch.tensor([[1.0, 2.0], [3.0, torch.nextafter(torch.tensor(4.0), torch.tensor(5.0))]]), "a": A["a"]},
        {"b": A["b"]},
    ],
    ids=["name", "dtype", "shape", "one bit", "missing"],
)
def test_digest_sees_every_change(changed):
    assert tensors_digest(changed) != tensors_digest(A)


def test_a_tied_head_does_not_enter_the_digest_and_an_own_head_does():
    table = torch.tensor([[1.0, float("nan")]])
    tied = {"model.embed_tokens.weight": table}
    assert tensors_digest(tied | {"lm_head.weight": table.clone()}) == tensors_digest(tied)
    assert tensors_digest(tied | {"lm_head.weight": torch.tensor([[1.0, 2.0]])}) != tensors_digest(tied)


def test_files_give_back_the_tensors_and_equal_bytes(tmp_path):
    tensors = {"x": torch.tensor([1.5, -0.0], dtype=torch.bfloat16), "y": torch.tensor(3.0, dtype=torch.bfloat16)}
    digest = write_tensors(tmp_path / "1", tensors)
    write_tensors(tmp_path / "2", dict(reversed(tensors.items())))
    assert tensors_digest(read_tensors(tmp_path / "1")) == digest == tensors_digest(tensors)
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()
    assert stored_dtype(tmp_path / "1") == "bfloat16"


def test_tensors_read_before_do_not_follow_the_file(tmp_path):
    write_tensors(tmp_path, A)
    before = read_tensors(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\0" * 8)
    assert tensors_digest(before) == tensors_digest(A)
    assert tensors_digest(read_tensors(tmp_path)) != tensors_digest(A)


def test_shards_are_read_as_one(tmp_path):
    save_file({"a": A["a"]}, tmp_path / "s1.safetensors")
    save_file({"b": A["b"]}, tmp_path / "s2.safetensors")
    index = {"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensors_digest(read_tensors(tmp_path)) == tensors_digest(A)
    (tmp_path / "s2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names \['s2.safetensors'\], which are not there; copy every shard"):
        read_tensors(tmp_path)


def test_errors_name_the_file_and_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors .* must be safetensors"):
        read_tensors(tmp_path)
    write_tensors(tmp_path, A)
    with pytest.raises(ValueError, match=r"of type \['F32', 'I64'\]; all must be one of"):
        stored_dtype(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file"):
        read_tensors(tmp_path)
    with pytest.raises(WeightsMismatch, match="engine: weights of digest 12 where 34 is wanted"):
        require_digest("engine", "12", "34")


@pytest.mark.parametrize("piece", [16, 1024])
def test_an_upload_in_pieces_is_the_file(tmp_path, monkeypatch, piece):
    """Of 31 floats, 5 halves, none and one, the last three at places that are no multiple of 16 bytes."""
    monkeypatch.setattr("models.upload.PIECE", piece)
    tensors = {
        "a": torch.randn(31),
        "b": torch.randn(5, 1).bfloat16(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(7.0, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    got = upload(tmp_path / "model.safetensors", "cpu", FLOAT_TYPES)
    assert {name: (t.dtype, t.shape, t.tolist()) for name, t in got.items()} == {
        name: (t.dtype, t.shape, t.tolist()) for name, t in tensors.items()
    }
    assert all(tensor.data_ptr() % 16 == 0 for tensor in got.values() if tensor.numel())


def test_an_upload_of_what_is_no_policy_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(9), "step": torch.tensor(3)}, path)
    with pytest.raises(ValueError, match=r"tensors of type \['I64'\]; all must be one of .*: convert the model"):
        upload(path, "cpu", FLOAT_TYPES)
    save_file({"a": torch.zeros(9)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter than its header says; copy it again"):
        upload(path, "cpu", FLOAT_TYPES)
