"""Ranks that differ: what they agree on before collectives start, and what they tell each other when they fail."""
