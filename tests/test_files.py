"""Prompt files are checked to the last line; rollout files lose nothing and end up sorted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.cli.prompts import prepare_prompts, read_prompt_lines
from paceline.core.types import Rollout
from paceline.rollout.engine import Engine
from paceline.rollout.files import PromptLine, RolloutFile, read_prompts, to_line
from paceline.rollout.settings import EngineSettings


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def rollout(prompt: int, sample: int, text: str = "x") -> Rollout:
    return Rollout(prompt, sample, prompt, [1, 2], [-0.1, -1e-9], text, "stop")


def test_text_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    file = write(tmp_path, "p.txt", "\ufefffirst\r\n\n  second \n")
    assert read_prompts(file) == [PromptLine(text="first"), PromptLine(text="  second ")]


def test_jsonl_file_takes_text_ids_and_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    records = [{"prompt": "a\nb", "id": 7}, {"prompt": [3, 4]}, {"messages": chat}]
    file = write(tmp_path, "p.jsonl", "\n".join(json.dumps(record) for record in records))
    assert [line.given for line in read_prompts(file)] == ["a\nb", [3, 4], chat]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('"text"', '"prompt" or "messages"'),
        ("{}", '"prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', '"prompt" or "messages"'),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": []}', "not empty"),
        ('{"prompt": [1, true]}', "token ids"),
        ('{"prompt": [-1]}', "token ids"),
        ('{"prompt": 3}', "token ids"),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": [{"role": "user"}]}', '"messages" must be a list'),
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl, line 3: .*{message}"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a\\udc00"}', r"p\.jsonl, line 3: .*\\udc00, half of a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000, r"p\.jsonl, line 3: .*nests deeper"),
        ('{"prompt": "a", "prompt": "b"}', r"p\.jsonl, line 3: .*key 'prompt' twice"),
        ('{"prompt": NaN}', r"p\.jsonl, line 3: .*NaN, which is not JSON"),
        ('{"prompt": [' + "9" * 5000 + "]}", r"p\.jsonl, line 3: .*more than 4,300 digits"),
        ('{"prompt": "a\0"}', r"p\.jsonl: line 3 holds a NUL"),
    ],
    ids=lambda value: value[:24],
)
def test_a_hostile_line_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def test_prompts_that_never_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.txt")
    (tmp_path / "p.jsonl").symlink_to("/dev/zero")
    for name in ("p.txt", "p.jsonl"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_prompts(tmp_path / name)


def test_a_prompt_that_the_model_cannot_take_is_named_by_its_line(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64))
    for line, message in (
        (json.dumps({"prompt": "a" * 5000}), "has 5000 tokens and leaves no room in the context of 4096"),
        ('{"prompt": [6000]}', "token id 6000 is outside the vocabulary of 320 ids"),
        ('{"messages": [{"role": "user", "content": 3}]}', "the chat template of .* refuses these messages: TypeError"),
    ):
        lines = read_prompt_lines(None, write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n' + line))
        with pytest.raises(ValueError, match=rf"p\.jsonl, line 2:? {message}"):
            prepare_prompts(engine, False, lines)
    with pytest.raises(ValueError, match="prompt 2 on the command line is not UTF-8 text"):
        read_prompt_lines(["fine", "\udcff"], None)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p\.csv: prompts come from a \.txt"):
        read_prompts(write(tmp_path, "p.csv", "a"))
    with pytest.raises(ValueError, match=r"p\.txt holds no prompt"):
        read_prompts(write(tmp_path, "p.txt", "\n \n"))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8"):
        read_prompts(tmp_path / "b.txt")


def test_rollout_file_is_sorted_and_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    with RolloutFile(out, [PromptLine(text="a"), PromptLine(token_ids=[5])]) as file:
        for prompt, sample in [(1, 1), (0, 1), (1, 0), (0, 0)]:
            file.write(rollout(prompt, sample, "é\n\u2028\ud800"))
            assert len(file.partial.read_bytes().splitlines()) == file.num_written
    records = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert [(r["prompt_index"], r["sample_index"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [r["prompt"] for r in records] == ["a", "a", [5], [5]]
    assert all(r["text"] == "é\n\u2028\ud800" and r["logprobs"] == [-0.1, -1e-9] for r in records)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_interrupted_run_keeps_what_it_has_and_the_old_file(tmp_path: Path) -> None:
    out = write(tmp_path, "out.jsonl", "old\n")
    with pytest.raises(KeyboardInterrupt), RolloutFile(out, [PromptLine(text="a")]) as file:
        file.write(rollout(0, 0))
        raise KeyboardInterrupt
    assert out.read_text() == "old\n"
    assert file.partial.read_text() == to_line(rollout(0, 0), PromptLine(text="a")) + "\n"
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial is left from an interrupted run"), file:
        pass
    assert file.partial.exists()


def test_run_that_fails_before_its_first_rollout_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RolloutFile(tmp_path / "out.jsonl", []):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_folder_as_output_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"), RolloutFile(tmp_path, []):
        pass
    assert not list(tmp_path.parent.glob("*.partial"))
