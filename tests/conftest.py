"""What every test shares: one torch thread, a bounded hypothesis profile, and tiny random models made once."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from leftovers import MARK

torch.set_num_threads(1)

# No deadline: the first example of a test may compile kernels. Derandomized: a red test stays red when run again.
settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("paceline")


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark that every process started during the test inherits, wherever it hides; `leftovers.tagged` finds them."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny random Qwen3 and a byte tokenizer; read it, never write to it."""
    from paceline.model.random_model import make_random_model

    return make_random_model(tmp_path_factory.mktemp("tiny"), size="tiny")
