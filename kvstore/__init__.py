"""kvstore keeps the KV cache of LLM serving engines outside the engine."""
