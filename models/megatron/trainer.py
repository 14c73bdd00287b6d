"""One training rank: replays, trains and exports a policy, with or without a critic. Every rank gets the same call."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from data.config import LayoutConfig
from models.megatron import course, ranks, state
from models.megatron.contract import Replayed, Setup, TrainBatch, TrainOptions
from models.megatron.course import Course, Metrics, optimizer_step
from models.megatron.fit import require_fit
from models.megatron.micro import check_batch, check_streams, prepare, prepare_lesson, value_scale
from models.megatron.networks import Networks, read_policy
from models.megatron.replay import replay
from models.megatron.shape import CONFIG_FILE, ModelShape
from models.megatron.shares import Shares
from models.megatron.state import StateCopy
from models.weights import require_digest, tensors_digest, write_tensors
from ops.ragged import Ragged

Plan = list[list[np.ndarray]]  # [optimizer step][micro-batch] -> row numbers; a row left out is not trained on


class Trainer:
    """A warm cache of one training state: results depend only on what it was brought to and on the calls since.

    With several ranks each call is made on all of them, with equal arguments, or none returns.
    """

    def __init__(self, rank: int, world: int, rendezvous: str, threads: int, layout: LayoutConfig) -> None:
        """Joins the training world (see ranks.join); holds nothing yet."""
        self._device = ranks.join(rank, world, rendezvous, threads, layout)
        self._layout, self._shares = layout, Shares.of_this_rank(layout.sequence_parallel)
        self._networks: Networks | None = None
        self._setup: Setup | None = None
        self._config = b""  # the model's config.json, as it came
        self._policy_digest: str | None = None  # while it holds a policy that was not trained on
        self._state_digest: str | None = None  # None: not computed since the last change
        self._exported: str | None = None  # None: not exported since the last change

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes results; the others take part and have none."""
        return ranks.is_first()

    def resume(self, digest: str, setup: Setup) -> bool:
        """Go on, under `setup`, if it is at the policy or state of that digest; else False: it has to be brought."""
        if not self._fits(setup) or self.digest != digest:
            return False
        self._setup = setup
        return True

    @property
    def device(self) -> str:
        """cpu or cuda. On a CPU the same calls on the same layout and threads give the same bits."""
        return self._device.type

    def take_for(self, digest: str) -> None:
        """Answer to that digest from now on: its state was made again, as close as this machine comes to it."""
        self._held()
        self._state_digest = digest

    def from_first[Value](self, find: Callable[[], Value]) -> Value:
        """What `find()` gives the first rank, on every rank."""
        return ranks.told_by_first(find() if self.is_first else None)

    @property
    def digest(self) -> str | None:
        """Of the policy it was brought to; once trained, or brought to a state, of the full training state."""
        if self._networks is None or self._policy_digest is not None:
            return self._policy_digest
        if self._state_digest is None:
            self._state_digest = state.digest(self._networks)
        return self._state_digest

    def bring_to_policy(self, folder: Path, digest: str, setup: Setup) -> None:
        """Weights from a Hugging Face folder, fresh optimizers, zero value head. Nothing to do if it holds just that.

        Raises WeightsMismatch unless the folder's tensors have that digest (models.weights.tensors_digest), and
        ValueError for a model that has no place here or does not fit the layout.
        """
        if self.resume(digest, setup):
            return
        shape, dtype, tensors = read_policy(folder)
        require_digest(f"policy {folder}", tensors_digest(tensors), digest)
        networks = self._emptied(shape, dtype, setup)
        networks.load_policy(tensors)
        self._hold(networks, folder, setup)
        self._policy_digest = digest

    def bring_to_state(self, folder: Path, digest: str, setup: Setup) -> None:
        """The full training state that a StateCopy left in `folder`. Nothing to do if it holds just that.

        Raises WeightsMismatch unless the state has that digest, ValueError if it has another kind of critic.
        """
        if self.resume(digest, setup):
            return
        dtype, critic = state.describe(folder)
        if critic != setup.critic.kind:
            raise ValueError(
                f"state {folder}: its critic is {critic!r}, critic.kind is {setup.critic.kind!r}; keep the kind within "
                "a run, or start from the policy"
            )
        networks = self._emptied(ModelShape.from_hf(folder), dtype, setup)
        state.load(networks, folder)
        got = state.digest(networks)
        require_digest(f"state {folder}", got, digest)
        self._hold(networks, folder, setup)
        self._state_digest = got

    def replay(
        self,
        streams: Ragged,
        action_mask: Ragged,
        micro_batches: list[np.ndarray],
        temperature: float,
        values: bool,
    ) -> Replayed | None:
        """What the present weights say of the action tokens of the rows in `micro_batches`. Changes nothing.

        The first rank returns it, the others None.
        Raises ValueError if values are asked for and there is no critic, before any forward pass.
        """
        networks = self._held()
        if values and networks.critic_kind == "none":
            raise ValueError("values asked of critic.kind 'none'; set critic.kind, or replay without values")
        _check_temperature(temperature)
        check_streams(streams, action_mask)
        micros = [prepare(streams, action_mask, rows, self._device, self._shares) for rows in micro_batches]
        return replay(networks, streams, micros, temperature, values)

    def train(self, batch: TrainBatch, plan: Plan, options: TrainOptions) -> list[Metrics]:
        """One optimizer step per entry of `plan`; returns the metrics of each.

        Raises SickStep before anything of the sick optimizer step has moved, ValueError for a batch that lacks what the
        critic needs.
        """
        _check_temperature(options.temperature)
        check_batch(batch, critic=self._held().critic_kind != "none")
        return self._follow(course.ppo(options, self._setup), batch, plan)

    def supervise(self, streams: Ragged, loss_mask: Ragged, plan: Plan) -> list[Metrics]:
        """Cross entropy of the loss tokens, mean per token, with the same machinery; a critic stays as it is."""
        zeros = streams.like(np.zeros(len(streams.values), np.float32))
        batch = TrainBatch(streams, loss_mask, loss_mask, old_logprobs=zeros, advantages=zeros)
        check_batch(batch, critic=False)
        metrics = self._follow(course.supervised(), batch, plan)
        names = {"loss/policy": "loss"} | {name: name for name in ("entropy", "grad_norm", "lr", "train/tokens")}
        return [{new: step[old] for old, new in names.items()} for step in metrics]

    def export_policy(self, folder: Path) -> str:
        """Writes model.safetensors and config.json, without any part of the critic; returns the tensors' digest.

        The first rank writes, into its `folder`; the others' is not touched.
        """
        tensors, digest = self._held().policy_tensors(), ""
        if tensors is not None:
            digest = write_tensors(folder, tensors)
            (Path(folder) / CONFIG_FILE).write_bytes(self._config)
        self._exported = ranks.told_by_first(digest)
        return self._exported

    @property
    def exported(self) -> str | None:
        """Digest of the policy as it was exported last; None if the weights have changed since."""
        return self._exported

    def copy_state(self) -> StateCopy | None:
        """The full training state as it is now, on the first rank; None on the others."""
        copied = state.copy(self._held(), self._config)
        self._state_digest = ranks.told_by_first(copied.digest if copied is not None else "")
        return copied

    def _follow(self, lessons_of: Course, batch: TrainBatch, plan: Plan) -> list[Metrics]:
        self._policy_digest = self._state_digest = self._exported = None
        self._held().recompute(self._setup.recompute)
        metrics = []
        for number, step in enumerate(plan):
            members = sorted(int(row) for rows in step for row in rows)
            scale = value_scale(batch, np.array(members, np.int64), lessons_of.policy.mode)
            lessons = [prepare_lesson(batch, rows, self._device, self._shares, scale) for rows in step]
            metrics.append(optimizer_step(self._held(), self._setup, lessons_of, lessons, number, members))
        return metrics

    def _held(self) -> Networks:
        if self._networks is None:
            raise RuntimeError("the trainer holds no model; call bring_to_policy or bring_to_state first")
        return self._networks

    def _fits(self, setup: Setup) -> bool:
        """Rates and clips are read anew in every step; only the kind of critic is built in."""
        return self._networks is not None and self._networks.critic_kind == setup.critic.kind

    def _emptied(self, shape: ModelShape, dtype: torch.dtype, setup: Setup) -> Networks:
        """Networks to load into, the present ones if they are alike. Until `_hold` the trainer holds nothing."""
        require_fit(shape, self._layout)
        networks, self._networks = self._networks, None
        self._policy_digest = self._state_digest = self._exported = None
        if networks is not None and networks.is_like(shape, dtype, setup.critic.kind):
            return networks
        del networks  # before the new ones take their memory
        return Networks(shape, dtype, setup.critic.kind, self._device, self._layout.sequence_parallel)

    def _hold(self, networks: Networks, folder: Path, setup: Setup) -> None:
        self._networks, self._setup = networks, setup
        self._config = (Path(folder) / CONFIG_FILE).read_bytes()


def _check_temperature(temperature: float) -> None:
    if not temperature > 0.0:
        raise ValueError(f"temperature {temperature}: the log-probs of greedy decoding are not defined; it must be > 0")
