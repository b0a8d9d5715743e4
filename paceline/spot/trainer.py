"""The drafter's trainer: weights, their optimizer and their average. Nothing else writes a drafter's weights.

    train(micro_step)     a forward, a backward and one optimizer step: short, so that the caller is soon free again
    publish()             the average of the weights as a new version, an immutable copy
    roll_back()           the last version known to be good, as a new version

Every call adds an entry to the log; the same calls from the same start give the same bits (`log.replay`). Its training
data is passed in: it knows no ring, no clock and no engine. `worker.py` owns one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.documents import plain
from paceline.model.eagle.network import HEAD, NORM, Eagle, EagleConfig, fast_rms_norm
from paceline.model.eagle.unroll import Unroll
from paceline.model.rope import rope_table
from paceline.model.task_threads import each_in_order
from paceline.rl.optimizer_state import require_fitting
from paceline.rl.optimizers import build_optimizer, set_learning_rate
from paceline.spot.batch import MicroBatch, Piece, build_batch
from paceline.spot.loss import SoftCrossEntropy, Teacher
from paceline.spot.plan import MicroStep
from paceline.spot.ring import StoredText
from paceline.spot.settings import SpotSettings

BETAS = (0.9, 0.95)
MUON = {"momentum": 0.9, "ns_steps": 3}
"""Momentum below the usual 0.95 learns faster here. Three rounds of orthogonalisation are nearly as good as the usual
five, which would take half of a small micro-step."""

SHARE_BASES = 256
"""Chains of guesses that one thread computes on a CPU, in whole pieces."""

LEAST_LR = 0.25
"""As a share of the peak: the policy moves on, and the drafter has to follow."""

LogEntry = dict[str, Any]
"""A line of the log."""


@dataclass(frozen=True, eq=False)
class TrainerState:
    """State of a drafter's training: all that another trainer needs to continue it, bit for bit."""

    eagle: Eagle
    """The published version; before the first, the initial one."""
    tensors: Mapping[str, Tensor]
    """From `Trainer.tensors`; empty for a drafter that was not in training."""
    counts: Mapping[str, int]


@dataclass(frozen=True)
class MicroStepReport:
    """Results of a micro-step."""

    loss: float
    """Divergence of the guesses from the policy, in nats per guess."""
    shared: tuple[float, ...]
    """Probability mass shared by guess and policy, by position in the chain."""
    grad_norm: float
    is_skipped: bool = False
    """Whether the gradient was not finite."""


class _ShareLoss(NamedTuple):
    """What one share of a micro-step adds."""

    loss: float
    shared: Tensor
    gradients: tuple[Tensor, ...]


class Trainer:
    """One drafter in training."""

    def __init__(
        self, eagle: Eagle, settings: SpotSettings, device: str = "cpu", log: Callable[[LogEntry], None] | None = None
    ) -> None:
        self._eagle, self._settings, self.device = eagle, settings, torch.device(device)
        self._log = log or (lambda entry: None)
        # In one order, whatever file the weights came from: the optimizer numbers them.
        self._weights = {
            name: nn.Parameter(eagle.weights[name].detach().to(self.device, torch.float32, copy=True))
            for name in eagle.config.weight_shapes()
        }
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._optimizer = self._make_optimizer()
        config = eagle.config
        cos, sin = rope_table(config.rope, config.head_dim, config.max_context + settings.unroll)
        self._turns = cos.to(self.device), sin.to(self.device)
        self.num_micro_steps = 0
        self.num_skipped = 0
        self.version = eagle.version
        self._in_use: Eagle | None = None
        """The last published version."""
        self._good: Eagle | None = None
        """The version to roll back to."""

    def _make_optimizer(self) -> Any:
        given = self._settings
        options = (MUON if given.optimizer == "muon" else {}) | given.optimizer_options
        return build_optimizer(
            given.optimizer, self._weights, lr=given.lr, betas=BETAS, options=options, setting="spot.optimizer"
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next micro-step: rising, then level, then falling with the square root of the count."""
        given, count = self._settings, self.num_micro_steps + 1
        rising = min(count / max(given.warmup_steps, 1), 1.0)
        return given.lr * min(rising, max(math.sqrt(given.settle_steps / count), LEAST_LR))

    def skip_warmup(self) -> None:
        """Start from a trained drafter: skip the high learning rates, which would undo its training."""
        self.num_micro_steps = math.ceil(self._settings.settle_steps / LEAST_LR**2)

    @property
    def draft_ids(self) -> Tensor:
        return self._eagle.draft_ids

    def stage(self) -> TrainerState:
        """A copy of everything the next micro-step depends on."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return TrainerState(self._in_use or self._eagle, tensors, self.counts())

    def train(self, step: MicroStep, texts: Mapping[int, StoredText], teacher: Teacher) -> MicroStepReport:
        """Run one micro-step. A non-finite gradient changes nothing but the count."""
        assert step.teacher == teacher.version, "a micro-step names the policy it learns from"
        self._log(step.to_json())
        given = self._settings
        shares = [
            build_batch(texts, pieces, given.unroll, given.decay, given.logits_chunk_rows, self.device)
            for pieces in _divide(step.pieces, self.device.type)
        ]
        total = sum(share.guesses.total for share in shares) or 1.0
        found: list[_ShareLoss] = []

        def compute(share: MicroBatch) -> _ShareLoss:
            part = share.guesses.total / total if len(shares) > 1 else 1.0
            loss, entropy, shared = unrolled_loss(self._eagle.config, self._weights, share, teacher, self._turns)
            gradients = torch.autograd.grad(loss * part, list(self._weights.values()))
            return _ShareLoss(float((loss.detach() - entropy) * part), shared, gradients)

        def take(result: _ShareLoss) -> None:
            found.append(result._replace(gradients=()))
            for weight, gradient in zip(self._weights.values(), result.gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

        self._optimizer.zero_grad(set_to_none=True)  # an interrupted micro-step may have left some
        with _fast_products():
            each_in_order(compute, shares, take)
        norm = float(nn.utils.clip_grad_norm_(list(self._weights.values()), given.max_grad_norm))
        is_sound = math.isfinite(norm)
        if is_sound:
            set_learning_rate(self._optimizer, step.lr)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_micro_steps += 1
        self.num_skipped += not is_sound
        self._average()
        shared = torch.cat([own.shared for own in found])
        numbers = torch.cat([share.guesses.numbers for share in shares])
        means = _means(shared, numbers, given.unroll)
        return MicroStepReport(sum(own.loss for own in found), means, norm, not is_sound)

    @torch.no_grad()
    def _average(self) -> None:
        """Update the averages; early on they weigh all weights so far equally, so that the start is soon forgotten."""
        count = self.num_micro_steps
        keep = min(self._settings.average, count / (count + 10))
        torch._foreach_lerp_(list(self._averages.values()), list(self._weights.values()), 1 - keep)

    # --- versions -----------------------------------------------------------------------------------------------------

    def publish(self, was_good: bool = True) -> Eagle:
        """Publish a copy of the averages as the next version. `was_good`: the current one is known to be good."""
        self.version += 1
        self._log({"do": "publish", "version": self.version, "was_good": was_good})
        if was_good:
            self._good = self._in_use
        weights = {name: average.clone() for name, average in self._averages.items()}
        self._in_use = replace(self._eagle, weights=weights, version=self.version)
        return self._in_use

    @property
    def can_roll_back(self) -> bool:
        return self._good is not None

    @torch.no_grad()
    def roll_back(self) -> Eagle:
        """Publish the good version as a new one.

        Training continues from there with a fresh optimizer, which remembers nothing of what went wrong.
        """
        good = self._good
        assert good is not None, "needs a version known to be good"
        self.version += 1
        self._log({"do": "roll_back", "version": self.version, "to": good.version})
        for name, weight in good.weights.items():
            self._weights[name].copy_(weight)
            self._averages[name].copy_(weight)
        self._optimizer = self._make_optimizer()
        self._in_use, self._good = replace(good, version=self.version), None
        return self._in_use

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Weights, averages and optimizer state: all tensors the next micro-step depends on. Live, so copy them."""
        found = {f"weights/{name}": weight.detach() for name, weight in self._weights.items()}
        found |= {f"averages/{name}": average for name, average in self._averages.items()}
        return found | {f"optimizer/{path}": value for path, value in _walk(self._optimizer.state_dict())}

    def counts(self) -> dict[str, int]:
        """The rest of the state."""
        return {"num_micro_steps": self.num_micro_steps, "num_skipped": self.num_skipped, "version": self.version}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Continue from `tensors` and `counts`, bit for bit. What does not fit changes nothing."""
        owned: dict[str, Tensor] = {f"weights/{name}": own for name, own in self._weights.items()}
        owned |= {f"averages/{name}": own for name, own in self._averages.items()}
        for name, tensor in owned.items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                raise ValueError(f"the drafter's checkpoint does not fit: {name} is missing or has another shape")
        try:
            state = self._optimizer_state(tensors)
            found = counts["num_micro_steps"], counts["num_skipped"], counts["version"]
            require_fitting(self._optimizer, state, "spot.optimizer")
            self._optimizer.load_state_dict(state)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the drafter's checkpoint does not fit: {plain(str(error), 300)}") from error
        for name, tensor in owned.items():
            tensor.copy_(tensors[name])
        self.num_micro_steps, self.num_skipped, self.version = found
        self._in_use = self._good = None

    def _optimizer_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What a checkpoint holds, in the form of this optimizer's own state."""
        state: dict[str, Any] = _emptied(self._optimizer.state_dict())
        prefix = "optimizer/"
        for path, value in tensors.items():
            if path.startswith(prefix):
                _insert(state, path.removeprefix(prefix).split("/"), value)
        return state


def _divide(pieces: Sequence[Piece], device: str) -> list[Sequence[Piece]]:
    """Pieces in turn, as many as keep a thread busy for a while; on a GPU all of them together."""
    shares: list[Sequence[Piece]] = []
    waiting: list[Piece] = []
    for piece in pieces:
        waiting.append(piece)
        if device == "cpu" and sum(own.stop - own.start for own in waiting) >= SHARE_BASES:
            shares.append(waiting)
            waiting = []
    return [*shares, waiting] if waiting else shares


def unrolled_loss(
    config: EagleConfig,
    weights: Mapping[str, Tensor],
    batch: MicroBatch,
    teacher: Teacher,
    turns: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, the policy's entropy, and for every guess the probability mass it shares with the policy."""
    unroll = Unroll(config, weights, batch.layout, turns)
    states = [unroll.begin(batch.taps, teacher.embed(batch.next_ids))]
    for read in batch.chain_ids:
        states.append(unroll.advance(states[-1], teacher.embed(read)))
    normed = fast_rms_norm(torch.cat(states), weights[NORM], config.rms_norm_eps)
    found: tuple[Tensor, Tensor, Tensor] = SoftCrossEntropy.apply(
        normed, weights[HEAD], batch.final, teacher, batch.guesses
    )
    return found


def _walk(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state by their path in it."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if key != "param_groups":
            yield from _walk(value, f"{path}/{key}" if path else str(key))


def _emptied(tree: Any) -> Any:
    """A copy of an optimizer's state in which no parameter has any."""
    if isinstance(tree, dict):
        return {key: {} if key == "state" else _emptied(value) for key, value in tree.items()}
    return [_emptied(value) for value in tree] if isinstance(tree, list) else tree


def _insert(tree: Any, path: list[str], value: Tensor) -> None:
    """Inverse of `_walk`: below `state`, keys are parameter numbers."""
    key: Any = int(path[0]) if path[0].isdecimal() else path[0]
    if len(path) == 1:
        tree[key] = value.clone()
        return
    if isinstance(tree, dict):
        tree.setdefault(key, {})
    _insert(tree[key], path[1:], value)


def _means(values: Tensor, numbers: Tensor, count: int) -> tuple[float, ...]:
    """Mean value per number; a separate sum for each, since adding by index has no fixed order on a GPU."""
    members = [numbers == number for number in range(count)]
    sums = torch.stack([torch.where(own, values, 0).sum() for own in members]).tolist()
    sizes = torch.stack([own.sum() for own in members]).tolist()
    return tuple(total / max(size, 1) for total, size in zip(sums, sizes, strict=True))


@contextmanager
def _fast_products() -> Iterator[None]:
    """Allow TF32 for float32 products on a GPU: enough for a drafter, and must not leak into the policy's."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
