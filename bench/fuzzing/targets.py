"""What is attacked: every function that reads a file which somebody else may have written.

A target reads the case in the working folder as a command would, and returns or raises. It imports what it needs when
it is called, so that a list of targets costs nothing. `runs_code`: a run of this command imports the code that its
settings name, by design; the others must never do so.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RUN = Path("spot")
OTHER_RUN = Path("plain")
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control codes, marks that turn the direction of text, lone surrogates."""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello é"}]


@dataclass(frozen=True)
class Target:
    """`call` reads the case; `share` is how often it is chosen among the readers of a document."""

    call: Callable[[], Any]
    share: float = 1.0
    runs_code: bool = False
    refuses: bool = True
    """Whether it must refuse what is ambiguous; a report shows what it can."""
    needs: tuple[str, ...] = ("model/", "recipe", "warmup", "arguments", "prompts", "data", "reward", "evil")
    """Beginnings of the paths it reads."""


# --- models -----------------------------------------------------------------------------------------------------------


def model_config(folder: str = "model") -> None:
    from paceline.model.folder import load_config

    config = load_config(Path(folder))
    assert config.num_parameters > 0 and hash(config.eos_token_ids) is not None


def model_weights(folder: str = "model") -> None:
    from paceline.model.checkpoint import load_weights
    from paceline.model.folder import load_config

    weights = load_weights(Path(folder), load_config(Path(folder)))
    assert all(weight.numel() for weight in weights.values())


def sharded() -> None:
    model_weights("sharded")


def policy() -> None:
    from paceline.model.policy import Policy

    Policy.load("model")


def tokenizer() -> None:
    from paceline.model.tokenizer import Tokenizer

    found = Tokenizer.from_folder(Path("model"))
    if found is not None:
        text = found.decode(found.encode("Once upon a time, 3 + 4 = é\n"))
        assert isinstance(text, str) and (found.eos_token_id is None or found.eos_token_id >= 0)
        found.encode_chat(CHAT)


def generate() -> None:
    _engine("model").generate(["Once upon"], _sampling())


def _engine(folder: str, drafter: str | None = None) -> Any:
    from paceline.rollout.engine import Engine
    from paceline.rollout.settings import EngineSettings

    return Engine.from_pretrained(folder, drafter=drafter, settings=EngineSettings(kv_tokens=2048, max_sequences=4))


def _sampling() -> Any:
    from paceline.core.types import Sampling

    return Sampling(max_new_tokens=2, n=1)


# --- settings ---------------------------------------------------------------------------------------------------------


def recipe() -> Any:
    from paceline.core.config import load
    from paceline.run.recipes import prepare
    from paceline.run.settings import RootSettings

    return prepare(load(RootSettings, Path("recipe.yaml")))


def sample() -> None:
    """As `paceline generate --config`, for a few tokens, with the default drafter."""
    from paceline.core.config import load
    from paceline.run.settings import RootSettings

    sampling = load(RootSettings, Path("sampling.yaml")).sampling.build()
    _engine("model", "suffix").generate(["Once upon"] * 2, replace(sampling, max_new_tokens=6, n=1))


def plan() -> None:
    from paceline.run.parts import load_policy, open_engine

    settings = recipe()
    open_engine(settings, load_policy(settings, settings.model.path)).memory_plan()


def warmup_recipe() -> None:
    from paceline.core.config import load
    from paceline.warmup.settings import WarmupSettings

    load(WarmupSettings, Path("warmup.yaml"))


def overrides() -> None:
    from paceline.cli.overrides import load_settings, split_overrides
    from paceline.run.recipes import prepare

    try:
        arguments = json.loads(Path("arguments.json").read_text())
    except (ValueError, OSError, RecursionError):
        return  # no shell passes that on
    given = arguments if isinstance(arguments, list) else []
    passed = [text for text in given if isinstance(text, str) and "\0" not in text]
    _, found = split_overrides(passed)
    prepare(load_settings(found, None, None))


def run_settings() -> None:
    from paceline.run.recipes import prepare, resumed_settings

    prepare(resumed_settings(RUN, {"run.dir": str(RUN)}))


# --- data and prompts -------------------------------------------------------------------------------------------------


def data() -> None:
    _questions("data.jsonl")


def data_csv() -> None:
    _questions("data.csv")


def chats() -> None:
    _questions("data-chats.jsonl")


def verl() -> None:
    _questions("data-verl")


def _questions(place: str) -> None:
    from paceline.model.policy import Policy
    from paceline.run.prompts import PromptSource
    from paceline.tasks.settings import TaskSettings

    loaded = Policy.load("model")
    settings = TaskSettings(name="file", data=place, reward="reward.py:reward")
    assert loaded.tokenizer is not None
    source = PromptSource(settings, loaded.tokenizer, False, loaded.decoder.config.max_context)
    for draw in range(30):
        source.question(1, draw)
    source.test_questions(4)


def prompts(file: str = "prompts.jsonl", is_chat: bool = False) -> None:
    from paceline.cli.prompts import prepare_prompts, read_prompt_lines
    from paceline.rollout.files import to_line

    lines = read_prompt_lines(None, Path(file))
    engine = _engine("model")
    for rollout in engine.generate(prepare_prompts(engine, is_chat, lines[:50]), _sampling()):
        json.loads(to_line(rollout, lines[rollout.prompt_index]))


def prompts_as_chats() -> None:
    prompts(is_chat=True)


def prompts_text() -> None:
    prompts("prompts.txt")


# --- runs -------------------------------------------------------------------------------------------------------------


def report() -> None:
    from paceline.report.writing import write_report

    for file in write_report(RUN):
        check_shown(file)


def report_elsewhere() -> None:
    """As the command, which prints where the files are."""
    from paceline.cli import main

    with printing():
        main(["report", str(RUN.absolute()), "--out", "shown", "--debug"])
    for name in ("report.html", "trace.json"):
        check_shown(Path("shown", name))


def compare_reports() -> None:
    from paceline.report.writing import write_comparison

    files, _ = write_comparison(RUN, OTHER_RUN, Path("shown"))
    check_shown(files[0])


@contextmanager
def printing() -> Iterator[None]:
    """Output as a pipe takes it: strict UTF-8. `main` ends with exit code 0."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except SystemExit as error:
            assert not error.code, f"exit code {error.code}"
        out.flush()


def check_shown(file: Path) -> None:
    """A page runs only our scripts and shows no invisible character; data and traces are JSON for any parser."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        json.loads(text, parse_constant=_refuse_constant)
        return
    assert text.count("<script") == 3 == text.count("</script>"), "the page holds a script of its own"
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    for shown in _texts_in(json.loads(block[1], parse_constant=_refuse_constant)):
        hidden = HIDDEN.search(shown)
        assert hidden is None, f"the page shows an invisible character, {hidden[0]!r}"


def _texts_in(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts_in(item)
        case dict():
            for key, item in value.items():
                yield from (key, *_texts_in(item))


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def run_folder() -> None:
    from paceline.run.store.folder import RunFolder, read_metrics

    with RunFolder.open(RUN) as folder:
        folder.update_config(folder.read_config())
        folder.elapsed_s()
        read_metrics(RUN)
        folder.cut_after(2)


def checkpoint() -> None:
    from paceline.run.store.checkpoints import Checkpoints

    Checkpoints(RUN / "checkpoints", keep=2).load()


def resume() -> None:
    """The whole way of `paceline train --resume`, without the processes of the graders."""
    from unittest import mock

    from rich.console import Console

    from paceline.run import open as opening
    from paceline.run.recipes import prepare, resumed_settings
    from paceline.run.ui.display import Display

    settings = prepare(resumed_settings(RUN, {"run.dir": str(RUN)}))
    if settings.fleet.is_many or settings.run.ahead_worker or settings.model.device != "cpu":
        return  # starts other processes
    display = Display(1, Console(quiet=True))
    no_grader = mock.patch.object(opening, "Grader", lambda *_, **__: contextlib.nullcontext())
    with no_grader, opening.open_run(settings, settings.model.path, RUN, display, True):
        pass


def evaluate() -> None:
    from paceline.core.config import load
    from paceline.run.parts import load_policy, open_prompt_source
    from paceline.run.recipes import config_of, newest_policy, prepare
    from paceline.run.settings import RootSettings

    settings = prepare(load(RootSettings, config_of(RUN)))
    if settings.model.device == "cpu":
        open_prompt_source(settings, load_policy(settings, str(newest_policy(RUN)))).test_questions(4)


def export_policy() -> None:
    from paceline.integrations import export

    export.export_policy(RUN, Path("exported"))


def export_drafter() -> None:
    from paceline.integrations import export

    export.export_drafter(export.find_drafter(RUN), Path("exported-eagle3"))


def drafter() -> None:
    from paceline.spot.checkpoints import DrafterCheckpoints

    found = DrafterCheckpoints(RUN / "drafter").load(2)
    assert found is None or all(type(count) is int for count in found.counts.values())


def drafter_log() -> None:
    from paceline.spot.log import LOG, MicroLog

    MicroLog(RUN / "drafter" / LOG).cut_after(8)


def learned_optimizer() -> None:
    from paceline.rl.celo2_network import load_network

    network = load_network(Path("celo2.safetensors"))
    assert all(bool(tensor.isfinite().all()) for tensor in vars(network).values())


IN_RUN = ("spot/", "model/", "data.jsonl", "reward", "evil")
TARGETS = {
    "model_config": Target(model_config),
    "model_weights": Target(model_weights),
    "sharded": Target(sharded, needs=("sharded/",)),
    "policy": Target(policy),
    "tokenizer": Target(tokenizer),
    "generate": Target(generate, 0.4),
    "recipe": Target(recipe, runs_code=True),
    "sample": Target(sample, needs=("model/", "sampling")),
    "plan": Target(plan, 0.3, runs_code=True),
    "warmup_recipe": Target(warmup_recipe),
    "overrides": Target(overrides, runs_code=True),
    "run_settings": Target(run_settings, runs_code=True, needs=IN_RUN),
    "data": Target(data),
    "data_csv": Target(data_csv),
    "chats": Target(chats),
    "verl": Target(verl),
    "prompts": Target(prompts),
    "prompts_as_chats": Target(prompts_as_chats),
    "prompts_text": Target(prompts_text),
    "report": Target(report, 2, refuses=False, needs=IN_RUN),
    "report_elsewhere": Target(report_elsewhere, 0.5, refuses=False, needs=IN_RUN),
    "compare_reports": Target(compare_reports, 0.5, refuses=False, needs=(*IN_RUN, "plain/")),
    "run_folder": Target(run_folder, needs=IN_RUN),
    "checkpoint": Target(checkpoint, needs=IN_RUN),
    "resume": Target(resume, 0.4, runs_code=True, needs=IN_RUN),
    "evaluate": Target(evaluate, 0.6, runs_code=True, needs=IN_RUN),
    "export_policy": Target(export_policy, 0.5, needs=IN_RUN),
    "export_drafter": Target(export_drafter, needs=IN_RUN),
    "drafter": Target(drafter, needs=IN_RUN),
    "drafter_log": Target(drafter_log, needs=IN_RUN),
    "learned_optimizer": Target(learned_optimizer, 0.5, needs=("celo2",)),
}
