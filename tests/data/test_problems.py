"""Procedural problems: right answers, and a fifth of them that training and demonstrations never see."""

from collections import Counter

import pytest

from data.config import PromptsConfig
from data.problems import PROBLEMS, Addition, AddMix, Problem, Sort, draw, held_out, is_held_out
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


def test_addmix_worked_by_hand():
    """Two digits: 100 pairs; 90 long numbers and 9 digits, either order: 1,620; two long ones: 8,100, the multiple."""
    problem = AddMix(2)
    assert problem.size == 3 * 8100
    assert (problem.question(3 * 37), problem.answer(3 * 37)) == ("What is 3 + 7?", "10")
    assert problem.text(3 * 137) == "3+7"  # again
    # long 10 + 2, digit 1 + 6: pair 2 * 9 + 6 = 24, at 48 the digit first and at 49 last
    assert [problem.question(3 * at + 1) for at in (48, 49)] == ["What is 7 + 12?", "What is 12 + 7?"]
    item = 3 * (2 * 90 + 24) + 2
    assert (problem.question(item), problem.answer(item)) == ("What is 12 + 34?", "46")
    assert problem.text(problem.size - 1) == "99+99"


@pytest.mark.parametrize("digits", [1, 2])
def test_addmix_asks_every_problem_of_a_kind_equally_often(digits: int):
    problem = AddMix(digits)
    long = range(10 ** (digits - 1), 10**digits)
    kinds = (
        [(a, b) for a in range(10) for b in range(10)],
        [pair for a in long for b in range(1, 10) for pair in ((a, b), (b, a))],
        [(a, b) for a in long for b in long],
    )
    for kind, pairs in enumerate(kinds):
        times = problem.size // 3 // len(pairs)
        texts = Counter(problem.text(item) for item in range(kind, problem.size, 3))
        assert texts == Counter(times * [f"{a}+{b}" for a, b in pairs])


def test_addmix_holds_both_orders_out_or_neither():
    problem = AddMix(2)
    held = {problem.text(item): is_held_out(problem, item) for item in range(problem.size)}
    assert all(held["+".join(reversed(text.split("+")))] == is_held for text, is_held in held.items())


def test_held_out_addmix_is_in_thirds():
    """100 of 300 each, give or take: the walk goes round the kinds, and of each it keeps about a fifth."""
    kinds = Counter(item % 3 for item in held_out(AddMix(2), 300))
    assert all(75 <= kinds[kind] <= 125 for kind in range(3))


@pytest.mark.parametrize("problem", [Sort(3), Addition(1), Addition(2)])
def test_numbering_is_one_to_one(problem: Sort | Addition):
    assert len({problem.text(item) for item in range(problem.size)}) == problem.size


@pytest.mark.parametrize("problem", [Sort(4), Addition(2), AddMix(2)])
def test_about_a_fifth_is_held_out(problem: Problem):
    part = sum(is_held_out(problem, item) for item in range(problem.size)) / problem.size
    assert abs(part - 0.2) < 0.02  # four standard deviations of 8,100 draws


@pytest.mark.parametrize("problem", [Sort(3), Addition(1)])
@pytest.mark.parametrize("stream", ["train", "demonstration"])
def test_no_draw_is_held_out_and_all_others_are_drawn(problem: Sort | Addition, stream: str):
    drawn = {draw(problem, cursor, 0, stream) for cursor in range(12 * problem.size)}
    assert drawn == {item for item in range(problem.size) if not is_held_out(problem, item)}


@pytest.mark.parametrize("problem", [Sort(1), Sort(3), Addition(1), Addition(2), AddMix(1)])
def test_held_out_items_are_different_and_all_there_are(problem: Problem):
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
    evaluated = source.held_out(384)
    held = {prompt.prompt_id for prompt in evaluated}
    assert len({prompt.metadata["item"] for prompt in evaluated}) == 384
    demonstrated = source.demonstrations(0, 2000, 0)
    assert not held & {prompt.prompt_id for prompt in source.take(0, 2000, 0)}
    assert not held & {prompt.prompt_id for prompt, _ in demonstrated}
    if name != "calc":
        assert all(turns == (prompt.metadata["answer"],) for prompt, turns in demonstrated)
    assert [p for p, _ in demonstrated] != source.take(0, 2000, 0)


def test_three_in_ten_demonstrations_of_calc_use_the_tool():
    """The others guess, within what two numbers of two digits can give: 20 to 198."""
    source = load_source(PromptsConfig(source="calc"))
    shown = source.demonstrations(0, 2000, 0)
    called = [(prompt, turns) for prompt, turns in shown if len(turns) == 2]
    assert 530 <= len(called) <= 670  # 600, and three standard errors of 20.5
    prompt, turns = called[0]
    left, right = str(prompt.messages[0]["content"]).removeprefix("What is ").removesuffix("?").split("+")
    call = f'{{"name": "calculator", "arguments": {{"expression": "{left}+{right}"}}}}'
    assert turns == (f"<tool_call>\n{call}\n</tool_call>", f"The answer is {int(left) + int(right)}.")
    guesses = [int(turns[0].removeprefix("The answer is ")[:-1]) for _, turns in shown if len(turns) == 1]
    assert min(guesses) >= 20 and max(guesses) <= 198 and len(set(guesses)) > 150
    assert source.demonstrations(7, 3, 0) == shown[7:10]


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
