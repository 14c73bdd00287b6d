"""When a repeated train step counts as the recorded one. The tolerance is 2 % of the recorded norm."""

import pytest

from tasks.state import unlike_updates

RECORDED = [{"grad_norm": 1.0, "loss/policy": 0.5}, {"grad_norm": 2.0}]


@pytest.mark.parametrize(
    ("again", "words"),
    [
        ([{"grad_norm": 1.019}, {"grad_norm": 1.961}], None),
        ([{"grad_norm": 1.0}, {"grad_norm": 2.05}], "grad_norm 2.05 at optimizer step 1, on record 2: further apart"),
        ([{"grad_norm": 1.0}], "1 optimizer steps, on record are 2"),
    ],
)
def test_gradient_norms_of_every_step_count(again: list[dict[str, float]], words: str | None) -> None:
    found = unlike_updates(RECORDED, again)
    assert found is None if words is None else found is not None and found.startswith(words)


def test_a_frozen_policys_step_is_told_by_its_critic() -> None:
    assert unlike_updates([{"critic_grad_norm": 1.0}], [{"critic_grad_norm": 1.01}]) is None
    assert unlike_updates([{"critic_grad_norm": 1.0}], [{"critic_grad_norm": 1.03}]) is not None
