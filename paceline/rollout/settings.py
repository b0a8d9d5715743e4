"""The `engine` and `sampling` sections of the settings: how the engine makes rollouts, and how it samples tokens.

`EngineSettings` may change what a rollout costs, never its tokens (`precision` and `exact` choose the arithmetic they
are exact for). `SamplingSettings` mirrors `paceline.core.types.Sampling` for files and the command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.core.config import Settings
from paceline.core.cores import MAX_THREADS
from paceline.core.types import (
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MIN_TEMPERATURE,
    MIN_TOP_P,
    Sampling,
)

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class EngineSettings(Settings):
    drafter: str = Field(
        "auto",
        description="Source of drafts: none, ngram, suffix, eagle (the drafter that spot trains), eagle:FOLDER, your "
        "own as file.py:Class, or a comma-separated list; auto: suffix, plus eagle if spot trains it.",
    )
    drafter_timeout_s: float = Field(
        60.0,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="Seconds that a call of your own drafter may take. A longer one is interrupted, and generation "
        "continues without the drafter; if it cannot be interrupted, the process ends with a message.",
    )
    exact: bool = Field(True, description="Batch-invariant numerics: speculation cannot change a token.")
    precision: Literal["auto", "bf16", "mixed", "split", "float32"] = Field(
        "auto",
        description="Arithmetic: bf16; mixed or split (bf16 weights, activations of 24 or 16 bits); float32. auto: "
        "bf16 on a GPU, float32 on a CPU. A CPU supports float32 and mixed.",
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_THREADS)] = Field(
        "auto",
        description="Threads of this process for exact mode on a CPU, in rollouts and training. They change no bit. "
        "auto: one per core that it may use (of 4 or more, all but one), divided by a run's processes; "
        "OMP_NUM_THREADS limits it.",
    )
    max_sequences: int = Field(64, ge=1, le=2**16, description="Sequences decoded at the same time.")
    max_rows: int = Field(512, ge=1, le=2**15, description="Token rows per forward pass: decode, draft and prefill.")
    prefill_chunk: int = Field(256, ge=1, le=2**15, description="Most prompt rows per forward pass.")
    kv_tokens: int | None = Field(
        None, ge=1, le=2**40, description="Capacity of the KV cache in tokens; null: as much as fits in free memory."
    )

    run_ahead: bool | None = Field(
        None,
        description="Begin rollouts of later calls in rows that cost almost nothing; they come back as drafts. null: "
        "on when training on a GPU with drafter=auto.",
    )
    ahead_calls: int = Field(2, ge=1, le=2**10, description="How many calls ahead run-ahead may begin rollouts.")
    ahead_tokens: int = Field(2**20, ge=1, le=2**40, description="Most run-ahead tokens to keep.")
    graphs: bool = Field(True, description="GPU: replay captured graphs; off: launch kernel by kernel, for debugging.")


class SamplingSettings(Settings):
    temperature: float = Field(
        Sampling.temperature, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False, description="0 is greedy."
    )
    top_k: int = Field(
        Sampling.top_k, ge=0, le=MAX_TOKEN_ID, description="Keep the k most probable tokens; 0 keeps all."
    )
    top_p: float = Field(
        Sampling.top_p, ge=MIN_TOP_P, le=1, description="Keep the smallest set with this probability; 1 keeps all."
    )
    min_p: float = Field(
        Sampling.min_p, ge=0, le=1, description="Drop tokens less probable than this fraction of the most probable one."
    )
    max_new_tokens: int = Field(
        Sampling.max_new_tokens, ge=1, le=MAX_NEW_TOKENS, description="Length limit of a response, in tokens."
    )
    n: int = Field(Sampling.n, ge=1, le=MAX_SAMPLES, description="Samples per prompt.")
    seed: int = Field(
        Sampling.seed, ge=-(2**63), lt=2**63, description="With prompt, draw and sample index, fixes every token."
    )
    stream: str = Field(Sampling.stream, description="Keeps the randomness of train, eval and serve apart.")
    stop: tuple[StopString, ...] = Field(
        Sampling.stop, max_length=MAX_STOPS, description="Strings that end a response."
    )
    stop_token_ids: tuple[StopTokenId, ...] = Field(
        Sampling.stop_token_ids, max_length=MAX_STOPS, description="Token ids that end a response."
    )
    ignore_eos: bool = Field(Sampling.ignore_eos, description="Continue past the model's own end token.")

    @field_validator("temperature")
    @classmethod
    def _refuse_tiny(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_lone_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def build(self) -> Sampling:
        """The sampling settings the engine takes."""
        return Sampling(**self.model_dump())
