"""Megatron's GPTModel, built from a ModelShape: the one file that knows that class (upstream will replace it)."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from models.megatron.attention import PackedAttention
from models.megatron.batch import PackedBatch
from models.megatron.head import Head
from models.megatron.norm import RMSNorm
from models.megatron.rotary import inverse_frequencies
from models.megatron.shape import ModelShape

# From (hidden [tokens, hidden], the output layer) -> whatever the caller needs
type Reader[Outputs] = Callable[[torch.Tensor, Head], Outputs]


class Trunk(GPTModel):
    """The transformer with its output layer; `read` decides what is made of the hidden states."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        with_output: bool,
        sequence_parallel: bool = False,
    ) -> None:
        """with_output False: no parameters for an output layer of its own (a critic's trunk)."""
        config = _config(shape, dtype, sequence_parallel, fused=device.type == "cuda")
        super().__init__(
            config,
            _spec(config),
            vocab_size=shape.vocab,
            max_sequence_length=shape.context,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=shape.tied or not with_output,
            position_embedding_type="none",  # PackedAttention applies the rotary embedding
        )
        if self.post_process and sequence_parallel:
            # `_hand_over` gathers the tokens once, for the output layer and the value head.
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True
        self.to(device)
        self.inverse_frequencies = inverse_frequencies(shape.rope, shape.head_dim).to(device)  # [head_dim / 2]
        self.dtype = dtype

    def _is_in_embd_group(self) -> bool:
        """Megatron asks before it copies a tied embedding to the last stage; weights are loaded into both here."""
        return False

    def forward[Outputs](self, batch: PackedBatch, read: Reader[Outputs]) -> Outputs | torch.Tensor:
        """On the last pipeline stage what `read` returns, on the others the hidden states for the next one."""
        self._set_angles(batch)
        return super().forward(
            batch.tokens,
            None,
            None,
            packed_seq_params=batch,
            output_processor=_hand_over,
            output_processor_context=read,
        )

    def _set_angles(self, batch: PackedBatch) -> None:
        if batch.cos is None:
            angles = torch.outer(batch.positions, self.inverse_frequencies)[:, None]
            batch.cos, batch.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _hand_over(
    *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, output_weight: torch.Tensor | None, **rest: object
) -> object:
    if output_layer.config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    weight = output_layer.weight if output_weight is None else output_weight
    return rest["context"](hidden_states[:, 0], Head(output_layer, weight, output_layer.tp_group))


def _config(shape: ModelShape, dtype: torch.dtype, sequence_parallel: bool, fused: bool) -> TransformerConfig:
    experts = shape.experts
    mixture = (
        {}
        if experts is None
        else {
            "num_moe_experts": experts.total,
            "moe_router_topk": experts.active,
            "moe_router_pre_softmax": not experts.normed,
            "moe_router_load_balancing_type": "none",
        }
    )
    return TransformerConfig(
        **mixture,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=fused,  # SwiGLU as one kernel each way, made by torch.compile
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,  # weights are always loaded
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, also without experts
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # before DDP is built, or gradients are off by 1 / DP
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )


def _spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with our attention and norm: theirs refuse packed rows and sequence parallelism."""
    layer = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
