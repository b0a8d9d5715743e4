"""The learner: samples in, one update of the policy's weights out. The only writer of policy weights.

    samples -> packs -> virtual workers (forward, loss, backward) -> tree of sums -> clip -> optimizer -> decoder

It is blind to the algorithm: `loss.py` reads the table's row. The forward is the engine's own, so in the first epoch
log-probabilities equal those of the rollouts bit for bit, every ratio is exactly 1, and no second pass over the old
policy is needed. The run loop calls `step`, `warmup` calls `supervised`. Workers that share a batch call `plan`,
`worker_sum` and `train` instead, which is all that `step` does: which worker computes a virtual worker's sum changes no
number. A step with a non-finite gradient leaves weights and optimizer as they were, is counted, and raises a warning.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Float64Array, Sampling
from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions, master_weights
from paceline.model.backward.states import States
from paceline.model.decoder import Decoder
from paceline.model.lora.adapter import Adapter
from paceline.rl.algorithms import Algorithm
from paceline.rl.loss import LossTokens, PackLoss, Totals, estimate_kl, metric_means, policy_loss
from paceline.rl.optimizer_state import require_fitting
from paceline.rl.optimizers import build_optimizer, learning_rate, set_learning_rate, take_step
from paceline.rl.packing import LEAST_ROWS, Pack, Sample, deal, even_bound, pack_samples
from paceline.rl.reduction import Tensors, TreeSum, add_into
from paceline.rl.settings import RlSettings

MASTER_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
CHUNK_ROWS = {"cpu": 256, "cuda": 1024}
BACKWARD_DTYPES = {"auto": None, **MASTER_DTYPES}

PackObjective = Callable[[Pack, Tensor], PackLoss]
"""From a pack and the log-probabilities of its response tokens to its share of the loss."""

PackObserver = Callable[[Pack, States], None]
"""Receives a pack's hidden states under the weights before the step; it may keep copies and must not write to them."""


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The input of one `step`, laid out; every worker that plans the same samples gets the same one."""

    workers: list[list[Pack]]
    """Packs of each virtual worker."""
    temperature: float
    objective: PackObjective
    num_epochs: int


@dataclass(frozen=True, eq=False)
class WorkerSum:
    """One virtual worker's sums over its packs, in their order; None if it had none."""

    gradients: Tensors | None
    sums: Tensors | None
    """Sums for the metrics."""


@dataclass(frozen=True, eq=False)
class _PolicyObjective:
    """The policy loss of `loss.py` for one batch; caches per pack what epochs need not compute again."""

    algorithm: Algorithm
    totals: Totals
    is_exact: bool
    """Whether log-probabilities have the engine's bits before the first optimizer step."""
    look_up_reference: Callable[[Pack], Tensor] | None
    _old: dict[int, Tensor] = field(default_factory=dict)
    _reference: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, pack: Pack, logprobs: Tensor) -> PackLoss:
        index, reported = pack.index, torch.from_numpy(pack.logprobs).to(logprobs.device)
        if index not in self._old:
            # Without the engine's bits, ratios start at exactly 1 only against this forward's own result.
            self._old[index] = reported if self.is_exact else logprobs.detach()
            if self.look_up_reference is not None:
                self._reference[index] = self.look_up_reference(pack)
        tokens = LossTokens.of(
            pack,
            self.algorithm,
            self.totals,
            old_logprobs=self._old[index],
            reference_logprobs=self._reference.get(index),
            device=logprobs.device,
        )
        found = policy_loss(logprobs, tokens, self.algorithm, entropy=-logprobs)
        difference = (logprobs.detach() - reported).abs()
        found.sums["logp_abs_diff"] = torch.where(tokens.mask, difference, 0.0).double().sum()
        return found


class Learner:
    """Master weights, their optimizer, and the decoder that receives them after every step."""

    adapter: Adapter | None = None
    """What is trained in place of the weights: see `lora.py`."""

    def __init__(
        self,
        decoder: Decoder,
        settings: RlSettings,
        sampling: Sampling | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`sampling` is that of the rollouts: its temperature and length limit are part of the loss.

        `weights` initialise the master weights if the decoder's own are rounded; the decoder gets them too. If the
        algorithm has a KL term, the policy at this moment stays in memory as the reference, so load a checkpoint
        afterwards.
        """
        self.decoder = decoder
        self.settings = settings
        if decoder.ops.device == "cpu":
            # With more threads torch sums gradients in whatever order threads arrive. Ours (`task_threads.py`) do not.
            torch.set_num_threads(1)
        self.sampling = sampling or Sampling()
        self.algorithm = settings.build()
        self.num_steps = 0
        self.num_skipped = 0
        self.observer: PackObserver | None = None
        """Receives the hidden states of every trained text, once per step."""
        options = TrainingOptions(
            settings.exact,
            settings.checkpoint_activations,
            settings.logits_chunk_rows or CHUNK_ROWS["cpu" if decoder.ops.device == "cpu" else "cuda"],
            BACKWARD_DTYPES[settings.backward_precision],
        )
        self._policy = self._make_policy(weights, options)
        self._parameters = self._policy.parameters
        self._optimizer = build_optimizer(
            settings.optimizer,
            self._parameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            options=settings.optimizer_options,
        )
        self._publish()
        self.reference: TrainablePolicy | None = None
        if self.algorithm.kl_coef:
            self.reference = self._make_reference(options)

    def _make_policy(self, weights: Mapping[str, Tensor] | None, options: TrainingOptions) -> TrainablePolicy:
        if self.settings.lora.is_on:
            raise ValueError(f"rl.lora: {type(self).__name__} trains the weights themselves; use LoraLearner")
        master = master_weights(self.decoder, weights, MASTER_DTYPES[self.settings.master_precision])
        return TrainablePolicy(self.decoder, master, options)

    def _make_reference(self, options: TrainingOptions) -> TrainablePolicy:
        frozen = self.decoder.copy()
        return TrainablePolicy(frozen, frozen.weights(), options)

    @property
    def is_exact(self) -> bool:
        """Whether the forward has the engine's bits."""
        return self._policy.is_exact

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is trained, the master weights under their Hugging Face names: live, so copy those to be kept."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @property
    def policy_weights(self) -> Mapping[str, Tensor]:
        """All weights of the policy, for a drafter to learn from."""
        return self.weights

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch of rollouts for `settings.epochs` optimizer steps; the policy is updated after each.

        Metrics are those of the last epoch, except `rollout/logp_abs_diff`, which compares the first with the engine.
        """
        return self._train(self.plan(samples))

    def supervised(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood of response tokens, for a warm start.

        Only the texts and masks of the samples count. Temperature is 1, because the model itself should find the texts
        likely.
        """
        return self._train(self.plan_supervised(samples))

    def _train(self, batch: TrainBatch) -> dict[str, float]:
        def find_sums(epoch: int) -> Iterable[WorkerSum]:
            observer = self.observer if epoch == 0 else None
            return (self.worker_sum(batch, worker, observer) for worker in range(len(batch.workers)))

        return self.train(batch, find_sums)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Continue from another learner's master weights, also in the decoder. The optimizer keeps its state."""
        self._set_weights(weights)
        self._publish()

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])

    # --- the pieces of a step, for workers that share one -------------------------------------------------------------

    def plan(self, samples: Sequence[Sample]) -> TrainBatch:
        """Lay out a batch of rollouts. Samples without a gradient are counted but cost nothing more."""
        totals = Totals.count(samples, self.sampling.max_new_tokens)
        needed = [sample for sample in samples if self._has_gradient(sample)]
        look_up = None if self.reference is None else functools.partial(self._log_probs, self.reference)
        objective = _PolicyObjective(self.algorithm, totals, self._policy.is_exact, look_up)
        return self._lay_out(needed, self.sampling.temperature, objective, self.settings.epochs)

    def plan_supervised(self, samples: Sequence[Sample]) -> TrainBatch:
        """Lay out a batch of texts for supervised training."""
        totals = Totals.count(samples, self.sampling.max_new_tokens)
        objective = functools.partial(likelihood_loss, num_tokens=totals.num_tokens)
        return self._lay_out([sample for sample in samples if sample.num_trained], 1.0, objective, 1)

    def _has_gradient(self, sample: Sample) -> bool:
        """Whether any trained token has an advantage, or a KL term affects all of them."""
        if self.algorithm.kl_coef and self.algorithm.kl_in == "loss":
            return sample.num_trained > 0
        return bool(np.any(sample.advantages[sample.mask] != 0))

    def _lay_out(
        self, samples: Sequence[Sample], temperature: float, objective: PackObjective, num_epochs: int
    ) -> TrainBatch:
        context = self.decoder.config.max_context
        for sample in samples:
            if sample.num_rows > context:
                raise ValueError(
                    f"sample {sample.sample} of draw {sample.draw} has {sample.num_rows} tokens, more than the model's "
                    f"context of {context}; drop or truncate it"
                )
        least_rows = LEAST_ROWS["cpu" if self.decoder.ops.device == "cpu" else "cuda"]
        bound = even_bound(samples, self.settings.pack_tokens, self._num_hands, least_rows)
        workers = self._deal(pack_samples(samples, bound))
        return TrainBatch(workers, temperature, objective, num_epochs)

    @property
    def _num_hands(self) -> int:
        """Number of workers to deal packs to."""
        return self.settings.virtual_workers

    def _deal(self, packs: list[Pack]) -> list[list[Pack]]:
        return deal(packs, self._num_hands)

    def worker_sum(self, batch: TrainBatch, worker: int, observer: PackObserver | None = None) -> WorkerSum:
        """Forward and backward over the packs of one virtual worker, with the current weights."""
        sums: Tensors | None = None
        self._optimizer.zero_grad(set_to_none=True)  # an interrupted worker may have left some
        for pack in batch.workers[worker]:
            observe = None if observer is None else functools.partial(observer, pack)
            logprobs = self._policy.log_probs(_texts(pack), batch.temperature, observe)
            found = batch.objective(pack, logprobs)
            found.loss.backward()
            sums = add_into(sums, found.sums)
        return WorkerSum(self._take_gradients(), sums)

    def train(self, batch: TrainBatch, find_sums: Callable[[int], Iterable[WorkerSum]]) -> dict[str, float]:
        """Run all epochs of a batch; `find_sums` returns one epoch's sums of all virtual workers in order."""
        metrics: dict[str, float] = {}
        for epoch in range(batch.num_epochs):
            found = self.apply(find_sums(epoch), is_last=epoch + 1 == batch.num_epochs)
            kept = ("rollout/logp_abs_diff",) if epoch else ()
            metrics |= {name: value for name, value in found.items() if name not in kept}
        return metrics

    def apply(self, sums: Iterable[WorkerSum], is_last: bool = True) -> dict[str, float]:
        """Take one optimizer step on the sums of all virtual workers, in order, and load the weights into the decoder.

        `is_last`: whether this is the batch's last epoch, after which the schedule advances.
        """
        gradient_tree, metric_tree = TreeSum(), TreeSum()
        for found in sums:
            gradient_tree.push(found.gradients)
            metric_tree.push(found.sums)
        gradients, totals = gradient_tree.finish(), metric_tree.finish()
        lr = learning_rate(
            self.num_steps,
            peak=self.settings.lr,
            schedule=self.settings.schedule,
            warmup_steps=self.settings.warmup_steps,
            num_steps=self.settings.steps,
            floor=self.settings.lr_floor,
        )
        norm = 0.0 if gradients is None else self._norm(gradients)
        metrics = _metrics(totals) | {"grad_norm": norm, "learning_rate": lr}
        if gradients is not None and math.isfinite(norm) and math.isfinite(metrics["loss"]):
            self._update(gradients, norm, lr, metrics["loss"])
        elif gradients is not None:
            self._skip(norm, metrics["loss"])
        self.num_steps += is_last
        return metrics | {"num_skipped_steps": float(self.num_skipped)}

    # --- the update, and the rest -------------------------------------------------------------------------------------

    def _norm(self, gradients: Tensors) -> float:
        return global_norm(gradients)

    def _update(self, gradients: Tensors, norm: float, lr: float, loss: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in gradients.values():
                gradient.mul_(limit / norm)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        set_learning_rate(self._optimizer, lr)
        take_step(self._optimizer, loss)
        self._optimizer.zero_grad(set_to_none=True)
        self._publish()

    def _skip(self, norm: float, loss: float) -> None:
        self.num_skipped += 1
        warnings.warn(
            f"step {self.num_steps}: gradient norm {norm}, loss {loss}: not finite, so the step is not taken "
            f"({self.num_skipped} so far); if this persists, lower rl.lr",
            RuntimeWarning,
            stacklevel=2,
        )

    def _take_gradients(self) -> Tensors | None:
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        return found or None

    def _publish(self) -> None:
        """Load the master weights into the decoder, which rounds them to its precision."""
        self.decoder.load_weights(self.weights)

    @torch.no_grad()
    def _log_probs(self, policy: TrainablePolicy, pack: Pack) -> Tensor:
        """Log-probabilities of a pack's response tokens under a policy, without a graph."""
        return policy.log_probs(_texts(pack), self.sampling.temperature)

    def reference_kl(self, samples: Sequence[Sample]) -> list[Float64Array]:
        """Per sample, estimates of the KL to the reference at every token, under the policy that sampled it.

        For `assign_advantages` if KL is a cost inside the reward; in the given order.
        """
        assert self.reference is not None, "only algorithms with a KL term keep a reference"
        found: dict[tuple[int, int], Float64Array] = {}
        for pack in pack_samples(samples, self.settings.pack_tokens):
            reference = self._log_probs(self.reference, pack).cpu()
            kl = estimate_kl(torch.from_numpy(pack.logprobs), reference, self.algorithm.kl_estimator)
            parts = pack.split(kl.double().numpy())
            found |= {(s.draw, s.sample): part for s, part in zip(pack.samples, parts, strict=True)}
        return [found[sample.draw, sample.sample] for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on; tensors are live, so copy them before the next step."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "weights": self.weights,
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, bit for bit, also in the decoder."""
        weights: Mapping[str, Tensor] = state["weights"]
        for name, parameter in self._parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise ValueError(
                    f"the checkpoint does not fit the model: {name} is missing or has another shape; "
                    "resume with the model that the run started with"
                )
        require_fitting(self._optimizer, state["optimizer"], "rl.optimizer")
        self._set_weights(weights)
        self._load_optimizer(state["optimizer"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self._publish()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def likelihood_loss(pack: Pack, logprobs: Tensor, num_tokens: int) -> PackLoss:
    """A pack's share of the mean negative log-likelihood over the `num_tokens` trained tokens of the batch."""
    mask = torch.from_numpy(pack.mask).to(logprobs.device)
    total = torch.where(mask, logprobs, 0.0).double().sum()
    loss = -total / num_tokens
    return PackLoss(loss, {"num_tokens": mask.sum().double(), "loss": loss.detach()})


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Norm of all gradients as one vector, summed name by name in order, in double precision."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _metrics(sums: Tensors | None) -> dict[str, float]:
    """A step's metrics under their names in the run's metrics file."""
    if sums is None:
        return {"loss": 0.0, "num_tokens": 0.0}
    means = metric_means(sums)
    if "clip_low" in means:
        means["clip_fraction"] = means["clip_low"] + means["clip_high"] + means["clip_dual"]
        means["rollout/logp_abs_diff"] = means.pop("logp_abs_diff")
    return means


def _texts(pack: Pack) -> list[Text]:
    return [Text(np.concatenate((s.prompt_ids, s.response_ids)), len(s.prompt_ids)) for s in pack.samples]
