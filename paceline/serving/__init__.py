"""The rollout server: one open engine behind HTTP, with the routes that vLLM's clients use."""
