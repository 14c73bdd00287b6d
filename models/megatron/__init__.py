"""Training with Megatron-core: the one place that knows it."""

import sys
import warnings
from pathlib import Path

# At import Megatron announces, six times, that TransformerEngine and apex are not installed. They need not be.
warnings.filterwarnings("ignore", module=r"megatron\.")
if not Path("/dev/nvidiactl").exists():  # torch would tell too, but the driver loads this package without it
    sys.modules.setdefault("flash_mla", None)  # Megatron imports SGLang's kernels if they are there, which needs a GPU
