"""The check that an inflated model writes the original's text passes in a tiny setting, and fails where it must."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core.types import Rollout
from paceline.model.checkpoint import copy_tokenizer, load_weights, save_checkpoint
from paceline.model.config import ModelConfig
from paceline.model.folder import load_config
from paceline.model.random_model import make_random_model

BENCH = Path(__file__).resolve().parent.parent / "bench"
SMALL = ["--shape", "small", "--sequences", "4", "--tokens", "8", "--temperatures", "1", "0"]
SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The script as a module; the bench folder is no package."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("inflate_equality")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose head is its embedding, with an eps that its small hidden states feel."""
    untied = make_random_model(tmp_path_factory.mktemp("untied"), size="tiny", family="llama")
    config = load_config(untied)
    weights = load_weights(untied, config)
    del weights["lm_head.weight"]
    tied = ModelConfig.from_hf({**config.hf, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}, config.hf_generation)
    folder = tmp_path_factory.mktemp("tied")
    save_checkpoint(folder, tied, weights, partial(copy_tokenizer, untied))
    return folder


def test_the_inflated_model_writes_the_same_and_the_control_does_not(
    bench: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = importlib.import_module("shapes")
    monkeypatch.setitem(shapes.LLAMA_SHAPES, "small", SHAPE)
    path = tmp_path / "found.json"
    with pytest.raises(SystemExit, match="missed:\ninflated to small, temperature 1"):
        # No factor of this shape is a power of two, so the last bits differ.
        bench.main(["--model", str(model), *SMALL, "--tolerance", "0", "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["temperature"]) for row in rows] == [
        (case, temperature) for temperature in (1.0, 0.0) for case in ("inflated", "control: eps unchanged")
    ]
    for found, control in zip(rows[::2], rows[1::2], strict=True):
        assert found["equal_texts"] == found["texts"] == 4 and found["compared_tokens"] == found["tokens"] == 32
        assert found["largest_difference"] < 1e-4 < control["largest_difference"] and not found["splits"]


def rollout(token_ids: list[int], logprobs: list[float]) -> Rollout:
    return Rollout(0, 0, 0, token_ids, logprobs, "", "length")


def test_texts_are_compared_up_to_where_they_part(bench: Any) -> None:
    original = [rollout([1, 2, 3], [-1.0, -2.0, -3.0]), rollout([4, 5, 6], [-1.0, -1.0, -1.0])]
    inflated = [rollout([1, 2, 3], [-1.0, -2.0, -3.5]), rollout([4, 9], [-1.25, -7.0])]
    row = bench.compare_texts(original, inflated)
    assert (row["texts"], row["equal_texts"], row["tokens"], row["compared_tokens"]) == (2, 1, 6, 4)
    assert (row["equal_bits"], row["largest_difference"], row["mean_difference"]) == (2, 0.5, 0.1875)
    assert [(s["position"], s["tokens"], s["logprobs"]) for s in row["splits"]] == [(1, [[5], [9]], [[-1.0], [-7.0]])]
    shorter = bench.compare_texts([rollout([1, 2], [-1.0, -2.0])], [rollout([1], [-1.0])])
    assert shorter["equal_texts"] == 0 and shorter["splits"][0]["tokens"] == [[2], []]


@pytest.mark.parametrize(
    ("case", "equal_texts", "difference", "is_missed"),
    [
        ("inflated", 4, 1e-5, False),
        ("inflated", 4, 1e-3, True),
        ("inflated", 3, 1e-5, True),
        ("control: eps unchanged", 4, 1e-3, False),
        ("control: eps unchanged", 3, 1e-5, False),
        ("control: eps unchanged", 4, 1e-5, True),
    ],
)
def test_what_misses_the_bar_is_named(
    bench: Any, case: str, equal_texts: int, difference: float, is_missed: bool
) -> None:
    row = {"case": case, "shape": "1.7b", "temperature": 0.0, "texts": 4, "equal_texts": equal_texts}
    row |= {"largest_difference": difference, "mean_difference": 0.0, "equal_bits": 0, "compared_tokens": 9}
    found = bench.failures([row], 1e-4)
    assert bool(found) == is_missed and all(case in line for line in found)
