"""What a search finds."""

from dataclasses import dataclass


class SearchFailed(Exception):
    """A query has no answer; the model is told why."""


@dataclass(frozen=True)
class Hit:
    text: str
    title: str = ""
    url: str = ""
