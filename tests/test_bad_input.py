"""Bad input: a clear error that names what to change, and nothing lost. After each refusal the engine goes on working.

Drafters are input too, and the least trusted: whatever one does, it is warned about once and no token changes.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import scripted_decoder

from paceline.core.types import Draft, Rollout, Sampling, SequenceView, Verdict
from paceline.model.checkpoint import load_weights, save_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.verify import NonFiniteLogits

EVERYTHING = BudgetSettings(always=True)
PROMPTS = [[3, 4, 5], [60], [7] * 40]
SAMPLING = Sampling(max_new_tokens=10, n=2)
VOCAB, CONTEXT = 320, 4096


def make_engine(decoder: Decoder, drafter: Any = None, **settings: Any) -> Engine:
    return Engine(decoder, None, drafter, EngineSettings(**{"kv_tokens": 8192, **settings}), EVERYTHING)


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64)).decoder


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[Rollout]:
    """What the good prompts give on a fresh engine without a drafter."""
    return make_engine(decoder).generate(PROMPTS, SAMPLING)


@pytest.fixture(scope="module")
def used_engine(decoder: Decoder) -> Engine:
    """One engine for all bad calls, so that any damage adds up."""
    return make_engine(decoder, "suffix", kv_tokens=2048)


def assert_usable(engine: Engine, expected: list[Rollout]) -> None:
    engine.check_integrity()
    assert engine.generate(PROMPTS, SAMPLING) == expected
    engine.check_integrity()


# Prompts and draws.


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 1 is empty"),
        ((), "prompt 1 is empty"),
        (np.empty(0, np.int64), "prompt 1 is empty"),
        ([1] * CONTEXT, rf"prompt 1 has {CONTEXT} tokens .* context of {CONTEXT}"),
        ([1] * (CONTEXT + 100), rf"prompt 1 has {CONTEXT + 100} tokens .* context of {CONTEXT}"),
        ([1] * 2045, "prompt 1 may grow to 2055 tokens.*raise engine.kv_tokens or lower max_new_tokens"),
        ([5, -1], f"prompt 1: token id -1 is outside the vocabulary of {VOCAB}"),
        ([5, VOCAB], f"prompt 1: token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([2**31 + 5], f"prompt 1: token id {2**31 + 5} is outside"),
        (np.array([2**64 - 1], np.uint64), "prompt 1: token id .* is outside"),
        ([2**80], "prompt 1 must be a string or a flat list of token ids"),
        ([1.0, 2.0], "prompt 1 must be a string or a flat list of token ids.*float"),
        ([True, False], "prompt 1 must be a string or a flat list of token ids.*bool"),
        (["a", "b"], "prompt 1 must be a string or a flat list of token ids"),
        ([None], "prompt 1 must be a string or a flat list of token ids"),
        ([[1, 2], [3, 4]], "prompt 1 must be a string or a flat list of token ids"),
        ([[1, 2], [3]], "prompt 1 must be a string or a flat list of token ids"),
        ({"role": "user", "content": "Hi"}, r"prompt 1 is a message, not a prompt; for one chat pass \[messages\]"),
        (17, "prompt 1 must be a string or a flat list of token ids"),
        (None, "prompt 1 must be a string or a flat list of token ids"),
        ("text", "no tokenizer; pass prompts as lists of token ids"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_prompts_are_named(used_engine: Engine, expected: list[Rollout], bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        used_engine.generate([[1, 2], bad, [3]], SAMPLING)
    assert_usable(used_engine, expected)


def test_a_flat_list_of_ids_is_not_a_list_of_prompts(used_engine: Engine, expected: list[Rollout]) -> None:
    with pytest.raises(ValueError, match="prompt 0 must be a string or a flat list of token ids"):
        used_engine.generate([1, 2, 3], SAMPLING)  # type: ignore[list-item]
    assert_usable(used_engine, expected)


def test_a_lone_string_is_not_a_list_of_prompts(used_engine: Engine, expected: list[Rollout]) -> None:
    with pytest.raises(ValueError, match=r"prompts must be a list; for a single prompt pass \[prompt\]"):
        used_engine.generate("Hello", SAMPLING)
    assert_usable(used_engine, expected)


def test_empty_text_is_an_empty_prompt(tiny_model: Path) -> None:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=512))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate(["a", ""], SAMPLING)
    engine.check_integrity()
    assert len(engine.generate(["a"], SAMPLING)) == 2


@pytest.mark.parametrize(
    ("draws", "message"),
    [([1, 2], "2 for 3 prompts"), ([], "0 for 3 prompts"), ([1, 2, 3, 4], "4 for 3 prompts"), ([0, 1, 2**63], "draws")],
)
def test_bad_draws(used_engine: Engine, expected: list[Rollout], draws: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        used_engine.generate(PROMPTS, SAMPLING, draws=draws)
    assert_usable(used_engine, expected)


def test_stop_strings_need_a_tokenizer(used_engine: Engine, expected: list[Rollout]) -> None:
    with pytest.raises(ValueError, match=r"stop strings need a tokenizer.*stop_token_ids"):
        used_engine.generate(PROMPTS, replace(SAMPLING, stop=("x",)))
    assert_usable(used_engine, expected)


def test_a_bad_prompt_is_found_before_any_work_is_done(used_engine: Engine) -> None:
    used_engine.generate(PROMPTS, SAMPLING)
    steps = used_engine.stats.steps
    seen: list[Rollout] = []
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        used_engine.generate([[1], [2], []], SAMPLING, on_finish=seen.append)
    assert not seen and used_engine.stats.steps == steps


def test_a_sequence_just_fits_the_cache(decoder: Decoder) -> None:
    engine = make_engine(decoder, kv_tokens=64)
    with pytest.raises(ValueError, match="may grow to 65 tokens, but the KV cache holds 64"):
        engine.generate([[9] * 60], Sampling(max_new_tokens=5))
    for prompt_length in (1, 31, 32, 33, 60, 63):
        sampling = Sampling(max_new_tokens=64 - prompt_length, n=3, ignore_eos=True)
        rollouts = engine.generate([[9] * prompt_length], sampling)
        assert [len(rollout.token_ids) for rollout in rollouts] == [64 - prompt_length] * 3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_new_tokens", 0),
        ("n", 0),
        ("seed", 2**63),
        ("stop", ("ok", "")),
        ("temperature", 1e308),
        ("temperature", 10**400),
        ("top_k", 2**63),
        ("top_p", 5e-324),
        ("max_new_tokens", 2**40),
        ("n", 10**9),
        ("n", 10**4000),
        ("stop", ("x",) * 10**6),
        ("stop", ("x" * 10**6,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**40,)),
    ],
)
def test_bad_sampling_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Sampling: .*{setting}|Sampling: a value has the wrong type") as caught:
        Sampling(**{setting: value})
    assert len(str(caught.value)) < 600


# Numbers that are none.

NAN_TOKEN = 50


def poisoned_engine(drafter: Any = None, **settings: Any) -> Engine:
    """Counts up; ends at 40 and at 90; the token 50 has lost its embedding."""
    decoder = scripted_decoder({token: token + 1 for token in range(100)}, eos_token_ids=(40, 90), vocab_size=128)
    engine = make_engine(decoder, drafter, **settings)
    # Damaged after start-up: the self-test would refuse such weights before any sequence could be blamed.
    decoder.policy.embedding[NAN_TOKEN] = math.nan
    return engine


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_nan_logits_name_the_sequence_and_lose_nothing(drafter: str | None) -> None:
    engine = poisoned_engine(drafter)
    greedy = Sampling(temperature=0.0, max_new_tokens=30, n=2)
    seen: list[Rollout] = []
    with pytest.raises(NonFiniteLogits, match=r"NaN or infinite logits for prompt 1, sample 0 \(draw 1\)") as caught:
        engine.generate([[37], [44], [80]], greedy, on_finish=seen.append)
    assert isinstance(caught.value, ValueError) and "response token 6" in str(caught.value)
    assert [(r.prompt_index, r.sample_index, r.token_ids) for r in caught.value.rollouts] == [
        (0, 0, [38, 39, 40]),
        (0, 1, [38, 39, 40]),
    ]
    assert seen == caught.value.rollouts
    engine.check_integrity()
    # The pages that held NaN are used again.
    rollouts = engine.generate([[37] * 40, [60] * 40], greedy)
    assert [r.token_ids for r in rollouts] == [[38, 39, 40]] * 2 + [list(range(61, 91))] * 2


def test_nan_in_the_prompt() -> None:
    engine = poisoned_engine(prefill_chunk=4)
    with pytest.raises(NonFiniteLogits, match=r"prompt 1, sample 0.*response token 0"):
        engine.generate([[60], [*range(45, 60)]], Sampling(max_new_tokens=5))
    engine.check_integrity()
    assert engine.generate([[87]], Sampling(temperature=0.0))[0].token_ids == [88, 89, 90]


@pytest.mark.parametrize("parents", [range(-1, 5), [-1] * 6, [-1, 0, 0, -1, 3, 3]])
def test_nan_in_a_draft_that_is_not_taken_harms_nobody(parents: Sequence[int]) -> None:
    """A guess no sequence follows may compute nonsense, and leaves it in pages that are used later."""

    def make_draft(view: SequenceView, budget: int) -> Draft:
        return Draft([NAN_TOKEN] * min(budget, 6), list(parents)[: min(budget, 6)])

    engine = poisoned_engine(Each(make_draft))
    greedy = Sampling(temperature=0.0, max_new_tokens=30, n=2)
    for _ in range(3):
        rollouts = engine.generate([[51], [58] * 31], greedy)
        assert [r.token_ids for r in rollouts] == [list(range(52, 82))] * 2 + [list(range(59, 89))] * 2
    assert engine.stats.drafters["Each"].accepted == 0


# Model folders and start-up.


def damaged_copy(tiny_model: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_unsupported_architecture_lists_the_supported(tiny_model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(tiny_model, tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*not supported") as caught:
        Engine.from_pretrained(folder)
    assert all(name in str(caught.value) for name in ("Llama", "Qwen2", "Qwen3", "Mistral"))


def test_missing_weight_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(tiny_model, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        Engine.from_pretrained(folder)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors is missing"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 100_000])
def test_truncated_weight_file_is_named(tiny_model: Path, tmp_path: Path, num_bytes: int) -> None:
    folder = damaged_copy(tiny_model, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize("exact", [True, False])
def test_nan_in_all_weights_is_not_blamed_on_the_machine(tiny_model: Path, tmp_path: Path, exact: bool) -> None:
    folder = damaged_copy(tiny_model, tmp_path)
    config = load_config(folder)
    weights = load_weights(folder, config)
    save_checkpoint(folder, config, {**weights, "lm_head.weight": torch.full((VOCAB, config.hidden_size), math.nan)})
    with pytest.raises(ValueError, match="NaN"):
        Engine.from_pretrained(folder, exact=exact, settings=EngineSettings(kv_tokens=64)).generate(
            PROMPTS[:1], SAMPLING
        )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model folder at"):
        Engine.from_pretrained(tmp_path / "no such folder")
    with pytest.raises(ValueError, match=r"config\.json"):
        Engine.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "sufix"}, "did you mean 'suffix'"),
        ({"drafter": "n-gram"}, "did you mean 'ngram'"),
        ({"drafter": "suffix,sufix"}, "did you mean 'suffix'"),
        ({"drafter": object()}, "propose"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported.*use 'float32' or 'bfloat16'"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"device": "tpu"}, "device 'tpu' is not supported"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_options(tiny_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(tiny_model, settings=EngineSettings(kv_tokens=64), **options)


# Drafters.

MakeDraft = Callable[[SequenceView, int], Any]


def nothing(*_: Any) -> None:
    """Does as a well-behaved `observe` or `finish` does."""


class Each:
    """Answers for each view by a function; `observe` and `finish` can be replaced."""

    def __init__(
        self,
        make_draft: MakeDraft,
        observe: Callable[[Sequence[Verdict]], None] = nothing,
        finish: Callable[[int], None] = nothing,
    ) -> None:
        self._make_draft = make_draft
        self._observe = observe
        self._finish = finish
        self.num_asked = 0

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> Any:
        self.num_asked += 1
        return [self._make_draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self._observe(verdicts)

    def finish(self, sequence_id: int) -> None:
        self._finish(sequence_id)


class Whole(Each):
    """Answers for all views at once by a function."""

    def __init__(self, propose: Callable[[Sequence[SequenceView], Sequence[int]], Any]) -> None:
        super().__init__(lambda view, budget: GUESS)
        self._propose = propose

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> Any:
        self.num_asked += 1
        return self._propose(views, budgets)


GUESS = Draft.chain([5, 6, 7])


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("bang")


def always(draft: Any) -> Each:
    return Each(lambda view, budget: draft)


def spoil(change: Callable[[Any], object], what: str) -> Whole:
    """Changes what it is given to read before it answers."""

    def propose(views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        answer = [GUESS] * len(views)
        if isinstance(views, list) and "views" in what:
            change(views)
        if isinstance(budgets, list) and "budgets" in what:
            change(budgets)
        return answer

    return Whole(propose)


Look = SimpleNamespace

BAD_DRAFTERS: dict[str, Callable[[], Each]] = {
    "raises in propose": lambda: Each(fail),
    "raises in observe": lambda: Each(lambda view, budget: GUESS, observe=fail),
    "raises in finish": lambda: Each(lambda view, budget: GUESS, finish=fail),
    "returns None": lambda: Whole(lambda views, budgets: None),
    "returns a string": lambda: Whole(lambda views, budgets: "abc"),
    "returns a generator": lambda: Whole(lambda views, budgets: (GUESS for _ in views)),
    "too few drafts": lambda: Whole(lambda views, budgets: [GUESS] * (len(views) - 1)),
    "too many drafts": lambda: Whole(lambda views, budgets: [GUESS] * (len(views) + 1)),
    "None as a draft": lambda: always(None),
    "a list as a draft": lambda: always([5, 6]),
    "a number as a draft": lambda: always(3.5),
    "looks like a draft": lambda: always(Look(tokens=[5, 6], parents=[-1, 0], scores=None)),
    "looks like a long draft": lambda: always(Look(tokens=[5] * 99, parents=range(-1, 98), scores=None)),
    "parent after child": lambda: always(Draft([5, 6], [1, -1])),
    "own parent": lambda: always(Draft([5, 6], [-1, 1])),
    "parent below -1": lambda: always(Draft([5, 6], [-2, 0])),
    "too few parents": lambda: always(Draft([5, 6], [-1])),
    "too many parents": lambda: always(Draft([5], [-1, 0])),
    "nested parents": lambda: always(Draft([5], [[-1]])),  # type: ignore[list-item]
    "float parents": lambda: always(Draft([5, 6], [-1.0, 0.0])),  # type: ignore[list-item]
    "no parents": lambda: always(Draft([5, 6], None)),  # type: ignore[arg-type]
    "id past the vocabulary": lambda: always(Draft.chain([5, VOCAB])),
    "negative id": lambda: always(Draft.chain([5, -1])),
    "huge id": lambda: always(Draft.chain([10**30])),
    "float ids": lambda: always(Draft.chain([5.0, 6.0])),  # type: ignore[list-item]
    "bool ids": lambda: always(Draft.chain(np.array([True, False]))),
    "nested ids": lambda: always(Draft.chain([[5, 6], [7, 8]])),  # type: ignore[list-item]
    "ragged ids": lambda: always(Draft.chain([[5, 6], [7]])),  # type: ignore[list-item]
    "text as ids": lambda: always(Draft.chain("abc")),  # type: ignore[arg-type]
    "too few scores": lambda: always(Draft.chain([5, 6], [0.5])),
    "too many scores": lambda: always(Draft.chain([5, 6], [0.5] * 3)),
    "text as scores": lambda: always(Draft.chain([5, 6], ["a", "b"])),  # type: ignore[list-item]
    "None as score": lambda: always(Draft.chain([5, 6], [None, 0.5])),  # type: ignore[list-item]
    "one number as scores": lambda: always(Draft.chain([5, 6], 0.5)),  # type: ignore[arg-type]
    "a list as source": lambda: always(replace(GUESS, source=["x"])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("budget", [EVERYTHING, BudgetSettings(calibrate=False)], ids=["always", "by value"])
@pytest.mark.parametrize("name", BAD_DRAFTERS)
def test_a_bad_drafter_is_warned_about_once_and_changes_nothing(
    decoder: Decoder, expected: list[Rollout], name: str, budget: BudgetSettings
) -> None:
    drafter = BAD_DRAFTERS[name]()
    engine = Engine(decoder, None, drafter, EngineSettings(kv_tokens=2048), budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert engine.generate(PROMPTS, SAMPLING) == expected
            engine.check_integrity()
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert str(caught[0].message).startswith(f"drafter {type(drafter).__name__!r} ")


HARMLESS: dict[str, Callable[[], Each]] = {
    "NaN scores": lambda: always(Draft.chain([5, 6], [math.nan, 0.5])),
    "infinite scores": lambda: always(Draft.chain([5, 6], [math.inf, -math.inf])),
    "scores beyond 1": lambda: always(Draft.chain([5, 6], [7.0, -3.0])),
    "integer scores": lambda: always(Draft.chain([5, 6], [1, 0])),
    "unsigned ids": lambda: always(Draft.chain(np.array([5, 6], np.uint64))),
    "far too long": lambda: always(Draft.chain([5] * 10_000)),
    "equal siblings": lambda: always(Draft([5, 5, 5, 6, 6], [-1, -1, -1, 0, 1])),
    "nothing": lambda: always(Draft((), ())),
}


@pytest.mark.parametrize("budget", [EVERYTHING, BudgetSettings(calibrate=False)], ids=["always", "by value"])
@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_drafter_changes_nothing(
    decoder: Decoder, expected: list[Rollout], name: str, budget: BudgetSettings
) -> None:
    engine = Engine(decoder, None, HARMLESS[name](), EngineSettings(kv_tokens=2048), budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(PROMPTS, SAMPLING) == expected
    engine.check_integrity()


@pytest.mark.parametrize("what", ["views", "budgets", "views and budgets"])
@pytest.mark.parametrize("change", [list.clear, list.reverse, list.pop], ids=lambda change: change.__name__)
def test_a_drafter_that_changes_what_it_is_given_to_read(
    decoder: Decoder, expected: list[Rollout], change: Callable[[Any], object], what: str
) -> None:
    engine = make_engine(decoder, spoil(change, what))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert engine.generate(PROMPTS, SAMPLING) == expected
    engine.check_integrity()


def test_a_drafter_that_raises_is_left_out_until_the_next_call(decoder: Decoder, expected: list[Rollout]) -> None:
    drafter = Each(fail)
    engine = make_engine(decoder, drafter)
    with pytest.warns(RuntimeWarning, match="drafter 'Each' raised ZeroDivisionError: bang"):
        engine.generate(PROMPTS, SAMPLING)
    assert drafter.num_asked == 1
    drafter._make_draft = lambda view, budget: GUESS
    assert engine.generate(PROMPTS, SAMPLING) == expected
    assert drafter.num_asked > 5 and engine.stats.drafters["Each"].proposed > 0


def test_one_bad_draft_does_not_spoil_the_others(decoder: Decoder, expected: list[Rollout]) -> None:
    def make_draft(view: SequenceView, budget: int) -> Draft:
        return Draft.chain([VOCAB]) if view.draw == 0 else GUESS

    drafter = Each(make_draft)
    engine = make_engine(decoder, drafter)
    with pytest.warns(RuntimeWarning, match="outside the vocabulary"):
        assert engine.generate(PROMPTS, SAMPLING) == expected
    assert drafter.num_asked > 5 and engine.stats.drafters["Each"].proposed > 0


def test_the_warning_uses_the_drafters_own_name(decoder: Decoder) -> None:
    drafter = Each(fail)
    drafter.name = "my drafter"  # type: ignore[attr-defined]
    engine = make_engine(decoder, drafter)
    with pytest.warns(RuntimeWarning, match="drafter 'my drafter' raised"):
        engine.generate(PROMPTS, SAMPLING)


def test_an_interrupt_inside_a_drafter_is_not_swallowed(decoder: Decoder, expected: list[Rollout]) -> None:
    """A real one; a drafter may raise KeyboardInterrupt itself, too (test_guests.py)."""

    def interrupt(view: SequenceView, budget: int) -> Draft:
        signal.raise_signal(signal.SIGINT)
        return GUESS

    drafter = Each(interrupt)
    engine = make_engine(decoder, drafter)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SAMPLING)
    drafter._make_draft = lambda view, budget: GUESS
    assert_usable(engine, expected)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 2.5},
        {"seed": 1.5},
        {"stream": None},
        {"n": 2.5},
        {"stop": (5,)},
        {"stop_token_ids": 5},
        {"temperature": "1"},
        {"temperature": None},
    ],
    ids=str,
)
def test_sampling_values_of_a_wrong_type(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wrong type"):
        Sampling(**values)


def test_draws_must_be_integers(tiny_model: Path) -> None:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64))
    with pytest.raises(ValueError, match="draws must be integers"):
        engine.generate([[1], [2]], SAMPLING, draws=[0.2, 0.9])  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_in_the_process_changes_nothing(tiny_model: Path, dtype: torch.dtype) -> None:
    """Training code in the same process often sets one; a kernel must never write past a smaller buffer."""
    expected = Engine.from_pretrained(tiny_model, drafter="suffix").generate(PROMPTS, SAMPLING)
    torch.set_default_dtype(dtype)
    try:
        found = Engine.from_pretrained(tiny_model, drafter="suffix").generate(PROMPTS, SAMPLING)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_weights_are_replaced_whole_or_not_at_all(tiny_model: Path) -> None:
    config = load_config(tiny_model)
    weights = load_weights(tiny_model, config)
    engine = Engine.from_pretrained(tiny_model, drafter=None)
    before = engine.generate(PROMPTS, SAMPLING)
    broken = {name: weight * 2 for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.decoder.load_weights(broken)
    with pytest.raises(ValueError, match="must have shape"):
        engine.decoder.load_weights({**weights, "model.norm.weight": torch.ones(3)})
    assert engine.generate(PROMPTS, SAMPLING) == before


def test_settings_speak_where_arguments_do_not(tiny_model: Path) -> None:
    settings = EngineSettings(drafter="none", exact=False, kv_tokens=64)
    engine = Engine.from_pretrained(tiny_model, settings=settings)
    assert not engine.decoder.ops.is_exact
    engine.generate([[1, 2]], SAMPLING)
    assert not engine.stats.drafters
    assert Engine.from_pretrained(tiny_model, exact=True, settings=settings).decoder.ops.is_exact


class Vandal:
    """Tries to write into the sequence it is shown."""

    name = "vandal"

    def propose(self, views: Any, budgets: Any) -> list[Draft]:
        for view in views:
            tokens = view.token_ids
            try:
                tokens.flags.writeable = True
            except ValueError:
                continue
            tokens[-1] = 5
        return [Draft((), ())] * len(views)

    def observe(self, verdicts: Any) -> None: ...

    def finish(self, sequence_id: int) -> None: ...


def test_a_drafter_cannot_write_tokens(tiny_model: Path) -> None:
    always = BudgetSettings(always=True)
    expected = Engine.from_pretrained(tiny_model, drafter=None).generate(PROMPTS, SAMPLING)
    assert Engine.from_pretrained(tiny_model, drafter=Vandal(), budget=always).generate(PROMPTS, SAMPLING) == expected


def test_rollouts_that_end_in_the_failing_step_are_not_lost(tiny_model: Path) -> None:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=256))
    sample = engine.decoder.ops.sample
    sampling = Sampling(max_new_tokens=5, ignore_eos=True)

    def poisoned(logits: Any, sampling: Any, keys: Any, steps: Any) -> Any:
        sampled = sample(logits, sampling, keys, steps)
        sampled.is_finite[1:] &= steps[1:] < 4
        return sampled

    engine.decoder.ops.sample = poisoned  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogits, match="prompt 1") as caught:
        engine.generate([[1, 2], [3, 4]], sampling)
    assert [rollout.prompt_index for rollout in caught.value.rollouts] == [0]
    engine.check_integrity()
