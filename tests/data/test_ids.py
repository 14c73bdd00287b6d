import pyarrow as pa
import pytest

from data.ids import child, lineage, parent_of, root_id, root_of


def test_lineage_of_roots_forks_and_forks_of_forks():
    told = lineage(pa.chunked_array([["q@3", "q@3/0"], ["q@3/0/12"]]))
    assert told.root.to_pylist() == ["q@3", "q@3", "q@3"]
    assert told.parent.to_pylist() == [None, "q@3", "q@3/0"]
    assert told.depth.to_pylist() == [0, 1, 2]


def test_the_scalar_functions_agree_with_lineage():
    name = child(child(root_id("q", 3), 0), 12)
    assert name == "q@3/0/12"
    assert parent_of(name) == "q@3/0"
    assert parent_of("q@3") is None
    assert root_of(name) == "q@3"


def test_a_prompt_drawn_again_is_another_root():
    assert root_id("q", 3) != root_id("q", 103)


def test_a_prompt_id_with_a_slash_stays_one_root_and_does_not_meet_another():
    roots = {root_id(prompt_id, 0) for prompt_id in ("a/b", "a%2Fb", "a%b")}
    assert roots == {"a%2Fb@0", "a%252Fb@0", "a%25b@0"}


def test_a_negative_branch_is_refused():
    with pytest.raises(ValueError, match=r"R: branch -1; branches are numbered from 0"):
        child("R", -1)
