"""Training with Megatron-core: the one place that knows it."""

import sys
import warnings

import torch

# At import Megatron announces, six times, that TransformerEngine and apex are not installed. They need not be.
warnings.filterwarnings("ignore", module=r"megatron\.")
if not torch.cuda.is_available():
    sys.modules.setdefault("flash_mla", None)  # Megatron imports SGLang's kernels if they are there, which needs a GPU
