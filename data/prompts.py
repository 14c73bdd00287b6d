"""Where prompts come from. A source is endless; a cursor, part of the run's state, says how much is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import JsonValue

from data.config import PromptsConfig
from data.digest import json_digest
from data.problems import PROBLEMS, Problem, draw, held_out
from data.prompt_files import Prompt, PromptError, read_prompts
from data.seeds import derive

DEMONSTRATION = "demonstration"  # in a prompt's metadata
__all__ = ["Prompt", "PromptError", "PromptSource", "load_source"]


class PromptSource(Protocol):
    """Draws prompts. `cursor` counts prompts since the start of the run; equal cursors and seeds give equal prompts."""

    @property
    def digest(self) -> str:
        """Of the training prompts, or of what makes them."""
        ...

    @property
    def held_out_digest(self) -> str:
        """The same for the held-out prompts."""
        ...

    @property
    def duplicates(self) -> int:
        """Rows that were left out because an earlier row says the same."""
        ...

    def take(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Prompts at positions cursor to cursor + count."""
        ...

    def held_out(self, count: int | None) -> list[Prompt]:
        """The first `count` prompts that are never trained on (None: all), always the same; or as many as there are."""
        ...

    def demonstrations(self, cursor: int, count: int, seed: int) -> list[tuple[Prompt, tuple[str, ...]]]:
        """Training prompts with what is to be said, turn by turn. Raises PromptError for a source without any."""
        ...


def load_source(config: PromptsConfig) -> PromptSource:
    """The source of a config: a procedural problem by name, else a file.

    Raises PromptError for an unknown name, a file that is missing, empty or has a broken row, or a size that is wrong.
    """
    if config.source in PROBLEMS:
        return _procedural(config)
    if config.digits is not None:
        raise PromptError(
            f"prompts.digits = {config.digits} with source {config.source!r}: only {', '.join(PROBLEMS)} have a size; "
            "remove it"
        )
    files = read_prompts(Path(config.source), config.system)
    held = read_prompts(Path(config.held_out), config.system) if config.held_out else None
    return FileSource(config.source, files.prompts, held.prompts if held else None, files.duplicates)


def _procedural(config: PromptsConfig) -> "ProceduralSource":
    kind = PROBLEMS[config.source]
    digits = config.digits or kind.default_digits
    if digits > kind.max_digits:
        raise PromptError(f"prompts.digits = {digits}: {kind.name} has at most {kind.max_digits}; set fewer")
    if config.held_out is not None:
        raise PromptError(
            f"prompts.held_out = {config.held_out!r} with source {kind.name!r}: it holds out one problem in five by "
            "itself; remove it"
        )
    return ProceduralSource(kind(digits), config.system)


@dataclass(frozen=True)
class ProceduralSource:
    """Problems made on demand, each drawing independent of the others; one in five problems is held out."""

    problem: Problem
    system: str | None = None
    duplicates: int = 0

    @property
    def digest(self) -> str:
        return json_digest([self.problem.name, self.problem.digits, self.problem.version, self.system])

    @property
    def held_out_digest(self) -> str:
        return self.digest

    def take(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(draw(self.problem, at, seed, "train")) for at in range(cursor, cursor + count)]

    def held_out(self, count: int | None) -> list[Prompt]:
        return [self._prompt(item) for item in held_out(self.problem, self.problem.size if count is None else count)]

    def demonstrations(self, cursor: int, count: int, seed: int) -> list[tuple[Prompt, tuple[str, ...]]]:
        places = range(cursor, cursor + count)
        items = [draw(self.problem, at, seed, "demonstration") for at in places]
        turns = [self.problem.shown(item, derive(seed, "shown", at)) for at, item in zip(places, items, strict=True)]
        return [(self._prompt(item), said) for item, said in zip(items, turns, strict=True)]

    def _prompt(self, item: int) -> Prompt:
        messages: list[dict[str, JsonValue]] = [{"role": "user", "content": self.problem.question(item)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        name, text = self.problem.name, self.problem.text(item)
        metadata: dict[str, JsonValue] = {"data_set": name, "item": item, "answer": self.problem.answer(item)}
        return Prompt(f"{name}-{text}", messages, metadata)


@dataclass(frozen=True)
class FileSource:
    """The rows of a file, in another order each epoch; every row once in an epoch."""

    name: str
    prompts: Sequence[Prompt]
    held: Sequence[Prompt] | None
    duplicates: int

    @property
    def digest(self) -> str:
        return _prompts_digest(self.prompts)

    @property
    def held_out_digest(self) -> str:
        return _prompts_digest(self.held or ())

    def take(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        size = len(self.prompts)
        places = (divmod(at, size) for at in range(cursor, cursor + count))
        return [self.prompts[_epoch_order(seed, epoch, size)[at]] for epoch, at in places]

    def held_out(self, count: int | None) -> list[Prompt]:
        if self.held is None:
            raise PromptError(
                f"prompts.source {self.name} has no held-out prompts; set prompts.held_out to a file, or "
                "evaluate.problems = 0"
            )
        return list(self.held[:count])

    def demonstrations(self, cursor: int, count: int, seed: int) -> list[tuple[Prompt, tuple[str, ...]]]:
        shown = FileSource(self.name, [p for p in self.prompts if DEMONSTRATION in p.metadata], None, 0)
        if not shown.prompts:
            raise PromptError(
                f"prompts.source {self.name} has no demonstrations: no row has metadata.{DEMONSTRATION}, the text (or "
                "list of texts, one a turn) that is to be said; add some, or set warm_start.steps = 0"
            )
        return [(prompt, _turns(self.name, prompt)) for prompt in shown.take(cursor, count, seed)]


def _turns(name: str, prompt: Prompt) -> tuple[str, ...]:
    told = prompt.metadata[DEMONSTRATION]
    turns = [told] if isinstance(told, str) else told
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return tuple(map(str, turns))
    raise PromptError(
        f"{name}: prompt {prompt.prompt_id}: metadata.{DEMONSTRATION} is {told!r}; it must be a text or a list of texts"
    )


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """[size] int64, a permutation. Only the raw stream of a bit generator is the same in every version of numpy."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(size), kind="stable")


def _prompts_digest(prompts: Sequence[Prompt]) -> str:
    return json_digest([[p.prompt_id, p.messages, p.metadata] for p in prompts])
