"""Token ids as text, one by one and in a stream."""

from pathlib import Path

import pytest

from data.ledger import Ledger
from data.manifest import ManifestError
from data.vocabulary import Vocabulary, vocabulary
from tests.reports import record_example, write_tokenizer


def test_tokens_by_themselves_and_together(tmp_path: Path) -> None:
    """20 and 21 are the bytes C3 A9 of é; 30 is a space; after it a lone C3 is no character."""
    words = Vocabulary(write_tokenizer(tmp_path / "t.json"))
    assert words.texts([1, 30, 20, 21]) == {1: "a", 30: " ", 20: "\ufffd", 21: "\ufffd"}
    assert words.spelled([1, 20, 21, 30, 20]) == ["a", "é", "", " ", "\ufffd"]


def test_a_space_that_a_decoder_drops_stays(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({"▁the": 0, "re": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([0]) == "the"
    assert Vocabulary(tokenizer).texts([0, 1]) == {0: " the", 1: "re"}


def test_without_a_tokenizer_texts_are_unknown() -> None:
    assert Vocabulary(None).texts([1]) == {} and Vocabulary(None).spelled([1, 2]) == [None, None]


def test_a_tokenizer_that_was_altered_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    summary = record_example(ledger, tmp_path)
    policy = ledger.open(summary.manifests["generate"].input_uris["policy"])
    (entry,) = policy.files
    assert vocabulary(ledger, summary.manifests["generate"]).texts([1]) == {1: "a"}
    changed = entry.model_copy(update={"sha256": "0" * 64})
    from data.vocabulary import _load, _Source

    with pytest.raises(ManifestError, match=r"tokenizer\.json: altered: sha256"):
        _load(_Source(changed.sha256, ledger.store, changed))
