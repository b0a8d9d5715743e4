"""The warm start: batches that no worker changes, a model that learns them, a folder that transformers reads.

Also the forward without exactness, which a warm start trains through: padding must change no result.
"""

from __future__ import annotations

import functools
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import ModelSpec
from test_training_forward import decoder_of, gradients_of, relative_error, texts_of, trainable
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.core.config import SettingsError, load
from paceline.core.types import Sampling
from paceline.model.backward.plain import MOST_PADDING, SHORTEST_GROUP, Padding, causal_attention
from paceline.model.backward.policy import TrainingOptions
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rl.learner import Learner
from paceline.rollout.engine import Engine
from paceline.tasks.procedural import split_of
from paceline.warmup.settings import CheckSettings, DataSettings, ShapeSettings, TrainSettings, WarmupSettings
from paceline.warmup.texts import (
    BatchStream,
    TextBatch,
    TextSource,
    WorkedText,
    common_letters,
    read_batch,
    write_batch,
)
from paceline.warmup.train import (
    HeldOut,
    WarmupProgress,
    initial_weights,
    learner_settings,
    model_config,
    round_weights,
    to_samples,
    warm_up,
)

RECIPES = Path(__file__).parent.parent / "recipes"
CONTEXT = 640
TINY = ShapeSettings(hidden_size=64, intermediate_size=128, num_layers=2, head_dim=16, max_context=CONTEXT)
DATA = DataSettings(levels={0: 3.0, 1: 1.0}, batch_tokens=600, seed=5)
SETTINGS = WarmupSettings(
    data=DATA,
    model=TINY,
    train=TrainSettings(steps=5, warmup_steps=1, lr=3e-3),
    check=CheckSettings(every=2, items=6, max_new_tokens=24),
)
LETTERS = common_letters(CONTEXT)


def as_lists(batch: TextBatch) -> list[tuple[list[int], list[int]]]:
    return [(text.prompt_ids.tolist(), text.response_ids.tolist()) for text in batch]


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_batch(workers: int) -> None:
    source = TextSource(DATA, CONTEXT)
    # Asked in another order, so that a source that remembers anything is found out.
    expected = {step: as_lists(source.batch(step)) for step in (4, 0, 3, 1, 2)}
    with BatchStream(DATA.model_copy(update={"workers": workers}), CONTEXT, 5) as stream:
        found = [as_lists(batch) for batch in stream]
    assert found == [expected[step] for step in range(5)]
    assert len({str(batch) for batch in found}) == 5


def test_a_stream_without_workers_is_the_same() -> None:
    with BatchStream(DATA, CONTEXT, 2) as stream:
        assert [as_lists(batch) for batch in stream] == [as_lists(TextSource(DATA, CONTEXT).batch(i)) for i in (0, 1)]


def test_another_seed_gives_other_texts() -> None:
    other = TextSource(DATA.model_copy(update={"seed": 6}), CONTEXT)
    assert as_lists(TextSource(DATA, CONTEXT).batch(0)) != as_lists(other.batch(0))


def test_a_batch_is_full_sorted_and_fits() -> None:
    source = TextSource(DATA, 200)
    for step in range(20):
        lengths = [len(text) for text in source.batch(step)]
        assert lengths == sorted(lengths)
        assert sum(lengths) >= DATA.batch_tokens > sum(lengths) - max(lengths)
        assert max(lengths) <= 200
    # The control: without the limit there are longer ones.
    assert max(len(text) for step in range(20) for text in TextSource(DATA, CONTEXT).batch(step)) > 200


def test_texts_are_solved_train_items() -> None:
    source = TextSource(DATA, CONTEXT)
    task = source.tasks[0]
    for text in source.batch(0):
        assert text.response_ids[-1] == LETTERS.eos_token_id
        prompt, response = (LETTERS.decode(ids) for ids in (text.prompt_ids, text.response_ids))
        numbers, target = prompt.strip().split(" > ")
        key = f"{' '.join(map(str, sorted(map(int, numbers.split()))))} > {target}"
        assert split_of(task.name, key) == "train"
        item = task.item(0, 0)
        asked = {"numbers": [int(number) for number in numbers.split()], "target": int(target)}
        assert task.score(type(item)(prompt, asked, key), response) == 1


def test_levels_are_drawn_by_their_shares() -> None:
    source = TextSource(DataSettings(levels={0: 3.0, 3: 1.0}), CONTEXT)
    prompts = [source.text(step, 0).prompt_ids for step in range(400)]
    blank = LETTERS.encode(" ")[0]
    num_hard = sum(int((ids == blank).sum()) == 5 for ids in prompts)  # four numbers and a target
    assert 70 <= num_hard <= 130  # 100 expected, 8.7 standard deviation


texts = st.builds(
    lambda prompt, response: WorkedText(np.array(prompt, np.int32), np.array(response, np.int32)),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
)


@given(batch=st.lists(texts, min_size=1, max_size=4), cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=50)
def test_a_batch_survives_the_pipe_whole_or_not_at_all(batch: TextBatch, cut: float) -> None:
    pipe = io.BytesIO()
    write_batch(pipe, batch)
    data = pipe.getvalue()
    assert as_lists(read_batch(io.BytesIO(data))) == as_lists(batch)
    with pytest.raises(EOFError):
        read_batch(io.BytesIO(data[: int(len(data) * cut)]))


def test_a_worker_that_dies_is_an_error() -> None:
    with BatchStream(DATA.model_copy(update={"workers": 1}), CONTEXT, 1000) as stream:
        batches = iter(stream)
        next(batches)
        stream._workers[0].kill()
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            list(batches)


@pytest.mark.parametrize(
    "data, message",
    [
        ({"task": "countdwn"}, "did you mean countdown"),
        ({"task": "math"}, "no worked solutions"),
        ({"levels": {9: 1.0}}, "levels 0 to 5, got 9"),
        ({"dials": {"sise": 3}}, "did you mean size"),
    ],
)
def test_bad_data_is_refused_at_once(data: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        BatchStream(DataSettings(**data), CONTEXT, 10)


def test_texts_that_never_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.warmup.texts.MAX_TEXTS", 20)
    with pytest.raises(ValueError, match="raise max_context"):
        TextSource(DATA, 10).batch(0)


@pytest.mark.parametrize("levels", [{}, {0: 0.0}, {0: -1.0}, {-1: 1.0}, {0: float("inf")}])
def test_shares_are_positive(levels: dict[int, float]) -> None:
    with pytest.raises(ValueError):
        DataSettings(levels=levels)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_tiny_model_learns_a_few_texts_by_heart() -> None:
    config = model_config(TINY, LETTERS)
    weights = initial_weights(config, seed=1)
    decoder = Decoder(config, weights)
    learner = Learner(decoder, learner_settings(TrainSettings(steps=90, warmup_steps=5, lr=6e-3)), weights=weights)
    batch = [text for text in TextSource(DATA, 60).batch(0) if len(text) > 40][:3]
    assert len({text.prompt_ids.tobytes() for text in batch}) == 3
    losses = [learner.supervised(to_samples(batch))["loss"] for _ in range(90)]
    assert 3 < losses[0] < 7  # about ln 80: the model begins by knowing nothing
    assert losses[-1] < 0.05
    engine = Engine(decoder, LETTERS, drafter=None)
    rollouts = engine.generate([text.prompt_ids for text in batch], Sampling(temperature=0, max_new_tokens=60))
    assert [r.token_ids for r in rollouts] == [text.response_ids.tolist() for text in batch]


@functools.cache
def warmed_up(folder: Path) -> tuple[dict[str, float], list[WarmupProgress]]:
    seen: list[WarmupProgress] = []
    return warm_up(SETTINGS, folder, seen.append), seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("warm") / "model"
    warmed_up(made)
    return made


def test_progress_is_told_step_by_step(folder: Path) -> None:
    metrics, seen = warmed_up(folder)
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5]
    assert [progress.check is not None for progress in seen] == [False, True, False, True, True]
    assert seen[-1].seconds_left == 0
    assert all(progress.tokens_per_second > 0 for progress in seen)
    assert seen[-1].num_tokens == metrics["total_tokens"] >= 5 * DATA.batch_tokens
    assert metrics["steps"] == 5
    assert metrics["loss"] == seen[-1].loss < seen[0].loss
    assert metrics["eval/max_length"] <= SETTINGS.check.max_new_tokens
    assert metrics["learning_rate"] < SETTINGS.train.lr / 2


def test_the_folder_is_what_transformers_reads(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = load_config(folder)
    saved = load_weights(folder, config)
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    text = TextSource(DATA, CONTEXT).batch(0)[-1]
    ids = [*text.prompt_ids.tolist(), *text.response_ids.tolist()]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Decoder(config, saved).score(ids), expected, rtol=0, atol=2e-4)
    assert AutoTokenizer.from_pretrained(folder).encode("1 2 > 3\n") == LETTERS.encode("1 2 > 3\n")
    assert config.eos_token_ids == (LETTERS.eos_token_id,)
    assert config.max_context == CONTEXT
    assert not list(folder.parent.glob(".*")), "nothing is left beside it"


def test_the_recipe_makes_the_same_model_again(folder: Path, tmp_path: Path) -> None:
    recipe = load(WarmupSettings, folder / "recipe.yaml")
    assert recipe.model_copy(update={"made": {}}) == SETTINGS
    assert recipe.made["result"]["steps"] == 5
    assert {"torch", "paceline", "python"} <= recipe.made["versions"].keys()
    assert recipe.made["commit"]
    # Fewer checks, so that it is seen that they change nothing; and workers write the texts.
    check = recipe.check.model_copy(update={"every": 100})
    data = recipe.data.model_copy(update={"workers": 2})
    warm_up(recipe.model_copy(update={"check": check, "data": data}), tmp_path / "again")
    first, again = ((f / "model.safetensors").read_bytes() for f in (folder, tmp_path / "again"))
    assert first == again


def test_another_seed_makes_another_model() -> None:
    config = model_config(TINY, LETTERS)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(initial_weights(config, 1)[name], initial_weights(config, 1)[name])
    assert not torch.equal(initial_weights(config, 1)[name], initial_weights(config, 2)[name])


def test_enough_solved_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.1, 0.6, 0.9])

    def solve(self: HeldOut, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}, "what is saved is what is checked"
        return {"eval/accuracy": next(answers)}

    monkeypatch.setattr(HeldOut, "solve", solve)
    enough = SETTINGS.model_copy(update={"check": CheckSettings(every=1, items=1, max_new_tokens=1, stop_at=0.5)})
    assert warm_up(enough, tmp_path / "model")["steps"] == 2
    assert load(WarmupSettings, tmp_path / "model" / "recipe.yaml").made["result"]["eval/accuracy"] == 0.6


def test_checks_use_the_weights_as_they_are_saved(folder: Path) -> None:
    config = load_config(folder)
    held_out = HeldOut(SETTINGS, config, LETTERS)
    saved = load_weights(folder, config)
    random = round_weights(initial_weights(config, 3))
    first, other, again = (held_out.solve(weights) for weights in (saved, random, saved))
    assert first == again == {key: warmed_up(folder)[0][key] for key in first}
    assert other != first


def test_an_interrupted_training_keeps_what_was_saved(tmp_path: Path) -> None:
    def interrupt(progress: WarmupProgress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    data = DATA.model_copy(update={"workers": 1})
    with pytest.raises(KeyboardInterrupt):
        warm_up(SETTINGS.model_copy(update={"data": data}), tmp_path / "model", interrupt)
    assert load(WarmupSettings, tmp_path / "model" / "recipe.yaml").made["result"]["steps"] == 2
    assert load_weights(tmp_path / "model", load_config(tmp_path / "model"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_nothing_foreign_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="choose another folder"):
        warm_up(SETTINGS, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "section, message",
    [
        ({"model": {"num_heads": 3}}, "multiple of num_kv_heads"),
        ({"train": {"optimizer": "adamv"}}, "adamw"),
        ({"train": {"stepz": 3}}, "did you mean train.steps"),
        ({"check": {"stop_at": 1.5}}, "check.stop_at"),
    ],
)
def test_bad_settings_are_explained(section: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(str(section))
    with pytest.raises(SettingsError, match=message):
        load(WarmupSettings, file)


def test_a_check_leaves_room_for_the_prompt() -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        check = CheckSettings(max_new_tokens=CONTEXT)
        HeldOut(SETTINGS.model_copy(update={"check": check}), model_config(TINY, LETTERS), LETTERS)


def test_the_shipped_recipe_keeps_its_promises() -> None:
    recipe = load(WarmupSettings, RECIPES / "warmup-countdown.yaml")
    config = model_config(recipe.model, LETTERS)
    assert 3e6 <= config.num_parameters <= 5e6
    assert 8 <= config.num_layers <= 12
    assert (config.num_kv_heads, config.num_heads) == (2, 4)
    assert config.head_dim <= 128
    assert config.tie_embeddings and config.qk_norm
    assert config.max_context >= 4608
    hardest = TextSource(recipe.data, recipe.model.max_context).tasks[max(recipe.data.levels)]
    assert hardest.dials.max_chars >= 4096  # type: ignore[attr-defined]
    assert recipe.train.steps % recipe.check.every == 0


# --- the forward without exactness ------------------------------------------------------------------------------------

SPEC = ModelSpec(family="qwen3", is_tied=True, head_dim=32, max_positions=512)


@given(lengths=st.lists(st.one_of(st.integers(1, 80), st.integers(1, 5000)), min_size=1, max_size=40))
@settings(max_examples=200)
def test_padding_loses_no_row_and_stays_small(lengths: list[int]) -> None:
    starts = [0, *np.cumsum(lengths).tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths])
    padding = Padding.plan(starts, positions)
    rows = torch.arange(1, starts[-1] + 1)
    slots = padding.fill(rows)
    assert torch.equal(padding.take(slots), rows)
    assert len(slots) <= MOST_PADDING * sum(max(length, SHORTEST_GROUP) for length in lengths)
    # Every text lies in one line of a rectangle, from its first row on, with nothing but padding after it.
    expected = {tuple(range(start + 1, stop + 1)) for start, stop in itertools.pairwise(starts)}
    lines = [line.tolist() for rectangle in padding.split(slots) for line in rectangle]
    assert {tuple(value for value in line if value) for line in lines} == expected
    assert all(line == sorted(line, key=lambda value: value == 0) for line in lines)
    assert len(padding.shapes) <= 2 + np.log(max(max(lengths) / SHORTEST_GROUP, 1)) / np.log(MOST_PADDING)


def test_gradients_of_very_different_lengths_equal_the_exact_ones() -> None:
    texts = texts_of(SPEC, ((400, 9), (3, 1), (70, 2), (150, 149), (2, 1), (260, 1), (66, 65)))
    exact_values, exact = gradients_of(trainable(decoder_of(SPEC)), texts)
    for checkpointing in (False, True):
        options = TrainingOptions(exact=False, checkpointing=checkpointing, head_rows=100)
        values, plain = gradients_of(trainable(decoder_of(SPEC), options), texts)
        torch.testing.assert_close(values, exact_values, rtol=0, atol=1e-4)
        assert relative_error(plain, exact) < 1e-4


def test_keys_may_be_shared_or_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 8, generator=generator) for heads in (6, 2, 2))
    torch.testing.assert_close(causal_attention(q, k, v, is_repeated=True), causal_attention(q, k, v))
