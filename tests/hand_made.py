"""What rollouts that tests make by hand have in common."""

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": 8,
    "seed": 1,
    "stop": [],
    "logprob_semantics": "sampled",
}
BY_HAND = {
    "depth": 1,
    "stage": "policy",
    "purpose": "train",
    "media": [],
    "error": None,
    "sampling": SAMPLING,
    "engine": "hand",
    "engine_version": "1",
    "tokenizer_digest": "t",
    "template_digest": "t",
    "started_at": None,
    "latency_ms": None,
}
