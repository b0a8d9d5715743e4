"""Paceline itself as a peer process, measured through the same pipe as all others."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Generated, Request, serve

import paceline


class PacelineContender:
    def __init__(self, options: dict[str, Any]) -> None:
        self.settings: dict[str, Any] = {
            "dtype": "float32",
            "exact": bool(options.get("exact", True)),
            "drafter": options.get("drafter"),
        }
        self._engine = paceline.Engine.from_pretrained(options["model"], device="cpu", **self.settings)
        self.versions = {"paceline": paceline.__version__, "torch": torch.__version__}

    def generate(self, request: Request) -> Generated:
        sampling = paceline.Sampling(
            temperature=request.temperature, max_new_tokens=request.num_tokens, ignore_eos=True, seed=request.seed
        )
        rollouts = self._engine.generate(request.prompts, sampling)
        accept_length = self._engine.stats.accept_length if self.settings["drafter"] else None
        return Generated([rollout.token_ids for rollout in rollouts], accept_length)


if __name__ == "__main__":
    serve(PacelineContender)
