"""The bench of the drafter: its noise is that of the rollouts, its accept lengths are those of drafting by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.model.formulas import rms_norm

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The script as a module; the bench folder is no package."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("spot")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def opened(bench: Any) -> Any:
    args: argparse.Namespace = bench.parse(["--prompts", "4", "--samples", "2", "--tokens", "40", "--at", "3"])
    return bench.open_bench(args)


def test_noise_is_that_of_the_rollouts(bench: Any, opened: Any) -> None:
    """The policy's own logits with this noise give the text; with that of the next position they do not."""
    for known in opened.held_out:
        text = known.text
        first = text.prompt_length - 1
        teacher = opened.teacher
        hidden = rms_norm(text.final[first:], teacher.norm, teacher.eps)
        logits = hidden @ teacher.head.mT
        noise = bench.noise_table(known, opened.eagle.draft_ids, depth=1)
        drawn = (logits + noise[: len(logits)]).argmax(-1)
        assert drawn.tolist() == text.token_ids[first + 1 :].tolist()
        assert ((logits + noise[1 : len(logits) + 1]).argmax(-1) != drawn).any()


@torch.no_grad()
@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_chains_are_drafted_as_by_hand(bench: Any, opened: Any, tau: float) -> None:
    known, eagle, depth = opened.held_out[0], opened.eagle, 2
    noise = bench.noise_table(known, eagle.draft_ids, depth)
    embedding = opened.teacher.embedding.float()
    found = bench.accepted(eagle, embedding, known, noise, tau, depth)
    text = known.text
    ids = torch.from_numpy(text.token_ids.astype(np.int64))
    _, logits = eagle.forward_text(ids, text.taps, embedding)
    for chain, base in enumerate(range(text.prompt_length - 1, len(ids) - 1 - depth)):
        scores = logits[base].log_softmax(-1)
        if tau:
            scores = scores / tau + noise[base + 2 - text.prompt_length]
        assert found[chain, 0].tolist() == (scores.topk(4).indices == ids[base + 2]).tolist()
    assert not (found[:, 1].any(-1) & ~found[:, 0, 0]).any(), (
        "nothing comes behind a guess that is not the first choice"
    )


@pytest.mark.slow
def test_every_part_runs(bench: Any, opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    opened.args.repeats = 8
    rows = [row for measure in bench.PARTS.values() for row in measure(opened)]
    assert {row["part"] for row in rows} == set(bench.PARTS)
    assert all(row["accept_length"] >= 1 for row in rows if row["part"] == "learning")
    assert "packing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_frozen_drafter_learns_no_more_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    evolve = importlib.import_module("evolve")
    small = ("rl.prompts_per_step=4", "rl.group_size=8", "sampling.max_new_tokens=96", "spot.micro_tokens=16")
    sets = [word for pair in small for word in ("--set", pair)]
    args = evolve.parse(["--steps", "3", "--freeze", "1", "--share", "1", *sets])
    rows = {case: evolve.measure(args, case, tmp_path / case) for case in evolve.CASES}
    for key in ("reward", "length"):
        assert [row[key] for row in rows["trained"]] == [row[key] for row in rows["frozen"]]
    versions = [row["version"] for row in rows["frozen"]]
    assert versions[0] == versions[-1] < rows["trained"][-1]["version"]


@pytest.mark.slow
def test_shapes_and_contenders_draft_with_a_drafter_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equality of all rollouts is checked by the benches themselves."""
    monkeypatch.syspath_prepend(str(BENCH))
    strategies, ablation = importlib.import_module("strategies"), importlib.import_module("ablation")
    drafter, found = tmp_path / "drafter", tmp_path / "found.json"
    small = ["--sizes", "2", "--calls", "2", "--depths", "2", "--widths", "1", "3", "--max-new-tokens", "24"]
    trained = ["--micro-steps", "2", "--train-prompts", "4", "--save", str(drafter)]
    strategies.main([*small, *trained, "--repeats", "1", "--out", str(found)])
    rows = json.loads(found.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["bandit", "2x1", "2x3"]
    assert all(row["ratio"] > 0 and row["accept_length"] >= 1 for row in rows)
    given = ["--contenders", "off,eagle-all", "--drafter", str(drafter), "--set", "rl.pack_tokens=256", "--steps", "2"]
    ablation.main([*given, "--prompts", "1", "--samples", "2", "--max-new-tokens", "24", "--out", str(found)])
    assert [line["contender"] for line in json.loads(found.read_text())["summary"]] == ["off", "eagle-all"]
