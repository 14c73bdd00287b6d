"""A pass over stored trajectories at the present weights, without gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.megatron import ranks
from models.megatron.contract import Replayed
from models.megatron.micro import Micro
from models.megatron.networks import Networks, Outputs, run_schedule
from ops.ragged import Ragged


@dataclass(frozen=True)
class _Seen:
    """Of one micro-batch's share, on the host."""

    source: np.ndarray  # [actions] int64, index in the streams' flat values
    rows: np.ndarray  # [rows] int64
    logprobs: np.ndarray  # [actions] float32
    entropy: np.ndarray  # [actions] float32
    values: np.ndarray | None  # [actions] float32
    bootstrap: np.ndarray | None  # [rows] float32


def replay(
    networks: Networks, streams: Ragged, micros: list[Micro], temperature: float, values: bool
) -> Replayed | None:
    """Log-probs, entropy and, if asked for, values of the micro-batches' action tokens, scattered over the streams.

    micros: this rank's shares; the first rank returns what all have seen, the others None.
    """

    def look(micro: Micro) -> tuple[Outputs, Callable[..., Outputs]]:
        return networks.policy_pass(micro.packed, micro.reads, temperature), _keep

    def look_at_critic(micro: Micro) -> tuple[Outputs, Callable[..., Outputs]]:
        return networks.critic_pass(micro.packed), _keep

    seen = valued = run_schedule(networks.parts["policy"], micros, look, forward_only=True)
    if values and networks.critic_kind == "separate":
        valued = run_schedule(networks.parts["critic"], micros, look_at_critic, forward_only=True)
    spoken = zip(micros, seen, valued, strict=True) if ranks.is_speaker() else ()
    hosts = ranks.to_first([_to_host(micro, *both, values) for micro, *both in spoken])
    return None if hosts is None else _assemble(streams, hosts, values)


def _assemble(streams: Ragged, hosts: list[_Seen], values: bool) -> Replayed:
    bootstrap = np.zeros(len(streams), np.float32)
    for host in hosts:
        bootstrap[host.rows] = host.bootstrap if values else 0.0
    return Replayed(
        logprobs=_scatter(streams, hosts, [host.logprobs for host in hosts]),
        entropy=_scatter(streams, hosts, [host.entropy for host in hosts]),
        values=_scatter(streams, hosts, [host.values for host in hosts]) if values else None,
        bootstrap_values=bootstrap if values else None,
    )


def _keep(outputs: Outputs, non_loss_data: bool) -> Outputs:
    """The loss function of a pass that has no loss."""
    return outputs


def _to_host(micro: Micro, seen: Outputs, valued: Outputs, values: bool) -> _Seen:
    at_actions = at_ends = None
    if values:
        at_actions = valued.values.index_select(0, micro.reads.at).cpu().numpy()
        at_ends = valued.values.index_select(0, micro.last).cpu().numpy()
    logprobs, entropy = seen.logprobs.cpu().numpy(), seen.entropy.cpu().numpy()
    return _Seen(micro.source, micro.packed.rows, logprobs, entropy, at_actions, at_ends)


def _scatter(streams: Ragged, hosts: list[_Seen], parts: list[np.ndarray]) -> Ragged:
    values = np.zeros(len(streams.values), np.float32)
    for host, part in zip(hosts, parts, strict=True):
        values[host.source] = part
    return streams.like(values)
