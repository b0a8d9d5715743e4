"""From the log of what was done to a drafter back to its weights: the proof that nothing else enters them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.spot.batch import Piece
from paceline.spot.loss import Teacher
from paceline.spot.plan import MicroStep
from paceline.spot.ring import StoredText
from paceline.spot.trainer import LogEntry, Trainer


def read_log(file: Path) -> list[LogEntry]:
    """Every entry of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def replay(
    trainer: Trainer, entries: Iterable[LogEntry], texts: Mapping[int, StoredText], teachers: Mapping[int, Teacher]
) -> None:
    """Do again what the log says, with a trainer that is where the logged one was."""
    for entry in entries:
        match entry["do"]:
            case "train":
                pieces = tuple(Piece(*piece) for piece in entry["pieces"])
                trainer.train(MicroStep(pieces, entry["lr"], entry["teacher"]), texts, teachers[entry["teacher"]])
            case "publish":
                trainer.publish(entry.get("was_good", True))
            case "roll_back":
                trainer.roll_back()
            case other:
                raise ValueError(f"the drafter's log has an entry {other!r} that nobody knows")
