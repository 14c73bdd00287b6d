"""The critic's head: one linear layer from the hidden state to a value."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """hidden → 1 with bias, in float32 whatever the trunk's dtype; zero at the start. Never exported.

    Every pipeline stage has one, so that all ranks make the same calls; the last stage's is the one that learns.
    """

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens] float32"""
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)[:, 0]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What a checkpoint keeps: the last stage's head, which all stages then load."""
        state = super().sharded_state_dict(*args, **kwargs)
        stages_on = parallel_state.get_pipeline_model_parallel_world_size() - 1
        stages_on -= parallel_state.get_pipeline_model_parallel_rank()
        for tensor in state.values():
            tensor.replica_id = (stages_on, *tensor.replica_id[1:])
        return state
