"""``kvstore proxy``: one OpenAI-compatible endpoint in front of prefill and decode instances."""
