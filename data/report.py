"""What the report of an iteration holds, as JSON-ready data: every trajectory, and of a counted sample the tokens.

Sizes are bounded: text by what it takes in the page, tokens by their number. What is left out is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.cutting import cut
from data.ledger import Ledger
from data.manifest import Manifest
from data.strips import choose, rounded, strips_of
from data.summary import IterationSummary
from data.trajectories import Trajectories, read_trajectories
from data.vocabulary import PART, Vocabulary, vocabulary

Json = dict[str, Any]
COMPONENTS = 12  # of a reward that are told


@dataclass(frozen=True)
class Budget:
    """How much of an iteration goes into its report."""

    text_bytes: int = 5_500_000  # of the conversations
    short_bytes: int = 600_000  # of each of errors, references and extracted answers
    tokens: int = 100_000  # of the sample
    tokens_of_one: int = 3_000  # so that those which are always among it have room


def report(ledger: Ledger, summary: IterationSummary, budget: Budget | None = None) -> Json:
    """Raises LookupError for an iteration that has generated nothing yet, ManifestError for what is altered."""
    budget = budget or Budget()
    found = read_trajectories(ledger, summary)
    refused = summary.gap_refused
    sample = choose(found, budget.tokens, budget.tokens_of_one)
    strips = strips_of(found, sample, budget.tokens_of_one, refused is None)
    words = _spell(strips, vocabulary(ledger, summary.manifests["generate"]))
    return {
        "run": ledger.run,
        "iteration": summary.iteration,
        "metrics": {name: _number(value) for name, value in sorted(summary.metrics.items())},
        "steps": [_step(ledger, step, manifest) for step, manifest in summary.manifests.items()],
        "rows": _rows(found, budget),
        "groups": _groups(found),
        **_conversations(found, budget),
        "strips": {str(row): strip for row, strip in strips.items()},
        "words": {str(i): text for i, text in words.items()},
        "gap_refused": refused,
    }


def _spell(strips: Mapping[int, Json], vocabulary: Vocabulary) -> dict[int, str]:
    """Texts of the tokens by id. Those that share a character are spelled in the strip, by their places."""
    words = vocabulary.texts(i for strip in strips.values() for i in strip["ids"])
    for strip in strips.values():
        if any(PART in words.get(i, "") for i in strip["ids"]):
            spelled = enumerate(vocabulary.spelled(strip["ids"]))
            strip["spelled"] = {str(at): text for at, text in spelled if text != words[strip["ids"][at]]}
    return words


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _step(ledger: Ledger, name: str, manifest: Manifest) -> Json:
    """For lineage: what a step made, and of what."""
    sources = manifest.input_uris
    return {
        "step": name,
        "digest": manifest.content_digest,
        "uri": manifest.uri,
        "seconds": round(manifest.seconds, 3),
        "seed": str(manifest.seed),
        "inputs": {
            n: {"digest": digest, "path": ledger.store.path_of(sources[n]) if n in sources else None}
            for n, digest in manifest.inputs.items()
        },
    }


def _rows(found: Trajectories, budget: Budget) -> Json:
    """Columns, a value for each trajectory."""
    groups = {root: i for i, root in enumerate(dict.fromkeys(found.roots))}
    advantage = np.array(found.column("advantages", "advantage"), np.float64)
    components = _components(found)
    return {
        "branch": [own.removeprefix(root) for own, root in zip(found.ids, found.roots, strict=True)],
        "group": [groups[root] for root in found.roots],
        "status": found.statuses,
        "reward": rounded(found.rewards),
        "advantage": rounded(advantage),
        "length": found.lengths.tolist(),
        "stream": found.token_ids.lengths.tolist(),
        "excluded": [reason or None for reason in found.column("advantages", "reason")],
        "components": components,
        "scorer": found.column("rewards", "scorer")[:1],
        **{name: _interned(texts, budget.short_bytes) for name, texts in _short(found).items()},
    }


def _short(found: Trajectories) -> dict[str, list[str | None]]:
    return {
        "error": found.errors,
        "reference": found.references,
        "extracted": found.column("rewards", "extracted_answer"),
    }


def _components(found: Trajectories) -> dict[str, list[float | None]]:
    """Parts of the reward by name, the first COMPONENTS of them."""
    parts = [dict(pairs or []) for pairs in found.column("rewards", "components")]
    names = list(dict.fromkeys(name for row in parts for name in row))[:COMPONENTS]
    return {name: rounded(np.array([row.get(name) for row in parts], np.float64)) for name in names}


def _groups(found: Trajectories) -> Json:
    """Columns, a value for each root, in the order in which they first appear."""
    first = {root: row for row, root in reversed(list(enumerate(found.roots)))}
    at = [first[root] for root in dict.fromkeys(found.roots)]
    columns = {name: found.column("advantages", f"group_{name}") for name in ("mean", "std", "finite")}
    mean, std = (rounded(np.array(columns[name], np.float64)[at]) for name in ("mean", "std"))
    return {
        "root": [found.roots[i] for i in at],
        "mean": mean,
        "std": std,
        "finite": [columns["finite"][i] for i in at],
    }


def _interned(texts: Sequence[str | None], budget: int) -> Json:
    """Each text once, cut to the budget; `at` has the place of every row's, null where it has none."""
    places: dict[str, int] = {}
    at = [None if text is None else places.setdefault(text, len(places)) for text in texts]
    return {"texts": cut(list(places), budget), "at": at}


def _conversations(found: Trajectories, budget: Budget) -> Json:
    """The turns of every trajectory as lists of TURN, with texts and policies as places in `texts` and `policies`."""
    places: dict[str, int] = {}
    policies: dict[tuple[int, str], int] = {}
    turns = []
    for spans in found.column("rollouts", "turns"):
        rows = []
        for t in spans:
            policy = (t["policy_version"], t["policy_digest"]) if t["is_generated"] else None
            rows.append(
                [
                    t["role"],
                    int(t["is_generated"]),
                    t["length"],
                    places.setdefault(t["text"] or "", len(places)),
                    t["finish_reason"],
                    None if policy is None else policies.setdefault(policy, len(policies)),
                    None if t["env_reward"] is None else round(t["env_reward"], 4),
                    None if t["tool_calls"] is None else places.setdefault(t["tool_calls"], len(places)),
                ]
            )
        turns.append(rows)
    texts = cut(list(places), budget.text_bytes)
    return {"turns": turns, "texts": texts, "policies": [list(policy) for policy in policies]}
