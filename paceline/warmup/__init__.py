"""The warm start: a small model trained from nothing on worked solutions, until RL can improve it."""
