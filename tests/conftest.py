"""What every test shares: one torch thread, a bounded hypothesis profile, no cache of the user, and a tiny model."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
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


@pytest.fixture(scope="session", autouse=True)
def no_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test's run recalls what another's learned, nor writes to the user's cache: what is called `paceline` here is
    no folder. Compiled kernels stay where they are."""
    place = tmp_path_factory.mktemp("cache")
    (place / "paceline").touch()
    own = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR") or own)
        patched.setenv("XDG_CACHE_HOME", str(place))
        yield


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


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that shows tools as Qwen's does."""
    from server_process import CHAT_TEMPLATE

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
