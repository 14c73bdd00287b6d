"""Training with Megatron-core: the one place that knows it."""

import warnings

# At import Megatron announces, six times, that TransformerEngine and apex are not installed. They need not be.
warnings.filterwarnings("ignore", module=r"megatron\.")
