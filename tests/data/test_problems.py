"""Procedural problems: right answers, and a fifth of them that training and demonstrations never see."""

import pytest

from data.config import PromptsConfig
from data.problems import PROBLEMS, Addition, Sort, draw, held_out, is_held_out
from data.prompts import load_source


def test_sort_worked_by_hand():
    problem = Sort(6)
    assert problem.size == 1_000_000
    assert (problem.question(482913), problem.answer(482913)) == ("Sort: 482913", "123489")
    assert (problem.question(70), problem.answer(70)) == ("Sort: 000070", "000007")


def test_addition_worked_by_hand():
    problem = Addition(2)
    assert problem.size == 90 * 90
    assert (problem.question(0), problem.answer(0)) == ("What is 10+10?", "20")
    assert (problem.question(2 * 90 + 24), problem.answer(2 * 90 + 24)) == ("What is 12+34?", "46")
    assert (problem.question(8099), problem.answer(8099)) == ("What is 99+99?", "198")
    assert Addition(1).question(0) == "What is 0+0?"
    assert Addition(1).size == 100


@pytest.mark.parametrize("problem", [Sort(3), Addition(1), Addition(2)])
def test_numbering_is_one_to_one(problem: Sort | Addition):
    assert len({problem.text(item) for item in range(problem.size)}) == problem.size


@pytest.mark.parametrize("problem", [Sort(4), Addition(2)])
def test_about_a_fifth_is_held_out(problem: Sort | Addition):
    part = sum(is_held_out(problem, item) for item in range(problem.size)) / problem.size
    assert abs(part - 0.2) < 0.02  # four standard deviations of 8,100 draws


@pytest.mark.parametrize("problem", [Sort(3), Addition(1)])
@pytest.mark.parametrize("stream", ["train", "demonstration"])
def test_no_draw_is_held_out_and_all_others_are_drawn(problem: Sort | Addition, stream: str):
    drawn = {draw(problem, cursor, 0, stream) for cursor in range(12 * problem.size)}
    assert drawn == {item for item in range(problem.size) if not is_held_out(problem, item)}


@pytest.mark.parametrize("problem", [Sort(1), Sort(3), Addition(1), Addition(2)])
def test_held_out_items_are_different_and_all_there_are(problem: Sort | Addition):
    every = [item for item in range(problem.size) if is_held_out(problem, item)]
    found = held_out(problem, problem.size)
    assert sorted(found) == every
    assert held_out(problem, 2) == found[:2]


def test_held_out_items_of_a_large_space_spread_over_it():
    found = held_out(Sort(18), 200)
    assert len(set(found)) == 200
    assert len({item // 10**17 for item in found}) == 10  # every first digit


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_source_never_trains_on_what_it_evaluates(name: str):
    source = load_source(PromptsConfig(source=name))
    held = {prompt.prompt_id for prompt in source.held_out(384)}
    assert len(held) == 384
    demonstrated = source.demonstrations(0, 2000, 0)
    assert not held & {prompt.prompt_id for prompt in source.take(0, 2000, 0)}
    assert not held & {prompt.prompt_id for prompt, _ in demonstrated}
    assert all(answer == prompt.metadata["answer"] for prompt, answer in demonstrated)
    assert [p for p, _ in demonstrated] != source.take(0, 2000, 0)


def test_a_prompt_carries_what_a_scorer_needs():
    (prompt,) = load_source(PromptsConfig(source="sort", digits=4, system="Sort.")).take(0, 1, 0)
    question = prompt.messages[1]["content"]
    assert isinstance(question, str)
    digits = question.removeprefix("Sort: ")
    assert prompt.messages[0] == {"role": "system", "content": "Sort."}
    assert prompt.prompt_id == f"sort-{digits}"
    assert prompt.metadata == {"data_set": "sort", "item": int(digits), "answer": "".join(sorted(digits))}


def test_digests_tell_sizes_and_systems_apart():
    configs = [PromptsConfig(source="sort"), PromptsConfig(source="sort", digits=5), PromptsConfig(source="addition")]
    configs.append(PromptsConfig(source="sort", system="Sort."))
    assert len({load_source(config).digest for config in configs}) == 4
    assert load_source(configs[0]).digest == load_source(PromptsConfig(source="sort", digits=6)).digest
