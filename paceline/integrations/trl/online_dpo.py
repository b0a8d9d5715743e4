"""`PacelineOnlineDPOTrainer`: TRL's experimental `OnlineDPOTrainer`, with completions from the engine.

TRL's trainer has no hook between tokens and tokens, so `_generate` is replaced as a whole: chat template, tokens,
two completions per prompt, padding. TRL may move what is experimental; nothing else imports this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.data_utils import maybe_apply_chat_template
from trl.experimental.online_dpo import OnlineDPOTrainer

from paceline.integrations.trl.refusals import refuse_images
from paceline.integrations.trl.trainers import EngineTrainer

PAIR = 2
"""Completions per prompt: the better and the worse one."""


class PacelineOnlineDPOTrainer(EngineTrainer, OnlineDPOTrainer):
    """Takes the arguments of TRL's `OnlineDPOTrainer`, and `engine`, `budget` and `log_engine`."""

    def _generate(
        self, model: Any, prompts: Sequence[Any], images: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        """TRL's hook: prompts, padded on the left, and completions, padded on the right, each with its mask. The second
        half of the rows are the second completions."""
        refuse_images(images, {})
        texts = [maybe_apply_chat_template({"prompt": prompt}, self.processing_class)["prompt"] for prompt in prompts]
        prompt_ids = self.processing_class(text=texts, add_special_tokens=False)["input_ids"]
        found = self._complete([ids for ids in prompt_ids for _ in range(PAIR)], PAIR)
        rows = self._padded(prompt_ids * PAIR, "left"), self._padded([*found[::PAIR], *found[1::PAIR]], "right")
        return *rows[0], *rows[1], None

    def _padded(self, texts: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
        """The ids and the mask of texts of different lengths."""
        ids = [torch.tensor(text) for text in texts]
        masks = [torch.ones_like(text) for text in ids]
        padded = (
            pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side).to(self.accelerator.device)
            for rows, value in ((ids, self._tokenizer.pad_token_id), (masks, 0))
        )
        return next(padded), next(padded)

    @property
    def _reads_images(self) -> bool:
        return bool(self.is_vision_model)

    @property
    def _most_completions(self) -> int:
        return int(PAIR * max(self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size))

    def _log_generation(self, mode: str, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self.stats.setdefault(name, []).append(value)
