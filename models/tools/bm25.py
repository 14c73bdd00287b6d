"""A local index of passages, by BM25: works offline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bm25s
from pydantic import TypeAdapter, ValidationError

from models.tools.hits import Hit

ROW = TypeAdapter(Hit)
WORD = r"(?u)\b\w+\b"


@dataclass(frozen=True)
class Index:
    """Passages in memory. May be asked from many threads at once."""

    passages: Sequence[Hit]
    ranks: bm25s.BM25

    @classmethod
    def read(cls, path: Path) -> "Index":
        """Of a JSONL file. Raises ValueError, with the line, for a row that is no passage."""
        if not path.is_file():
            raise ValueError(f"search: index = {str(path)!r} is not a file; give a JSONL file of passages")
        with path.open("rb") as file:
            passages = [_passage(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
        if not passages:
            raise ValueError(f"search: {path} has no passage")
        ranks = bm25s.BM25(backend="numpy")
        ranks.index(_words([f"{each.title} {each.text}" for each in passages]), show_progress=False)
        return cls(passages, ranks)

    async def find(self, query: str, most: int) -> list[Hit]:
        """The best first; fewer than `most` if no more of them share a word with the query."""
        k = min(most, len(self.passages))
        found, scores = self.ranks.retrieve(_words([query]), k=k, show_progress=False, n_threads=0)
        return [self.passages[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]


def _words(texts: list[str]) -> bm25s.tokenization.Tokenized:
    return bm25s.tokenize(texts, token_pattern=WORD, stopwords=None, show_progress=False)


def _passage(path: Path, number: int, line: bytes) -> Hit:
    try:
        return ROW.validate_json(line)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(
            f"{path}:{number}: no passage ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}); "
            'a row is {"text": …, "title": …, "url": …}, the last two optional'
        ) from None
