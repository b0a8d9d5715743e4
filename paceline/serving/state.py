"""The server's nouns: what routes share about the model, who may ask and for how much, and how they refuse.

Filled by `paceline serve` and `process.py`, read by all routes. It must not import torch: the server answers `/health`
before that is loaded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.serving.jobs import AnswerJob

if TYPE_CHECKING:
    from paceline.model.tokenizer import Tokenizer
    from paceline.serving.engine_loop import EngineLoop
    from paceline.serving.journal import Journal
    from paceline.serving.transfer import Transfer


@dataclass
class Model:
    """What the routes need of a loaded model."""

    loop: EngineLoop
    tokenizer: Tokenizer | None
    max_context: int
    dtype: str
    most_characters: int
    """A longer text cannot fit into the context."""
    read_weights: Callable[[Path], Callable[[], object]]
    """Reads a folder and returns what puts its weights into place, between two steps."""
    checksums: Callable[[], Mapping[str, str]]
    """Hashes of the weights in use; to be called in the engine's thread."""
    transfer: Transfer | None = None
    """Receives weights from a trainer; None: the server was not started for that."""
    journal: Journal | None = None


@dataclass(frozen=True)
class ServerLimits:
    """Who may ask, and for how much."""

    api_key: str | None = None
    max_body_bytes: int = 2**24
    weight_root: Path | None = None
    """Weights are loaded from folders below this one; None: from none."""
    hosts: tuple[str, ...] = ("*",)
    """Names by which the server may be called: others are a browser that was led here."""


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Server:
    """The state of the application."""

    names: Sequence[str]
    """What requests may call the model; the first is what answers call it."""
    limits: ServerLimits
    seed: int = 0
    model: Model | None = None
    jobs: dict[str, AnswerJob] = field(default_factory=dict)
    """Open requests, by the ids of their responses."""
    encoding: threading.Lock = field(default_factory=threading.Lock)
    """Tokenizers do not encode in two threads at once."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever replaces weights."""

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.names[0]

    def ready(self) -> Model:
        """The model, or 503 while it loads."""
        if self.model is None:
            raise Refusal(503, "the model is loading; /health answers 200 when it is ready")
        if not self.model.loop.is_running:
            raise Refusal(503, "the engine has stopped; restart the server")
        return self.model
