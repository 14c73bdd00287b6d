"""Trajectories in the terminal: the conversation, its sampled tokens in colour, what came of it."""

import json
import math
from collections.abc import Callable, Sequence
from enum import StrEnum

from rich.color import Color
from rich.console import Console, Group
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from flows.reading import Json
from flows.views import number, plain, table

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
WARM, COLD = (226, 110, 40), (60, 130, 246)
FAINT = 0.03
SHOWN = 20


class By(StrEnum):
    """What the colour of a token says."""

    LOGPROB = "logprob"
    VALUE = "value"
    ADVANTAGE = "advantage"
    MASK = "mask"
    GAP = "gap"


def chosen(console: Console, found: Json, by: By) -> None:
    """Several trajectories, at most SHOWN."""
    rows = found["trajectories"]
    paint = painter(rows, by)
    for row in rows[:SHOWN]:
        conversation(console, row, paint)
    console.print(legend(rows, by, paint, len(rows)))
    if len(rows) > SHOWN:
        console.print(f"{len(rows) - SHOWN} more; --json has all")
    if rows and console.color_system is None:
        console.print("no colours here; --json, and --trajectory ID, have the numbers")


def trajectory(console: Console, found: Json, by: By) -> None:
    """One, and the numbers of its sampled tokens."""
    paint = painter([found], by)
    conversation(console, found, paint)
    columns = ("rollout_logprobs", "old_logprobs", "values", "token_advantages")
    made = table("sampled tokens", "index", "id", *columns)
    for i in (i for i, acted in enumerate(found["action_mask"]) if acted):
        made.add_row(str(i), str(found["token_ids"][i]), *(number(found[c][i] if found[c] else None) for c in columns))
    console.print(made)


def conversation(console: Console, found: Json, paint: "Paint") -> None:
    """The turns, then what came of them."""
    for turn in found["turns"]:
        head = f"{turn['role']}, {turn['length']} tokens" + (_spoken(turn) if turn["is_generated"] else "")
        style = ROLE_STYLES.get(turn["role"], "white")
        body = _coloured(found, turn, paint) if turn["is_generated"] else Text(plain(turn["text"]))
        console.print(Panel(body, title=Text(head), title_align="left", border_style=style))
    facts = [f"trajectory {found['trajectory_id']}, iteration {found['iteration']}, {found['status']}"]
    reference = found["metadata"].get("answer", "-")
    facts.append(f"reward {number(found['reward'])}, advantage {number(found['advantage'])}, reference {reference}")
    facts += [f"{name} {value:.3f}" for name, value in found["components"].items()]
    facts += [f"error: {found['error']}"] if found["error"] else []
    console.print(Group(*(Text(plain(fact)) for fact in facts)))


def _spoken(turn: Json) -> str:
    """What is known of a turn of the policy, and what its environment made of it."""
    told = [turn["finish_reason"], f"policy {turn['policy_version']}"]
    told += [f"calls {plain(call['name'])}" for call in json.loads(turn["tool_calls"] or "[]")]
    told += [] if turn["env_reward"] is None else [f"reward {number(turn['env_reward'])}"]
    return "".join(f", {part}" for part in told)


def _coloured(found: Json, turn: Json, paint: "Paint") -> Text:
    """The span's tokens; its text without colour where tokens have none, or do not add up to it."""
    span = range(turn["start"], turn["start"] + turn["length"])
    texts = [found["token_texts"][i] for i in span]
    if None in texts or "".join(texts) != turn["text"]:
        return Text(plain(turn["text"]))
    return Text.assemble(*((plain(text), paint(found, i)) for i, text in zip(span, texts, strict=True)))


Paint = Callable[[Json, int], Style]


def number_of(found: Json, by: By, i: int) -> float | None:
    """What a token is coloured by; None where it is not on record."""
    old, sampled = found["old_logprobs"], found["rollout_logprobs"][i]
    if by is By.GAP:
        return None if old is None or found["gap_refused"] else old[i] - sampled
    if by is By.MASK:
        return None if found["loss_mask"] is None else float(found["loss_mask"][i]) - 0.5
    column = {By.VALUE: found["values"], By.ADVANTAGE: found["token_advantages"]}.get(by, found["rollout_logprobs"])
    return None if column is None else column[i]


def painter(rows: Sequence[Json], by: By) -> Paint:
    """Blue above 0, orange below, full at the largest number of these trajectories."""
    top = _largest(rows, by)

    def paint(found: Json, i: int) -> Style:
        value = number_of(found, by, i)
        return Style() if value is None else tinted(value / top)

    return paint


def tinted(part: float) -> Style:
    """part: from -1 to 1. Black on a tint, which is readable on any terminal."""
    strength = min(1.0, abs(part))
    if not math.isfinite(part) or strength < FAINT:
        return Style()
    hue = COLD if part > 0 else WARM
    red, green, blue = (round(255 + strength * 0.85 * (c - 255)) for c in hue)
    return Style(color="black", bgcolor=Color.from_rgb(red, green, blue))


def _largest(rows: Sequence[Json], by: By) -> float:
    sampled = ((row, i) for row in rows for i, acted in enumerate(row["action_mask"]) if acted)
    values = (number_of(row, by, i) for row, i in sampled)
    return max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0) or 1.0


def legend(rows: Sequence[Json], by: By, paint: Paint, count: int) -> Text:
    """What the colours mean."""
    if not rows:
        return Text("none")
    if by is By.GAP and (reason := rows[0]["gap_refused"]):
        return Text(plain(f"no gap between engine and trainer: {reason}"))
    top = _largest(rows, by)
    if by is By.MASK:
        ends = [(" in the loss ", tinted(1.0)), (" not in it ", tinted(-1.0))]
    else:
        parts = (-1.0, -0.5) if by is By.LOGPROB else (-1.0, -0.5, 0.5, 1.0)
        ends = [(f" {part * top:.3g} ", tinted(part)) for part in parts]
    return Text.assemble(f"{count} trajector{'y' if count == 1 else 'ies'}, tokens by {by}: ", *ends)
