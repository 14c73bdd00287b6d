"""What makes room on a GPU that engine and trainer share."""

KNOBS = (
    "the GPU's memory does not suffice for engine and trainer: lower engine.memory (SGLang's share), "
    "engine.cache_tokens, engine.batch or train.micro_tokens, set train.recompute = true, or give each its own GPU "
    "(resources.engine_gpus = 1, resources.trainer_gpus = 1)"
)


class OutOfMemory(RuntimeError):
    """A step that the GPU had no memory for. The same command goes on once there is."""
