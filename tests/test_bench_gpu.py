"""The GPU benchmarks without a GPU: the shapes are those of the models they are named after, the commands parse."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

BENCH = Path(__file__).resolve().parent.parent / "bench"
PARAMETERS = {"0.6b": 596e6, "1.7b": 1.72e9, "7b": 7.62e9}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Imports a module of the bench folder, which is no package, by its name."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_parameters_of_their_names(bench: Any, name: str) -> None:
    config = bench("shapes").model_config(name)
    assert config.num_parameters == pytest.approx(PARAMETERS[name], rel=0.005)


def test_floor_leaves_out_only_an_untied_input_embedding(bench: Any) -> None:
    shapes = bench("shapes")
    assert shapes.floor_bytes(shapes.model_config("7b")) == pytest.approx(14.1e9, rel=0.01)
    small = shapes.model_config("0.6b")
    assert shapes.floor_bytes(small) == 2 * small.num_parameters


@pytest.mark.parametrize("name", [*PARAMETERS, "tiny"])
def test_transformers_makes_the_same_model_of_a_shape(bench: Any, name: str) -> None:
    from transformers import AutoModelForCausalLM

    shapes = bench("shapes")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.transformers_config(name))
    theirs = {key: tuple(weight.shape) for key, weight in model.named_parameters()}
    assert theirs == shapes.model_config(name).weight_shapes()


def test_random_weights_fit_the_config_and_repeat(bench: Any) -> None:
    shapes = bench("shapes")
    config = shapes.model_config("tiny")
    weights, again = (shapes.random_weights(config, "cpu", seed=1) for _ in range(2))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == config.weight_shapes()
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())


@pytest.mark.parametrize("script", ["gpu", "rows"])
def test_help_is_there(bench: Any, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(script).parse(["--help"])
    assert ended.value.code == 0 and "--commit" in capsys.readouterr().out


def test_parts_are_chosen_by_name_or_kind(bench: Any) -> None:
    gpu = bench("gpu")
    assert gpu.parse(["--parts", "step,exact:7b"]).parts == ["step:0.6b", "step:7b", "exact:7b"]
    assert gpu.parse([]).parts == list(gpu.PARTS)
    with pytest.raises(SystemExit):
        gpu.parse(["--parts", "nothing"])


def test_changed_texts_differ_where_they_should(bench: Any) -> None:
    equality = bench("gpu_equality")
    texts = {(0, 0): list(range(200)), (1, 3): [5] * 200}
    assert equality.changed(texts, 0, 300) == texts
    for key, text in equality.changed(texts, 100, 300).items():
        assert all(a != b and 0 <= b < 300 for a, b in zip(texts[key], text, strict=True))
