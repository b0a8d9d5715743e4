"""The types that all folders share: requests, drafts, verdicts and rollouts.

Everything here is plain data without torch, so that `paceline --help` and the drafters can import it for free.
Who fills what: the caller fills `Sampling` and `Request`; drafters fill `Draft`; only `rollout/verify.py` fills
`Verdict` and decides tokens; the engine fills `SequenceView`, `Prefix` and `Rollout`. Nothing here may ever hold a
reference to its owner.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.documents import brief

FinishReason = Literal["stop", "length", "abort"]

MIN_TEMPERATURE = 1e-4
"""Below this, logits divided by the temperature may overflow; use greedy decoding instead."""
MAX_TEMPERATURE = 1000.0
"""Far beyond this, a temperature overflows the float32 that divides the logits."""
MIN_TOP_P = 1e-9
"""Below this, no float32 probability mass is small enough."""
MAX_TOKEN_ID = 2**31 - 1
MAX_NEW_TOKENS, MAX_SAMPLES, MAX_STOPS, MAX_STOP_LENGTH = 2**24, 2**16, 1000, 10_000
"""More would not be a request but a mistake: each sample, token and stop string costs memory."""

IntArray = NDArray[np.integer[Any]]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

ChatMessages = Sequence[Mapping[str, Any]]
"""The turns of a chat, each with a `role` and a `content`."""
Prompt = str | Sequence[int] | IntArray | ChatMessages
"""Text, token ids, or the messages of a chat, to which the model's chat template is applied."""


@dataclass(frozen=True)
class Sampling:
    """How to sample tokens. With weights, prompt and draw it determines every token, whatever the batch or drafter."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    n: int = 1
    seed: int = 0
    stream: str = "serve"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        try:
            self._normalise()
        except (TypeError, OverflowError) as error:
            raise ValueError(f"Sampling: a value has the wrong type ({error}); got {brief(self, 400)}") from None
        checks = (
            (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
                f"temperature must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
            ),
            (0 <= self.top_k <= MAX_TOKEN_ID, f"top_k must be from 0 (off) to {MAX_TOKEN_ID}"),
            (MIN_TOP_P <= self.top_p <= 1, f"top_p must be from {MIN_TOP_P} to 1 (off)"),
            (0 <= self.min_p <= 1, "min_p must be between 0 (off) and 1"),
            (1 <= self.max_new_tokens <= MAX_NEW_TOKENS, f"max_new_tokens must be from 1 to {MAX_NEW_TOKENS}"),
            (1 <= self.n <= MAX_SAMPLES, f"n must be from 1 to {MAX_SAMPLES}"),
            (len(self.stop) <= MAX_STOPS, f"stop may list at most {MAX_STOPS} strings"),
            (
                all(1 <= len(text) <= MAX_STOP_LENGTH for text in self.stop),
                f"stop strings must not be empty or longer than {MAX_STOP_LENGTH} characters",
            ),
            (
                len(self.stop_token_ids) <= MAX_STOPS and all(0 <= i <= MAX_TOKEN_ID for i in self.stop_token_ids),
                f"stop_token_ids must be at most {MAX_STOPS} ids from 0 to {MAX_TOKEN_ID}",
            ),
            (-(2**63) <= self.seed < 2**63, "seed must fit into 64 bits"),
        )
        for is_valid, message in checks:
            if not is_valid:
                raise ValueError(f"Sampling: {message}; got {brief(self, 400)}")

    def _normalise(self) -> None:
        """Convert each field to one type, so that kernels see one type too; anything else is a TypeError."""
        for name in ("top_k", "max_new_tokens", "n", "seed"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is a string")
            object.__setattr__(self, name, float(getattr(self, name)))
        # Python would take a lone string as a sequence of characters, which no caller of `stop=` means.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) for text in (self.stream, *stop)):
            raise TypeError("stream and stop must be strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(operator.index, self.stop_token_ids)))

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens (they do not affect greedy decoding)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True, eq=False)  # not frozen: that would triple the time to make one, and drafters make thousands
class Draft:
    """A guess at what follows one sequence: a chain or a tree of tokens. Never modified once made.

    Node i holds `tokens[i]`; its parent is node `parents[i]`, which comes before it (`parents[i] < i`), or the last
    emitted token for -1. `scores[i]` is the drafter's estimate of the probability that node i is accepted given that
    its parent was; None means the drafter does not know.
    """

    tokens: Sequence[int] | IntArray
    parents: Sequence[int] | IntArray
    scores: Sequence[float] | NDArray[np.floating[Any]] | None = None
    source: str | None = None
    """Which drafter made it; if None, the engine fills in the drafter's name."""

    @classmethod
    def chain(cls, tokens: Sequence[int] | IntArray, scores: Sequence[float] | None = None) -> Draft:
        """A draft without branches."""
        return cls(tokens, range(-1, len(tokens) - 1), scores)

    @property
    def is_chain(self) -> bool:
        """Whether it has no branches."""
        if self.has_plain_parents:
            return True
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @property
    def has_plain_parents(self) -> bool:
        """Whether the type of `parents` alone shows that this is a chain, so that it need not be read."""
        return type(self.parents) is range and self.parents == range(-1, len(self.tokens) - 1)

    def __len__(self) -> int:
        return len(self.tokens)


class _EmptyDraft(Draft):
    """Shared by all who draft nothing, so it refuses what a `Draft` has no time to refuse."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            raise AttributeError("EMPTY_DRAFT cannot be changed; make a Draft of your own")
        super().__setattr__(name, value)


EMPTY_DRAFT: Draft = _EmptyDraft((), ())


class Verdict(NamedTuple):  # a tuple: a step makes hundreds
    """The result of verification for one sequence in one step.

    `path` lists the accepted nodes of the draft from the root down, `token_ids` all emitted tokens: the accepted ones
    and then the bonus token sampled by the policy, unless the sequence ended inside the draft.
    """

    sequence_id: int
    source: str
    num_proposed: int
    path: Sequence[int]
    token_ids: Sequence[int]


@runtime_checkable
class SequenceView(Protocol):
    """What a drafter may read of a live sequence. The object stays the same across steps; its tokens grow.

    It is read-only, and the engine reads nothing back from it.
    """

    @property
    def sequence_id(self) -> int: ...
    @property
    def prompt_id(self) -> int:
        """Hash of the prompt's token ids: the same prompt has the same id in every call and process."""

    @property
    def group_id(self) -> int:
        """Id of this draw of the prompt: shared by the samples of one group, different in the next call."""

    @property
    def draw(self) -> int: ...
    @property
    def sample_index(self) -> int: ...
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far, read-only; valid until the next step."""

    @property
    def prompt_length(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def is_run_ahead(self) -> bool:
        """Whether it is run-ahead: started early, for a later call."""


class Drafter(Protocol):
    """Guesses from text. A wrong drafter costs time and can never change a token.

    These three methods are enough. Optionally, a drafter also implements `NamedDrafter` or `DrafterMemory`. A network
    on the device is a `ModelDrafter` instead (`rollout/drafters/model_drafter.py`).
    """

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Return one draft per view, of at most `budgets[i]` nodes each; drafts may be empty.

        It may be called again before `observe` reports on the last drafts, and only a later part of a draft may get
        verified; the path of a verdict refers to the verified part.
        """

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Receive what each sequence emitted; called after every step, whether it was drafted or not."""

    def finish(self, sequence_id: int) -> None:
        """Forget a sequence that finished or was aborted; its id is never used again."""


@runtime_checkable
class NamedDrafter(Protocol):
    """A drafter with a name for reports; without one, its class name is used."""

    name: str


@runtime_checkable
class DrafterMemory(Protocol):
    """A drafter with learned state that checkpoints keep."""

    def state(self) -> dict[str, Any]:
        """The state, as numbers, strings and arrays."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; raises if it is not one."""

    def release(self) -> None:
        """Free what can be rebuilt, because nothing is drafted for a while."""


@dataclass
class Rollout:
    """One finished response. `token_ids` and `logprobs` include the end token; `text` does not."""

    prompt_index: int
    sample_index: int
    draw: int
    token_ids: list[int]
    logprobs: list[float]
    """NaN for the tokens of an unverified prefix that the response continues."""
    text: str
    finish_reason: FinishReason
    truncated_logprobs: list[float] | None = field(default=None, repr=False)
    """Log-probabilities after top-k/top-p/min-p if the sampling settings truncate; otherwise None."""
    spans: list[tuple[int, int, str]] = field(default_factory=list, repr=False, compare=False)
    """Accepted draft tokens: first, one past the last, and the drafter's name. They say nothing about the text."""
    versions: list[tuple[int, int, int]] = field(default_factory=list, repr=False, compare=False)
    """Which weights sampled which tokens: version, first token, one past the last. One entry unless the weights changed
    while the response was generated (`Serving.change_weights`)."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a response, sampled elsewhere with the same key.

    A verified prefix has log-probabilities and was sampled with the same weights, or with those that `versions` names.
    One without log-probabilities is run-ahead text: it is continued without being verified, so its continuation is
    run-ahead text as well.
    """

    sampling: Sampling
    """How the tokens were sampled."""
    token_ids: Sequence[int] | IntArray
    logprobs: Sequence[float] | None = None
    truncated_logprobs: Sequence[float] | None = None
    """For a verified prefix, if the sampling settings truncate."""
    spans: Sequence[tuple[int, int, str]] = field(default=(), repr=False, compare=False)
    """As in `Rollout`."""
    versions: Sequence[tuple[int, int, int]] = field(default=(), repr=False, compare=False)
    """As in `Rollout`, for a verified prefix; empty: the weights that continue it sampled all of it."""

    @property
    def is_verified(self) -> bool:
        """Whether the policy sampled these tokens, and nobody guessed them."""
        return self.logprobs is not None


@dataclass(frozen=True)
class Request:
    """One requested response, from its start or from a prefix generated elsewhere."""

    prompt: Prompt
    draw: int
    """The number of this use of the prompt."""
    sample_index: int = 0
    prefix: Prefix | None = None
    prompt_index: int | None = None
    """The rollout's `prompt_index`; None: the draw."""
    sampling: Sampling | None = None
    """Its own settings (`n` is not used); None: those of the call."""
    request_id: str | None = None
    """Names the request while it is open; None: draw and sample do. Named requests may repeat draw and sample, but have
    no run-ahead text."""
    salt: str = ""
    """Cached prompts are shared between requests with the same salt only; it changes no token."""


RequestKey = tuple[int, int] | str
"""Names an open request: draw and sample, or its `request_id`."""
