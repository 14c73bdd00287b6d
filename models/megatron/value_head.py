"""The critic's head: one linear layer from the hidden state to a value."""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """hidden → 1 with bias, in float32 whatever the trunk's dtype; zero at the start. Never exported."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens] float32"""
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)[:, 0]
