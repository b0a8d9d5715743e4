"""The warm start: trains a small model from scratch on a task's worked solutions until RL can take over.

    texts (texts.py) -> Learner.supervised -> every so often: save the folder, evaluate on held-out items

`paceline warmup` and the benches call it. It saves a Hugging Face folder in bfloat16 with the tokenizer and the
`recipe.yaml` that made it. The folder appears complete or not at all, so an interrupted training keeps the last save.
The texts are a pure function of the settings; with `train.exact` the weights are reproducible on the same machine, and
close elsewhere.
"""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import paceline
from paceline.core.config import dump
from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import save_checkpoint
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import LearnerSettings, RlSettings
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.warmup.checks import RECIPE, refuse_foreign_folder
from paceline.warmup.settings import ShapeSettings, TrainSettings, WarmupSettings
from paceline.warmup.texts import BatchStream, TextBatch, common_letters, make_worked_task

VOCABULARY_STEP = 16
"""The vocabulary size is a multiple of this, which suits matrix units; the last ids have no token."""
MOST_CHECKED_AT_ONCE = 256
RECORDED_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")

NamedWeights = Mapping[str, Tensor]


@dataclass(frozen=True)
class WarmupProgress:
    """The state of a training after one step."""

    step: int
    """Completed steps."""
    num_steps: int
    loss: float
    """Mean negative log-likelihood of the batch's response tokens, in nats."""
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    """Of this batch, prompts included; time spent waiting for texts counts, evaluation does not."""
    num_tokens: int
    """Since the start."""
    seconds_left: float
    check: Mapping[str, float] | None
    """The result of the evaluation after this step, if there was one."""


OnStep = Callable[[WarmupProgress], None]


def warm_up(settings: WarmupSettings, out: Path, on_step: OnStep | None = None) -> dict[str, float]:
    """Train a model and save it as the folder `out`; returns the metrics of the last step and its evaluation."""
    refuse_foreign_folder(out)
    train, check = settings.train, settings.check
    tokenizer = common_letters(settings.model.max_context)
    config = model_config(settings.model, tokenizer)
    weights = initial_weights(config, train.seed)
    decoder = Decoder(config, weights, device=train.device, precision=train.precision)
    learner = Learner(decoder, learner_settings(train), weights=weights)
    checks = HeldOut(settings, config, tokenizer)
    pace = _Pace(train.steps)
    with BatchStream(settings.data, config.max_context, train.steps) as batches:
        for step, batch in enumerate(batches, 1):
            metrics = learner.supervised(to_samples(batch))
            pace.count(sum(map(len, batch)))
            found = None
            if step % check.every == 0 or step == train.steps:
                rounded = round_weights(learner.weights)
                found = checks.solve(rounded)
                save(out, config, rounded, tokenizer, settings, {"steps": step, "loss": metrics["loss"], **found})
                pace.rest()
            if on_step is not None:
                on_step(pace.progress(step, metrics, found))
            if found is not None and check.stop_at is not None and found["eval/accuracy"] >= check.stop_at:
                break
    assert found is not None, "the last step is always evaluated"
    return {**metrics, **found, "steps": float(step), "total_tokens": float(pace.num_tokens)}


# --- the model --------------------------------------------------------------------------------------------------------


def model_config(shape: ShapeSettings, tokenizer: Tokenizer) -> ModelConfig:
    """A Qwen3 decoder of this shape with this tokenizer's vocabulary."""
    vocab_size = -(-len(tokenizer.hf.get_vocab()) // VOCABULARY_STEP) * VOCABULARY_STEP
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.hf.pad_token_id}
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        **ids,
    }
    return ModelConfig.from_hf(hf, {key: ids[key] for key in ("eos_token_id", "pad_token_id")})


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random weights that preserve activation scale, with each layer adding little to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in config.weight_shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        scale = 1 / math.sqrt(shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * config.num_layers)
        weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def round_weights(weights: NamedWeights) -> dict[str, Tensor]:
    """The weights as saved."""
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


# --- training ---------------------------------------------------------------------------------------------------------


def learner_settings(train: TrainSettings) -> RlSettings:
    """The learner's settings: one worker, and a whole pack's logits at once because the vocabulary is tiny."""
    shared = {name: getattr(train, name) for name in LearnerSettings.model_fields}
    return RlSettings(**shared, schedule="cosine", logits_chunk_rows=train.pack_tokens, virtual_workers=1)


def to_samples(batch: TextBatch) -> list[Sample]:
    """Texts as learner samples, numbered in order so that packs are filled in that order."""
    longest = max(len(text.response_ids) for text in batch)
    nothing, everything = np.zeros(longest, np.float32), np.ones(longest, np.bool_)
    samples = []
    for index, text in enumerate(batch):
        length = len(text.response_ids)
        none = nothing[:length]
        samples.append(Sample(index, 0, text.prompt_ids, text.response_ids, none, none, everything[:length]))
    return samples


class _Pace:
    """Speed and remaining time of the steps alone: evaluation stops the clock."""

    def __init__(self, num_steps: int) -> None:
        self.num_tokens = 0
        self._num_steps = num_steps
        self._seconds = 0.0
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._last = time.perf_counter()

    def count(self, num_tokens: int) -> None:
        """Record a step of `num_tokens` tokens."""
        now = time.perf_counter()
        self._step_seconds, self._last = now - self._last, now
        self._seconds += self._step_seconds
        self._step_tokens = num_tokens
        self.num_tokens += num_tokens

    def rest(self) -> None:
        """Exclude the time since the last step."""
        self._last = time.perf_counter()

    def progress(self, step: int, metrics: Mapping[str, float], check: Mapping[str, float] | None) -> WarmupProgress:
        return WarmupProgress(
            step=step,
            num_steps=self._num_steps,
            loss=metrics["loss"],
            learning_rate=metrics["learning_rate"],
            grad_norm=metrics["grad_norm"],
            tokens_per_second=self._step_tokens / self._step_seconds,
            num_tokens=self.num_tokens,
            seconds_left=self._seconds / step * (self._num_steps - step),
            check=check,
        )


# --- checks -----------------------------------------------------------------------------------------------------------


class HeldOut:
    """Test items and an engine to solve them, which generates as a user of the saved folder will."""

    def __init__(self, settings: WarmupSettings, config: ModelConfig, tokenizer: Tokenizer) -> None:
        check = settings.check
        if check.max_new_tokens >= config.max_context:
            raise ValueError(
                f"check.max_new_tokens {check.max_new_tokens} leaves no room for a prompt in model.max_context "
                f"{config.max_context}; lower it"
            )
        self._settings = settings
        self._config = config
        self._tokenizer = tokenizer
        self._task = make_worked_task(settings.data, check.level)
        self._items = [self._task.item(settings.data.seed, index, "test") for index in range(check.items)]
        self._engine: Engine | None = None

    def solve(self, weights: NamedWeights) -> dict[str, float]:
        """Metrics of a model with these weights on the items, one sample each at temperature 1."""
        if self._engine is None:
            self._engine = self._open(weights)
        else:
            self._engine.decoder.load_weights(weights)
        sampling = Sampling(max_new_tokens=self._settings.check.max_new_tokens, stream="eval")
        rollouts = self._engine.generate([item.prompt for item in self._items], sampling)
        # Scorers of worked tasks are linear in the text and evaluate nothing, so they may run in this process.
        scores = [self._task.score(item, r.text) for item, r in zip(self._items, rollouts, strict=True)]
        return describe(rollouts, scores)

    def _open(self, weights: NamedWeights) -> Engine:
        train, check = self._settings.train, self._settings.check
        decoder = Decoder(self._config, weights, device=train.device, precision=train.precision)
        num_sequences = min(check.items, MOST_CHECKED_AT_ONCE)
        longest = max(len(self._tokenizer.encode(item.prompt)) for item in self._items) + check.max_new_tokens
        engine = EngineSettings(max_sequences=num_sequences, kv_tokens=num_sequences * _rounded(longest, decoder))
        return Engine(decoder, self._tokenizer, drafter=None, settings=engine)


def _rounded(num_tokens: int, decoder: Decoder) -> int:
    size = decoder.ops.page_size
    return (-(-num_tokens // size) + 1) * size


def describe(rollouts: list[Rollout], scores: list[float]) -> dict[str, float]:
    """Metrics of an evaluation, named as in a run."""
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    return {
        "eval/accuracy": float(np.mean([score >= 1 for score in scores])),
        "eval/mean_length": float(lengths.mean()),
        "eval/p95_length": float(np.quantile(lengths, 0.95)),
        "eval/max_length": float(lengths.max()),
        "eval/clipped_ratio": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }


# --- the folder -------------------------------------------------------------------------------------------------------


def save(
    out: Path,
    config: ModelConfig,
    weights: NamedWeights,
    tokenizer: Tokenizer,
    settings: WarmupSettings,
    result: Mapping[str, float],
) -> None:
    """Put the folder in place, its recipe included."""
    made: dict[str, Any] = {"commit": _commit(), "versions": _versions(settings.train.device), "result": dict(result)}

    def add_files(new: Path) -> None:
        tokenizer.save(new)
        (new / RECIPE).write_text(dump(settings.model_copy(update={"made": made})), encoding="utf-8")

    save_checkpoint(out, config, weights, add_files)


def _versions(device: str) -> dict[str, str]:
    machine = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    found = {"python": platform.python_version(), "paceline": paceline.__version__}
    return {**found, **{name: version(name) for name in RECORDED_PACKAGES}, device: machine}


def _commit() -> str:
    """The commit of the code, with `-dirty` if files differ from it; "unknown" for an installed package."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    is_ours = git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    head = git("rev-parse", "HEAD") if is_ours else None
    if not head:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head
