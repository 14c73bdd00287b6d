"""Rollout engines: one contract, several engines behind it."""
