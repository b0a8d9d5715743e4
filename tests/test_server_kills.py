"""A server that is killed while weights change comes back with the old ones or the new ones, and says which."""

from __future__ import annotations

import hashlib
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import running

from paceline.model.checkpoint import copy_tokenizer, load_weights, save_checkpoint
from paceline.model.folder import load_config
from paceline.serving.arrivals import arrival_draw
from paceline.serving.journal import Journal

NUM_KILLS, NUM_FOLDERS = 6, 3


def test_a_journal_remembers_weights_and_starts(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    first = Journal(file)
    assert (first.num_restarts, first.version, first.weight_dir) == (0, 0, None)
    first.begin()
    first.note(12, "step-12")
    second = Journal(file)
    assert (second.num_restarts, second.version, second.weight_dir) == (1, 12, "step-12")
    second.begin()
    second.note(13, None)  # a trainer broadcast these: they are on no disk
    third = Journal(file)
    assert (third.num_restarts, third.version, third.weight_dir) == (2, 0, None)
    for damaged in ("", "[]", '{"starts": -1, "weight_version": 1, "weight_dir": null}', '{"starts": 1}'):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"server\.json"):
            Journal(file)
    assert len({arrival_draw(0, "", 5, 0, restarts) for restarts in range(4)}) == 4, "no noise comes twice"


def sums(folder: Path) -> dict[str, str]:
    weights = load_weights(folder, load_config(folder))
    return {
        name: hashlib.blake2b(weight.contiguous().view(torch.uint8).numpy().data, digest_size=16).hexdigest()
        for name, weight in weights.items()
    }


@pytest.mark.slow
def test_a_kill_leaves_the_old_weights_or_the_new(tiny_model: Path, tmp_path: Path) -> None:
    config, root = load_config(tiny_model), tmp_path / "weights"
    own = {name: weight.clone() for name, weight in load_weights(tiny_model, config).items()}
    for number in range(NUM_FOLDERS):
        generator = torch.Generator().manual_seed(number)
        noisy = {name: w + 1e-2 * torch.randn(w.shape, generator=generator) for name, w in own.items()}
        save_checkpoint(root / f"step-{number}", config, noisy)
        copy_tokenizer(tiny_model, root / f"step-{number}")
    known = {0: sums(tiny_model)}
    options = (f"--weight-root={root}", f"--journal={tmp_path / 'server.json'}", "--engine.kv_tokens=2048")
    chance, texts, outcomes = random.Random(0), list[str](), set[bool]()
    answered, version = 0, 0
    for _ in range(NUM_KILLS):
        with running(tiny_model, *options) as server:
            found = server.ask("/weight_info", method="GET").json()["weight_version"]
            assert answered <= found <= version, "what was answered stays; what was asked for may have come"
            outcomes.add(found == version)
            assert server.answer("/weight_checker", action="checksum")["checksums"] == known[found]
            texts.append(server.answer("/v1/completions", prompt="abc", max_tokens=12)["choices"][0]["text"])
            answered = found
            end = time.monotonic() + chance.uniform(0.0, 0.25)

            def update() -> None:
                nonlocal answered, version
                while True:
                    version += 1
                    folder = f"step-{chance.randrange(NUM_FOLDERS)}"
                    known[version] = sums(root / folder)
                    body: dict[str, Any] = {"weight_dir": folder, "weight_version": version}
                    with suppress(httpx.HTTPError):
                        answered = server.answer("/update_weights", **body)["weight_version"]
                        continue
                    return

            updating = threading.Thread(target=update)
            updating.start()
            time.sleep(max(end - time.monotonic(), 0) + 0.05)
            server.process.send_signal(signal.SIGKILL)
            updating.join()
    assert len(set(texts)) == NUM_KILLS, "requests without a seed never get the noise of an earlier start"
