"""Checks that an exported drafter computes elsewhere what it computes here. Behind `export-drafter --check`.

    elsewhere   the exported files, `eagle3_reference.py`, and hidden states from transformers
    here        the run's own drafter, rounded as exported, and hidden states as the engine taps them

Both read texts of the run in float32 arithmetic: first a whole text, then a few draft tokens after its end. Only the
order of sums may differ, unless a name, a layer, an order or an id is wrong. It writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.integrations.eagle3_reference import Reference, aux_layers
from paceline.integrations.export import DTYPES, FoundDrafter
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.eagle.layer import Tapped
from paceline.model.eagle.network import Eagle
from paceline.model.eagle.unroll import Layout, Unroll, Window
from paceline.model.folder import load_config
from paceline.model.rope import rope_table
from paceline.model.rows import Rows, SequenceRows
from paceline.model.tokenizer import Tokenizer
from paceline.run.store.folder import ROLLOUTS

BAR = 1e-3
"""The largest logit difference that the order of sums can explain."""
NUM_TEXTS, MAX_TOKENS, NUM_GUESSES = 8, 256, 4
FEWEST_LAYERS = 3
"""The fewest layers of a policy that has all three hidden states."""


@dataclass
class Check:
    """The result; differences are the largest over all logits."""

    num_rows: int = 0
    difference: float = 0.0
    """Between elsewhere and here."""
    largest: float = 0.0
    """Of the logits themselves."""
    rounding: float = 0.0
    """How far storing the weights in fewer bits moved the logits, both computed here."""
    _same: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def is_good(self) -> bool:
        return self.num_rows > 0 and self.difference < BAR  # a NaN fails

    @property
    def same_first(self) -> float:
        """Share of rows on which elsewhere has the same top token as the run's unrounded drafter."""
        return float(torch.cat(self._same).float().mean())

    def __str__(self) -> str:
        verdict = "the same" if self.is_good else "NOT THE SAME"
        return (
            f"{verdict}: the logits of a forward that knows only the format and those of the run's drafter differ "
            f"by at most {self.difference:.1e} (bar {BAR:.0e}, largest logit {self.largest:.1f}; {self.num_rows:,} "
            "rows of the run's texts, weights as stored, float32 arithmetic)\n"
            f"storing the weights moved logits by at most {self.rounding:.1e}; on {self.same_first:.1%} of the "
            "rows the top token is that of the run's drafter"
        )

    def add(self, elsewhere: Tensor, here: Tensor, unrounded: Tensor) -> None:
        self.num_rows += len(here)
        self.difference = _larger(self.difference, (elsewhere - here).abs())
        self.largest = _larger(self.largest, here.abs())
        self.rounding = _larger(self.rounding, (here - unrounded).abs())
        self._same.append(elsewhere.argmax(-1) == unrounded.argmax(-1))


def _larger(value: float, found: Tensor) -> float:
    """The larger one; NaN if any is."""
    return float(torch.cat((found.flatten(), torch.tensor([value]))).max())


@torch.no_grad()
def check_drafter(out: Path, drafter: FoundDrafter) -> Check:
    """Compare an exported drafter with its source; ValueError if it cannot be read or compared."""
    reference, policy = Reference(out), drafter.find_policy()
    if not torch.equal(reference.target_ids, drafter.eagle.draft_ids):
        raise ValueError(f"{out} has other token ids than the drafter it was exported from; export it again")
    dtype = DTYPES[reference.config["torch_dtype"]]
    weights = {name: weight.to(dtype).float() for name, weight in drafter.eagle.weights.items()}
    rounded = replace(drafter.eagle, weights=weights)
    engine = _Policy(policy)
    check = Check()
    for ids in islice(_texts(drafter, engine.tokenizer), NUM_TEXTS):
        hidden, taps = engine.hidden_states(ids), engine.taps(ids)
        here = [_Here(eagle, ids, taps, engine.embedding) for eagle in (rounded, drafter.eagle)]
        elsewhere = reference.begin(hidden, ids, engine.embedding)
        check.add(elsewhere, *(each.text_logits for each in here))
        for _ in range(NUM_GUESSES):
            guess = int(reference.target_ids[elsewhere[-1].argmax()])
            elsewhere = reference.follow(guess, engine.embedding)[None]
            check.add(elsewhere, *(each.follow(guess) for each in here))
    return check


class _Here:
    """Our drafter on one text."""

    def __init__(self, eagle: Eagle, ids: Tensor, taps: Tensor, embedding: Tensor) -> None:
        self._eagle, self._embedding = eagle, embedding
        self.text_logits = eagle.forward_text(ids, taps, embedding)[1]
        turns = rope_table(eagle.config.rope, eagle.config.head_dim, len(ids) + NUM_GUESSES)
        last = Layout.of([Window(0, len(taps) - 1, len(taps))])
        self._unroll = Unroll(eagle.config, eagle.weights, last, turns)
        self._states = self._unroll.begin(taps, F.embedding(ids[1:], embedding))

    def follow(self, token_id: int) -> Tensor:
        """[1, draft vocabulary]: the logits after a token drafted from the last row."""
        self._states = self._unroll.advance(self._states, self._embedding[token_id][None])
        return self._eagle.logits(self._states)


class _Policy:
    """The policy's hidden states, from transformers and from the engine's decoder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        config = load_config(folder)
        if config.num_layers < FEWEST_LAYERS:
            raise ValueError(f"a policy of {config.num_layers} layers lacks hidden states that other engines read")
        weights = load_weights(folder, config)
        self._decoder = Decoder(config, weights, precision="float32")
        self._hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.embedding = weights["model.embed_tokens.weight"].float()
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None, "a run's policy has a tokenizer"
        self.tokenizer = tokenizer

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Low, mid and high states of all tokens but the last."""
        found = self._hf(ids[None, :-1], output_hidden_states=True).hidden_states
        low, mid, high = (found[index][0] for index in aux_layers(self._decoder.config.num_layers))
        return low, mid, high

    def taps(self, ids: Tensor) -> Tensor:
        """The same, concatenated, as the engine passes them to its drafter."""
        decoder, size = self._decoder, self._decoder.ops.page_size
        pages = range(-(-len(ids) // size))
        rows = Rows.build([SequenceRows(ids[:-1].numpy().astype(np.int32), 0, pages)], page_size=size)
        tapped = Tapped(decoder.config.num_layers, len(ids) - 1, decoder.config.hidden_size, "cpu")
        decoder.forward(rows, decoder.allocate_cache(len(pages)), tapped)
        return tapped.states


def _texts(drafter: FoundDrafter, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """The run's latest texts, prompts included, at least two tokens each."""
    assert drafter.run is not None, "a drafter with a known policy is in a run"
    files = sorted((drafter.run / ROLLOUTS).glob("step-??????.jsonl"))
    if not files:
        raise ValueError(f"{drafter.run} kept no rollouts (run.rollouts=false): there is no text to check on")
    with files[-1].open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = [*tokenizer.encode(row["prompt"]), *row["token_ids"]][:MAX_TOKENS]
            if len(ids) > 1:
                yield torch.tensor(ids)
