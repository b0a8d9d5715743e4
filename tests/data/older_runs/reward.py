"""The share of vowels, so that a random model has something to learn."""

from __future__ import annotations


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]
