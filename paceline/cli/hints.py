"""What a command line that does not parse was meant to say: other tools' commands, and options that are settings here.

`main` asks before typer parses, whose own message would only say that there is no such thing. Nothing here imports
more than the settings' classes, and those only for a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from paceline.core.documents import brief, plain

if TYPE_CHECKING:
    from paceline.core.config import Settings

GENERATE = '`paceline generate "PROMPT" --model PATH` writes rollouts of prompts'
TRAIN = "`paceline train RECIPE` trains with reinforcement learning"
OTHER_COMMANDS = {
    "run": f"{TRAIN}; `paceline train --resume --run.dir=FOLDER` continues a run",
    "chat": f"there is no chat; {GENERATE}, and --model.chat=true makes a user's turn of each",
    "rollout": GENERATE,
    "sample": GENERATE,
    "infer": GENERATE,
    "inference": GENERATE,
    "predict": GENERATE,
    "evaluate": "`paceline eval RUN` evaluates a run's newest checkpoint, or --model PATH",
    "test": "`paceline eval RUN` evaluates a model, `paceline doctor` tests this machine",
    "bench": "`paceline compare` times speculation off and on",
    "benchmark": "`paceline compare` times speculation off and on",
    "resume": "`paceline train --resume --run.dir=FOLDER` continues a run",
    "continue": "`paceline train --resume --run.dir=FOLDER` continues a run",
    "demo": "`paceline train` without a recipe is the demo",
    "finetune": TRAIN,
    "rl": TRAIN,
    "grpo": f"{TRAIN}, with grpo unless --rl.algorithm says otherwise",
    "sft": "`paceline warmup FOLDER` trains a small model on a task's solutions; there is no fine-tuning on your own",
    "pretrain": "`paceline warmup FOLDER` trains a small model from scratch",
    "export": "`paceline export-policy RUN OUT` and `paceline export-drafter RUN OUT` export a run",
    "config": "`paceline settings` lists the settings",
    "options": "`paceline settings` lists the settings",
    "recipes": "`paceline train --help` lists the recipes",
    "task": "`paceline tasks` lists the tasks",
    "show": "`paceline report RUN` shows a run as a page",
    "view": "`paceline report RUN` shows a run as a page",
    "plot": "`paceline report RUN` shows a run as a page",
    "info": "`paceline doctor` shows what this machine has",
    "version": "`paceline --version` prints the version",
    "help": "`paceline --help` lists the commands, `paceline COMMAND --help` one command's options",
}
"""Words that a user may try, and what there is instead."""

OTHER_NAMES = {
    "learning_rate": "rl.lr",
    "max_steps": "rl.steps",
    "num_steps": "rl.steps",
    "iterations": "rl.steps",
    "batch_size": "rl.prompts_per_step",
    "train_batch_size": "rl.prompts_per_step",
    "per_device_train_batch_size": "rl.prompts_per_step",
    "num_generations": "rl.group_size",
    "rollout_n": "rl.group_size",
    "num_iterations": "rl.epochs",
    "beta": "rl.kl_coef",
    "kl": "rl.kl_coef",
    "epsilon": "rl.clip_high",
    "clip_range": "rl.clip_high",
    "algo": "rl.algorithm",
    "loss_type": "rl.algorithm",
    "optim": "rl.optimizer",
    "lr_scheduler_type": "rl.schedule",
    "warmup": "rl.warmup_steps",
    "gradient_checkpointing": "rl.checkpoint_activations",
    "lora_rank": "rl.lora.rank",
    "lora_r": "rl.lora.rank",
    "lora_alpha": "rl.lora.alpha",
    "lora_target_modules": "rl.lora.targets",
    "target_modules": "rl.lora.targets",
    "use_peft": "rl.lora.rank",
    "output_dir": "run.dir",
    "output": "run.dir",
    "run_name": "run.dir",
    "save_steps": "run.checkpoint_every",
    "save_every": "run.checkpoint_every",
    "save_total_limit": "run.keep",
    "eval_steps": "eval.every",
    "eval_every": "eval.every",
    "report_to": "run.loggers",
    "logger": "run.loggers",
    "wandb": "run.loggers",
    "dataset": "task.data",
    "dataset_name": "task.data",
    "train_file": "task.data",
    "reward_funcs": "task.reward",
    "reward_fn": "task.reward",
    "task": "task.name",
    "difficulty": "task.level",
    "gpu": "model.device",
    "cuda": "model.device",
    "dtype": "engine.precision",
    "bf16": "engine.precision",
    "speculative": "engine.drafter",
    "batch": "engine.max_sequences",
    "max_num_seqs": "engine.max_sequences",
    "num_workers": "fleet.workers",
    "num_gpus": "fleet.workers",
    "max_tokens": "sampling.max_new_tokens",
    "max_length": "sampling.max_new_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "num_samples": "sampling.n",
    "num_return_sequences": "sampling.n",
    "temp": "sampling.temperature",
    "chat_template": "model.chat",
}
"""What the field calls some settings."""
_LENGTH = (
    "a run's length is a number of steps, --rl.steps=N, each with rl.prompts_per_step prompts (--rl.epochs sets the "
    "optimizer steps per batch)"
)
OTHER_OPTIONS = {
    "train": {
        **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _LENGTH),
        "config": "the file is an argument: paceline train {value}",
        "recipe": "the recipe is an argument: paceline train {value}",
        "model_name": "write --model {value}",
        "model_name_or_path": "write --model {value}",
        "resume_from_checkpoint": "write --resume --run.dir=FOLDER, the folder of the run",
    },
    "generate": {"prompt": "prompts are arguments: paceline generate {value!r}", "output": "write --out FILE.jsonl"},
    "eval": {"checkpoint": "the run's folder is an argument: paceline eval RUN"},
    "warmup": {"config": "write --recipe {value}", "output_dir": "the folder is an argument: paceline warmup {value}"},
}
"""Options of other tools whose counterpart here is no setting."""
SECTIONS = {
    "train": ("rl", "run", "task", "sampling", "model", "engine", "eval", "spot", "fleet", "budget"),
    "eval": ("eval", "sampling", "task", "model", "engine", "budget"),
    "generate": ("sampling", "engine", "model", "budget"),
    "compare": ("sampling", "engine", "model", "budget"),
    "doctor": ("model", "engine"),
    "warmup": ("train", "data", "model", "check"),
}
"""Whose settings a command reads, those first that an option most likely means."""
TAKES_TEXT = ("generate", "compare")
"""Commands whose arguments may be any text."""

_SETTING = re.compile(r"(?P<key>[a-z_]+(\.\w+)+)=(?P<value>.*)", re.DOTALL)


def check_command(words: Sequence[str], commands: Sequence[str]) -> str | None:
    """The command that a command line names; None if it names none, and a ValueError if there is no such command."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None or name in commands:
        return name
    from paceline.core.config import nearest

    guess = nearest(name.lower(), commands)
    default = f"did you mean {guess}?" if guess else f"there are {', '.join(commands)}"
    raise ValueError(f"no command {brief(name)}: {OTHER_COMMANDS.get(name.lower(), default)}")


def check_options(command: str, words: Sequence[str], known: Collection[str]) -> None:
    """Raise a ValueError for an unknown option that is a setting under a name of its own; typer refuses all others."""
    sections = SECTIONS.get(command, ())
    for place, word in enumerate(words):
        if word == "--" or not sections:
            return
        setting = _SETTING.fullmatch(word)
        if setting is not None and command not in TAKES_TEXT and setting["key"].partition(".")[0] in sections:
            raise ValueError(f"write a setting with two dashes: --{plain(word, 400)}")
        option, _, value = word.partition("=")
        if not word.startswith("--") or option in known:
            continue
        following = words[place + 1 : place + 2]
        if not value and following and not following[0].startswith("--"):
            value = following[0]
        _suggest(command, option, value, known)


def _suggest(command: str, option: str, value: str, known: Collection[str]) -> None:
    """Raise a ValueError that names the setting, if there is one."""
    from paceline.core.config import fields_of, nearest

    if _plain_name(option) in OTHER_OPTIONS.get(command, {}):
        instead = OTHER_OPTIONS[command][_plain_name(option)]
        raise ValueError(f"there is no option {plain(option)}: {instead.format(value=plain(value, 400) or 'VALUE')}")
    if nearest(option, sorted(known)):
        return
    root = settings_of(command)
    keys = find_keys(option, root, SECTIONS[command])
    if not keys:
        return
    what, *_ = re.split(r"[.;:] ", dict(fields_of(root))[keys[0]].description or "")
    others = f"; or --{', --'.join(keys[1:])}" if keys[1:] else ""
    setting = f"--{keys[0]}={plain(value, 400) or 'VALUE'}"
    raise ValueError(f"there is no option {plain(option)}; the setting is {setting} ({what.rstrip('.')}){others}")


def settings_of(command: str) -> type[Settings]:
    """The settings that a command reads."""
    if command == "warmup":
        from paceline.warmup.settings import WarmupSettings

        return WarmupSettings
    from paceline.run.settings import RootSettings

    return RootSettings


def find_keys(name: str, root: type[Settings], sections: Sequence[str]) -> list[str]:
    """The settings that a short or foreign name means, the likeliest first; empty if none is close."""
    from paceline.core.config import fields_of, nearest

    keys = [key for key, _ in fields_of(root) if key.partition(".")[0] in sections]
    wanted = _plain_name(name)
    other = OTHER_NAMES.get(wanted)
    if other in keys:
        return [other]
    last = other.rpartition(".")[2] if other else wanted
    found = [key for key in keys if key.rpartition(".")[2] == last]
    if found:
        return sorted(found, key=lambda key: sections.index(key.partition(".")[0]))
    guess = nearest(wanted, [*(key.rpartition(".")[2] for key in keys), *OTHER_NAMES])
    return find_keys(guess, root, sections) if guess not in (None, wanted) else []


def _plain_name(option: str) -> str:
    return option.lstrip("-").lower().replace("-", "_")
