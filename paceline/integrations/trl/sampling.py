"""TRL's generation settings as `Sampling`. Called once per trainer.

The settings come from two places, as in transformers: what TRL and `generation_kwargs` say, and, where that is None,
the model's generation_config.json. A setting that would change tokens and that the engine does not have is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.types import Sampling

READ = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "eos_token_id", "stop_strings")
IDLE = (
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "max_length", "cache_implementation", "cache_config",
    "use_cache", "disable_compile", "compile_config", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate",
)  # fmt: skip
"""Settings of `generate` that change no token; `max_new_tokens`, which TRL always sets, goes before `max_length`."""
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "min_new_tokens": 0, "exponential_decay_length_penalty": None, "max_time": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "penalty_alpha": None, "guidance_scale": None,
    "dola_layers": None, "watermarking_config": None, "remove_invalid_values": False, "renormalize_logits": False,
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False,
    "diversity_penalty": 0.0,
}  # fmt: skip
"""Settings that the engine does not have, with the values at which they change nothing."""


def sampling_of(generation: Mapping[str, Any], defaults: Mapping[str, Any], seed: int) -> Sampling:
    """`generation` is what TRL would pass to `generate`, `defaults` the model's own generation config."""
    _refuse_given(generation)
    _refuse_defaults(generation, defaults)
    found: dict[str, Any] = {
        name: defaults.get(name) if generation.get(name) is None else generation[name] for name in READ
    }
    end = found["eos_token_id"]
    return Sampling(
        temperature=found["temperature"] if found["do_sample"] else 0.0,
        top_k=found["top_k"] or 0,
        top_p=1.0 if found["top_p"] is None else found["top_p"],
        min_p=found["min_p"] or 0.0,
        max_new_tokens=found["max_new_tokens"],
        seed=seed,
        stop=found["stop_strings"] or (),
        stop_token_ids=(end,) if isinstance(end, int) else tuple(end),
        ignore_eos=True,  # TRL names every id that ends a completion
    )


def _refuse_given(generation: Mapping[str, Any]) -> None:
    for name, value in generation.items():
        if value is not None and name not in (*READ, *IDLE) and (name not in NEUTRAL or value != NEUTRAL[name]):
            hint = "the engine takes stop_strings" if name == "stop" else "leave it out, or use TRL's own trainer"
            raise ValueError(f"{name}={value!r} is not supported by Paceline's engine; {hint}")


def _refuse_defaults(generation: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Entries of other names in a model's file are notes to other software."""
    for name, neutral in NEUTRAL.items():
        value = defaults.get(name)
        if generation.get(name) is None and value not in (None, neutral):
            raise ValueError(
                f"the model's generation_config.json sets {name}={value!r}, which Paceline's engine does not support; "
                f"load the model yourself and set model.generation_config.{name} = {neutral!r}, or use TRL's own "
                "trainer"
            )
