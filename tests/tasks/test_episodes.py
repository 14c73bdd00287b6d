"""What of an environment enters a step's key."""

from pathlib import Path

from data.environment_config import EnvironmentConfig
from tasks.episodes import played_in


def keyed(**settings: object) -> dict[str, object]:
    played = played_in(EnvironmentConfig.model_validate({"kind": "tools", **settings}))
    assert played is not None
    return played.keyed()


def test_the_content_of_a_search_index_is_in_the_key(tmp_path: Path) -> None:
    """Its path alone would let other documents pass as the same; how many are played at a time is no content."""
    index = tmp_path / "docs.jsonl"
    settings = {"tools": ["search"], "options": {"search": {"index": str(index)}}}
    index.write_text('{"text": "a"}\n')
    first = keyed(**settings)
    assert keyed(**settings, in_flight=7) == first
    index.write_text('{"text": "b"}\n')
    second = keyed(**settings)
    assert second != first and {**second, "files": 0} == {**first, "files": 0}
    assert "files" not in keyed(tools=["calculator"])
