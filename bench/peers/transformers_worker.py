"""`transformers.generate` as a peer process: float32, eager, its default dynamic cache, left padding."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from protocol import Generated, Request, serve
from transformers import AutoModelForCausalLM, GenerationConfig

PAD = 0


class TransformersContender:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
        # The folder's own generation settings (end token, top-k) would fill in whatever a request leaves out.
        self._model.generation_config = GenerationConfig(pad_token_id=PAD)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.settings = {"dtype": "float32", "attention": self._model.config._attn_implementation}

    def generate(self, request: Request) -> Generated:
        width = max(map(len, request.prompts))
        rows = [[PAD] * (width - len(prompt)) + prompt for prompt in request.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in request.prompts]
        torch.manual_seed(request.seed)
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows), attention_mask=torch.tensor(mask), generation_config=_settings(request)
            )
        return Generated(output[:, width:].tolist())


def _settings(request: Request) -> GenerationConfig:
    """No end token at all: `min_new_tokens` would forbid it instead, and so choose other tokens than ignoring it."""
    sampled = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False}
    return GenerationConfig(
        max_new_tokens=request.num_tokens,
        eos_token_id=None,
        pad_token_id=PAD,
        **(sampled if request.temperature > 0 else greedy),
    )


if __name__ == "__main__":
    serve(TransformersContender)
