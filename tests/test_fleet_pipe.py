"""A worker in a child process: it holds nobody up, says why it ended, and its weights leave nothing behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from paceline.fleet.commands import Preempt
from paceline.fleet.reports import Lost
from paceline.fleet.transport.pipe import CHILD, ChildCrew, FileStore
from paceline.fleet.transport.weights import WeightsError, assemble, put_all
from paceline.fleet.transport.wire import Parcel

LONG = Parcel(bytes(2**24), None)
"""More than a pipe holds."""


def test_a_child_that_stands_still_holds_nobody_up() -> None:
    with closing(ChildCrew("nowhere:make", None, patience_s=0.2)) as crew:
        crew.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        crew.send(CHILD, Preempt(CHILD), LONG)
        assert crew.collect(10) == [(CHILD, Lost("its process ended with exit code -9"))]
        assert time.monotonic() - start < 5
        assert not crew.may_come and crew.collect(10) == []
        crew.send(CHILD, Preempt(CHILD))  # nobody is there to hear it


@pytest.mark.slow
def test_a_child_says_why_it_ended() -> None:
    with closing(ChildCrew("nowhere:make", None, patience_s=10.0)) as crew:
        [(number, event)] = crew.collect(60)
    assert number == CHILD and isinstance(event, Lost)
    assert event.reason.startswith("ModuleNotFoundError: No module named 'nowhere'")


@pytest.mark.parametrize("has_memfd", [True, False])
def test_weights_in_files_arrive_and_go_with_their_package(
    has_memfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not has_memfd:  # on macOS
        monkeypatch.delattr(os, "memfd_create", raising=False)
    weights = {"a": torch.randn(30, 7).bfloat16(), "b": torch.ones(()), "c": torch.zeros(0, 4)}
    with closing(FileStore()) as store:
        package = put_all(store, 3, weights, chunk_bytes=100)
        refs = pickle.loads(pickle.dumps(package.refs))
        found = assemble(package.manifest, FileStore().get(refs, 1.0))
        assert len(refs) == 2
        del package
        gc.collect()
        # Whoever has them open keeps them.
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        with pytest.raises(WeightsError, match="chunks are lost"):
            store.get(refs, 1.0)
        later = put_all(store, 4, weights, chunk_bytes=100)  # in the same descriptors
        with pytest.raises(WeightsError, match="chunks are lost"):
            store.get(refs, 1.0)
        assert len(later.refs) == 2
    assert not any(tmp_path.iterdir())
