"""Text to token ids and back, with the tokenizer files of a model folder.

The engine encodes prompts and decodes rollouts with it. It wraps transformers' tokenizers, which it imports only when
one is loaded, and never runs code that came with a model. Decoding never raises: a policy may emit any id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class Tokenizer:
    """A model's tokenizer: `encode`, `decode` and its chat template."""

    def __init__(self, hf: Any) -> None:
        """`hf` is a transformers tokenizer."""
        self.hf = hf
        # Model vocabularies are padded and may have gaps; ids without a token decode to nothing.
        self._known_ids = frozenset(hf.get_vocab().values())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a model folder; None if the folder has no vocabulary."""
        if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # Broken files raise many types, some of them plain Exception.
            raise ValueError(f"the tokenizer files in {folder} cannot be read ({error}); copy them again") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, starting with the model's BOS token unless the text already begins with it."""
        bos = self.hf.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        return list(self.hf.encode(text, add_special_tokens=not has_bos))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids without special tokens; ids outside the vocabulary decode to nothing."""
        known = [int(token_id) for token_id in token_ids if token_id in self._known_ids]
        return str(self.hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the next assistant turn after `messages`, each with a `role` and a `content`."""
        if not self.hf.chat_template:
            raise ValueError("this model has no chat template; pass plain text prompts, or use an instruct model")
        messages = [dict(message) for message in messages]
        return str(self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of `chat(messages)`; the template alone decides on special tokens."""
        return list(self.hf.encode(self.chat(messages), add_special_tokens=False))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's EOS token; the model's config may name more."""
        return None if self.hf.eos_token_id is None else int(self.hf.eos_token_id)

    def save(self, folder: Path) -> None:
        """Write the tokenizer files, including the chat template, to `folder`."""
        self.hf.save_pretrained(folder)
