"""Warm start: trains a small model from scratch on worked solutions until RL can improve it."""
