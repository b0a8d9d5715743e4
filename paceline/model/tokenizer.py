"""Text to token ids and back, with the tokenizer files of a model folder.

The engine encodes prompts and decodes rollouts with it. It wraps transformers' tokenizers, which it imports only when
one is loaded, and never runs code that came with a model. Decoding never raises: a policy may emit any id. Files come
from strangers: they are checked before transformers sees them, and what it makes of them before a text does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from paceline.core.documents import brief, open_regular, plain, read_json, read_text, refuse_surrogates
from paceline.core.schema import Schema, check
from paceline.model.chat_template import render_chat

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.*",
)
MAX_FILE_BYTES = 2**28
"""Several times the largest vocabulary there is."""
MAX_TEMPLATE_BYTES = 2**20
MAX_GROWTH = 2**14
"""How many characters a tokenizer's replacements may make of one. Steps that double a text would otherwise fill the
memory with a short prompt; real ones make two or three."""

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


_TokenizerFile = Annotated[str, Field(pattern=r"^tokenizer[\w.-]*\.json$")]


class _TokenizerConfig(Schema):
    """What a tokenizer_config.json may make transformers open or run."""

    tokenizer_class: str | None = Field(None, description="a name")
    chat_template: str | list[dict[str, str]] | dict[str, str] | None = Field(
        None, description="a template, or several with their names"
    )
    added_tokens_decoder: dict[str, dict[str, Any]] | None = Field(None, description="an object of objects")
    fast_tokenizer_files: list[_TokenizerFile] | None = Field(None, description="names like tokenizer.json")


class Tokenizer:
    """A model's tokenizer: `encode`, `decode` and its chat template."""

    def __init__(self, hf: Any) -> None:
        """`hf` is a transformers tokenizer."""
        self.hf = hf
        # Model vocabularies are padded and may have gaps; ids without a token decode to nothing.
        vocabulary = hf.get_vocab()
        self._known_ids = frozenset(vocabulary.values())
        special = {token_id for token_id, token in hf.added_tokens_decoder.items() if token.special}
        self._loud_ids = self._known_ids - special - set(hf.all_special_ids)
        self.byte_ids = frozenset(vocabulary[name] for name in _BYTES if name in vocabulary)
        """The ids of single bytes, in vocabularies that have bytes only for characters that they lack."""
        # Its `decode` first looks at every id in case it is not a number, which takes longer than decoding.
        self._decode = getattr(hf, "_decode", hf.decode)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a model folder; None if the folder has no vocabulary."""
        if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
            return None
        _check_files(folder)
        from transformers import AutoTokenizer

        with _explained(f"the tokenizer files in {folder} cannot be read", "copy them again"):
            hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            made = cls(hf)
        _check_growth(getattr(hf, "backend_tokenizer", None), folder)
        return made

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, starting with the model's BOS token unless the text already begins with it."""
        bos = self.hf.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        return self._encode(text, add_special_tokens=not has_bos)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text as it stands, without a BOS token."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        refuse_surrogates(text)
        with _explained(f"the tokenizer of {self._place} cannot encode {brief(text)}", "copy its files again"):
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids without special tokens; ids outside the vocabulary decode to nothing."""
        known = [int(token_id) for token_id in token_ids if token_id in self._known_ids]
        with _explained(f"the tokenizer of {self._place} cannot decode {brief(known)}", "copy its files again"):
            return str(self._decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def is_loud(self, token_id: int) -> bool:
        """Whether a token has a part in the text; special tokens and ids outside the vocabulary have none."""
        return token_id in self._loud_ids

    @property
    def chat_template(self) -> str | None:
        """The template that chats use, if there is one."""
        return str(self.hf.get_chat_template()) if self.hf.chat_template else None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the next assistant turn after `messages`, each with a `role` and a `content`.

        `tools` are schemas of functions; `variables` are what this template reads besides, such as `enable_thinking`.
        """
        if not self.hf.chat_template:
            raise ValueError("this model has no chat template; pass plain text prompts, or use an instruct model")
        if not messages:
            raise ValueError("a chat needs at least one message")
        template = self.hf.get_chat_template(tools=tools)
        try:
            plain_messages = [dict(message) for message in messages]
            return render_chat(template, plain_messages, self.hf.special_tokens_map, tools, variables)
        except ValueError as error:
            raise ValueError(f"the chat template of {self._place} refuses these messages: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the same `chat`; the template alone decides on special tokens."""
        return self._encode(self.chat(messages, tools, variables), add_special_tokens=False)

    @property
    def longest_name(self) -> int:
        """The most characters that a token's name has."""
        return max(map(len, self.hf.get_vocab()), default=1)

    @property
    def _place(self) -> str:
        return self.hf.name_or_path or "this model"

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's EOS token; the model's config may name more."""
        return None if self.hf.eos_token_id is None else int(self.hf.eos_token_id)

    def save(self, folder: Path) -> None:
        """Write the tokenizer files, including the chat template, to `folder`."""
        self.hf.save_pretrained(folder)


def _check_files(folder: Path) -> None:
    """Refuse what transformers would open and never finish reading, or fail over without naming the file."""
    for pattern in TOKENIZER_FILES:
        for file in folder.glob(pattern):
            if file.is_dir():
                continue
            with open_regular(file) as opened:
                opened.seek(0, 2)
                if opened.tell() > MAX_FILE_BYTES:
                    raise ValueError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes, which no tokenizer's file is")
            if file.suffix == ".jinja":
                read_text(file, MAX_TEMPLATE_BYTES)
    if (folder / _TOKENIZER_CONFIG).is_file():
        check(_TokenizerConfig, read_json(folder / _TOKENIZER_CONFIG), str(folder / _TOKENIZER_CONFIG))


def load_decoder(folder: Path) -> Callable[[Sequence[int]], str] | None:
    """A tokenizer's `decode` from its tokenizer.json alone, without transformers, which imports torch; None if there is
    no such file. Its texts may differ from `Tokenizer.decode` in special tokens that only other files name."""
    if not (folder / _TOKENIZER).is_file():
        return None
    _check_files(folder)
    from tokenizers import Tokenizer as Backend

    with _explained(f"{folder / _TOKENIZER} cannot be read", "copy it again"):
        backend = Backend.from_file(str(folder / _TOKENIZER))
    _check_growth(backend, folder)
    known_ids = frozenset(backend.get_vocab().values())

    def decode(token_ids: Sequence[int]) -> str:
        known = [token_id for token_id in token_ids if token_id in known_ids]
        with _explained(f"{folder / _TOKENIZER} cannot decode {brief(known)}", "copy it again"):
            return str(backend.decode(known, skip_special_tokens=True))

    return decode


def _check_growth(backend: Any, folder: Path) -> None:
    """Refuse replacements that multiply each other."""
    for part in ("normalizer", "decoder"):
        found = getattr(backend, part, None)
        steps = [] if found is None else _replacements(json.loads(found.__getstate__()))
        growth = math.prod(map(_growth, steps))
        if growth > MAX_GROWTH:
            times = f"makes a text up to {growth:,} times as long; at most {MAX_GROWTH:,} is accepted"
            raise ValueError(f"the {part} in {folder / 'tokenizer.json'} {times}")


def _replacements(step: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder that replace text, in all its sequences."""
    if not isinstance(step, dict):
        return []
    inner = [one for value in step.values() if isinstance(value, list) for one in value]
    own = [step] if step.get("type") == "Replace" else []
    return own + [found for one in inner for found in _replacements(one)]


def _growth(step: Mapping[str, Any]) -> int:
    """The most characters that a replacement makes of one; a pattern may match between characters as well."""
    text = step["pattern"].get("String")
    return max(1, -(-len(step["content"]) // len(text))) if text else len(step["content"]) + 1


@contextmanager
def _explained(what: str, fix: str) -> Iterator[None]:
    """Turn whatever transformers and its Rust code raise into one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ValueError(f"{what} ({plain(' '.join(str(error).split()), most=400)}); {fix}") from error
