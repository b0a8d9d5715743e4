"""The `paceline` command. Parses, calls one library function per command, prints.

Heavy imports happen inside the commands, so that `--help` answers before torch is loaded. Settings come as dotted
overrides (`--engine.drafter=none`) taken out of the command line before typer sees it; what typer does not know after
that is an error, never ignored. A ValueError of the library is the user's to mend: one line on stderr, exit code 2.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

if TYPE_CHECKING:
    from paceline.doctor import Finding
    from paceline.model.random_model import RandomSize
    from paceline.rollout.compare import Comparison, Mode
    from paceline.rollout.engine import Engine
    from paceline.rollout.files import PromptLine
    from paceline.run.settings import RootSettings
    from paceline.warmup.train import WarmupProgress

T = TypeVar("T")

_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Every command: --section.key=value sets a setting (docs/commands.md lists them); --debug shows tracebacks.",
)

# What `paceline compare` does when nothing is asked for.
DEMO_SETTINGS = {"sampling.n": "4", "sampling.max_new_tokens": "128", "sampling.temperature": "0.6"}
DEMO_PROMPTS = (
    "A train leaves at noon and",
    "The sum of 17 and 25 is",
    "def fibonacci(n):",
    "Once upon a time, a small",
    "The capital of France is",
    "To solve x + 3 = 10, first",
    "Riders take turns in front because",
    "1, 1, 2, 3, 5, 8,",
)

MODEL_HELP = (
    "A Hugging Face folder or hub id; shipped:NAME, a model that comes with the package (there is shipped:countdown); "
    "random:SIZE, random weights made on the spot (tiny, 5m or 50m)."
)
PromptsArgument = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts as text.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help=MODEL_HELP, show_default="random:5m"),
]
TrainedOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help=MODEL_HELP, show_default="the recipe's"),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.yaml", exists=True, dir_okay=False, help="Settings.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="FILE", exists=True, dir_okay=False, help="A .txt (one prompt per line) or .jsonl file."
    ),
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an exported folder that is there.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `paceline` script."""
    args = list(sys.argv[1:] if argv is None else argv)
    options = args[: args.index("--")] if "--" in args else args
    is_debug = "--debug" in options
    if is_debug:
        args.remove("--debug")
    try:
        rest, overrides = split_overrides(args)
        app(rest, prog_name="paceline", obj=overrides)
    except (ValueError, OSError, RuntimeError) as error:
        message = str(error)
        if isinstance(error, RuntimeError):
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which must not be imported for `--help`
                raise
            message = (
                "the GPU's memory is full; lower engine.kv_tokens, engine.max_sequences or rl.pack_tokens, or set "
            )
            message += "rl.checkpoint_activations=true"
        if is_debug:
            raise
        print(f"paceline: {message}", file=sys.stderr)
        sys.exit(2)


def split_overrides(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--section.key=value` and `--section.key value` out of a command line; what follows `--` is left alone."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            return [*rest, arg, *queue], overrides
        match = _OVERRIDE.fullmatch(arg)
        if match is None:
            rest.append(arg)
            continue
        key, value = match["key"], match["value"]
        if value is None:
            if not queue or queue[0].startswith("--"):
                raise ValueError(f"--{key} needs a value: --{key}=VALUE")
            value = queue.pop(0)
        if value.startswith("{") and value.endswith(":"):  # or what follows the blank is taken for an argument
            raise ValueError(f"--{key}={value} ends at a blank; put it in quotes: --{key}='{value} VALUE}}'")
        if overrides.setdefault(key, value) != value:
            raise ValueError(f"--{key} is given twice: {overrides[key]!r} and {value!r}; keep one")
    return rest, overrides


def _print_version(is_asked: bool) -> None:
    if is_asked:
        import paceline

        print(f"paceline {paceline.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show and exit.")
    ] = False,
) -> None:
    """Rollouts of language models, faster by speculation, without changing one token."""


@app.command()
def generate(
    ctx: typer.Context,
    prompt: PromptsArgument = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Write rollouts here; - is stdout.")
    ] = None,
) -> None:
    """Make rollouts of prompts.

    Without --out their texts are printed. With it each rollout is on disk, as one line of JSON, as soon as it is done.
    """
    settings = _settings(ctx.obj, config, model)
    lines = _prompt_lines(prompt, prompts)
    if not lines:
        raise ValueError('give a prompt (paceline generate "Once upon a time") or a file of them (--prompts FILE)')
    _say_loading(settings)
    with _policy_folder(settings) as folder:
        engine = _open_engine(settings, folder)
        if out is None or str(out) == "-":
            _generate_to_stdout(engine, settings, lines, is_jsonl=out is not None)
        else:
            _generate_to_file(engine, settings, lines, out)


@app.command()
def compare(
    ctx: typer.Context,
    prompt: PromptsArgument = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each side, taken in turns.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here.")] = None,
) -> None:
    """Time speculation off and on, and compare every token.

    Both sides have the same prompts and keys, so every token id and log-probability must be the same; if one is not,
    the first difference is shown and the exit code is 1. Without prompts it takes built-in ones: 4 samples of up to 128
    tokens each at temperature 0.6. Settings such as --sampling.temperature=1 or --engine.drafter=ngram are taken too.
    """
    from paceline.rollout.compare import compare_engines
    from paceline.run.recipes import drafter_of

    lines = _prompt_lines(prompt, prompts)
    settings = _settings({**({} if lines or config else DEMO_SETTINGS), **ctx.obj}, config, model)
    if settings.engine.drafter == "none":
        raise ValueError("engine.drafter is none: there is nothing to compare with, choose ngram or suffix")
    _say_loading(settings)
    with _policy_folder(settings) as folder:
        opened = _open_engine(settings, folder)
        opened.release_memory()  # it lends its weights and nothing else
        result = compare_engines(
            lambda mode: _sibling(opened, settings, mode),
            _prepare(opened, settings, lines or _demo_lines()),
            settings.sampling.build(),
            repeats,
        )
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    _print_comparison(result, drafter_of(settings))
    if result.difference is not None:
        raise typer.Exit(1)


@app.command()
def doctor(ctx: typer.Context, model: ModelOption = None, config: ConfigOption = None) -> None:
    """Show what this machine has and whether exact mode holds.

    Exact mode is tested on the model that is given, at its own shapes. Exit code 1 if it does not hold.
    """
    from paceline.doctor import exactness, machine

    settings = _settings(ctx.obj, config, model)
    _say_loading(settings)
    findings = list(machine())
    with _policy_folder(settings) as folder:
        findings += exactness(folder, settings.model.device, settings.engine.precision)
    _print_findings(findings)
    if any(finding.ok is False for finding in findings):
        print("paceline: exact mode does not hold here for the reasons above", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def train(
    ctx: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A name or a .yaml file.", show_default="countdown-cpu")
    ] = None,
    model: TrainedOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run.dir.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show settings and memory, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and the summary.")] = False,
) -> None:
    """Train a model by reinforcement learning.

    Without a recipe it trains the small model that comes with the package on the task countdown, on this machine. A
    recipe sets everything else; settings such as --rl.lr=1e-5 or --engine.drafter=none are taken too. The run is a
    folder, runs/RECIPE-N, with metrics, texts and checkpoints; a run that was stopped goes on with
    --run.dir=FOLDER --resume, as if it had never been.
    """
    from paceline.run.recipes import describe, prepare
    from paceline.run.ui.display import make_display

    settings, folder = _run_settings(ctx.obj, recipe, model, resume)
    settings = prepare(settings)
    if not quiet:
        _say_loading(settings)
    if dry_run:
        _dry_run(settings, folder)
        return
    with _policy_folder(settings) as path, make_display(settings.rl.steps, is_quiet=quiet) as display:
        display.begin("paceline train", describe(settings, folder))
        display.phase(0, "load")
        try:
            from paceline.run.open import open_run
            from paceline.run.ui.interrupts import Interrupts

            with (
                Interrupts(display.note) as interrupts,
                open_run(settings, path, folder, display, resume, interrupts) as run,
            ):
                display.finish(run.summary(run.train()))
        except KeyboardInterrupt:
            if (folder / "config.yaml").is_file():
                display.note(f"stopped{_saved(folder)}; go on with: paceline train --resume --run.dir={folder}")
            raise


def _saved(folder: Path) -> str:
    """What a run that is stopped has to fall back to."""
    from paceline.run.store.folder import (
        step_of,  # and nothing that loads torch: it may have been stopped while it loaded
    )

    steps = [step_of(path.name) or 0 for path in (folder / "checkpoints").glob("step-*")]
    if not steps:
        return " before the first checkpoint"
    return f", and what was begun after the checkpoint of step {max(steps)} will be made again"


@app.command()
def warmup(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="A name or a .yaml file.")
    ] = "warmup-countdown",
) -> None:
    """Train a small model from nothing on a task's worked solutions.

    What comes out is a Hugging Face folder that `paceline train --model FOLDER` goes on with, and the recipe.yaml that
    made it. It is saved at every check; Ctrl-C keeps what was saved last. The default recipe wants a GPU; settings such
    as --train.device=cpu --model.num_layers=4 --data.batch_tokens=4096 make a smaller one.
    """
    from paceline.core.config import load
    from paceline.run.recipes import find_recipe
    from paceline.warmup.settings import WarmupSettings

    settings = load(WarmupSettings, find_recipe(recipe, is_warmup=True), ctx.obj)
    _warn("making texts to learn from ...")
    from paceline.warmup.train import warm_up

    found = warm_up(settings, out, _print_progress)
    print(f"wrote {out}: solves {found['eval/accuracy']:.1%} of {settings.check.items} held-out items")


@app.command("eval")
def evaluate(
    ctx: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here.")] = None,
) -> None:
    """Measure a model on held-out items of a task.

    A model is given by --model, or by the folder of a run, whose settings are then used. --eval.items, --eval.samples
    and --eval.pass_at say how much is measured.
    """
    from paceline.run.recipes import config_of

    settings = _settings(ctx.obj, config if run is None else config_of(run), model)
    _say_loading(settings, str(run) if model is None and run is not None else None)
    from paceline.run.open import evaluate_model, newest_policy

    chosen = newest_policy(run) if model is None and run is not None else None
    with nullcontext(str(chosen)) if chosen else _policy_folder(settings) as path:
        found = evaluate_model(settings, path, _warn)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    for name, value in found.items():
        print(f"{name:<24} {value:.4g}")


@app.command("export-drafter")
def export_drafter_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or a drafter in it (RUN/drafter/step-N).")
    ],
    out: OutArgument,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    check: Annotated[bool, typer.Option("--check", help="Read it back and compare it with the run's drafter.")] = False,
    force: ForceOption = False,
) -> None:
    """Write a run's newest drafter as vLLM and SGLang load it.

    The layout is EAGLE-3: config.json and model.safetensors; a folder whose name contains eagle3 is recognised. --check
    computes logits from the written files by a second implementation, which knows the format alone, on texts of the
    run, and compares them with those of the run's drafter, both in float32. Exit code 1 if they differ.
    """
    from paceline.integrations.export import export_drafter, find_drafter, step_in

    drafter = find_drafter(run)
    if check:
        drafter.find_policy()  # what it lacks is better said before anything is written
    for note in export_drafter(drafter, out, dtype, force):
        _warn(note)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"wrote {out}: version {drafter.eagle.version} of {step_in(drafter.folder)}, {dtype}, {size:,.1f} MB")
    if not check:
        return
    from paceline.integrations.check import check_drafter

    found = check_drafter(out, drafter)
    print(found)
    if not found.is_good:
        raise typer.Exit(1)


@app.command("export-policy")
def export_policy_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder: its newest checkpoint is taken.")],
    out: OutArgument,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, as the run keeps it, or bfloat16.")] = "float32",
    force: ForceOption = False,
) -> None:
    """Write a run's newest policy as a plain Hugging Face folder.

    Weights, config, generation config, and the tokenizer with its chat template, from the newest checkpoint whose files
    are what was written.
    """
    from paceline.integrations.export import export_policy, step_in

    print(f"wrote {out}: policy of {step_in(export_policy(run, out, dtype, force))}, {dtype}")


@app.command()
def report(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run's folder.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", metavar="A B", help="Two runs side by side.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to.", show_default="the run's folder")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Make it again until the run is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between two looks of --watch.")] = 10.0,
) -> None:
    """Show a run: a page with charts and texts, and a trace.

    Writes report.html, one file that needs no network, and trace.json, which ui.perfetto.dev opens. A run that is still
    going on can be shown too; with --watch the page in the browser follows it.
    """
    from paceline.report import writing

    if (run is None) == (compare is None):
        raise ValueError("give the folder of a run (paceline report runs/NAME) or two of them (--compare A B)")
    if compare is not None:
        if watch:
            raise ValueError("--watch follows one run; leave --compare out")
        files, said = writing.write_comparison(*compare, out)
        print(said)
    elif watch and run is not None:
        with suppress(KeyboardInterrupt):
            writing.watch(run, out, every, print)
        return
    else:
        assert run is not None
        files = writing.write_report(run, out)
    for file in files:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")


@app.command()
def tasks(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show one task: an item, an answer, dials.")
    ] = None,
) -> None:
    """List the tasks, or show one and check that its answers are judged right."""
    from paceline.tasks.registry import OWN, TASKS

    if name is None:
        for each, entry in TASKS.items():
            print(f"{each:<13} {entry.summary}")
        print(f"{'FILE.py:NAME':<13} {OWN.summary}")
        return
    settings = _settings({**ctx.obj, "task.name": name}, None, None)
    _show_task(settings)


def _run_settings(
    overrides: dict[str, str], recipe: str | None, model: str | None, is_resumed: bool
) -> tuple[RootSettings, Path]:
    """The settings of a run and its folder."""
    from paceline.run.recipes import DEFAULT_RECIPE, find_recipe, resumed_settings, run_folder

    if is_resumed:
        if recipe is not None or model is not None:
            raise ValueError("--resume goes on with the run's own recipe and model; leave them out")
        if "run.dir" not in overrides:
            raise ValueError("--resume needs the run's folder: --run.dir=runs/NAME")
        folder = Path(overrides["run.dir"])
        return resumed_settings(folder, overrides), folder
    settings = _settings(overrides, find_recipe(recipe or DEFAULT_RECIPE), model)
    return settings, run_folder(settings, Path(recipe or DEFAULT_RECIPE).stem)


def _dry_run(settings: RootSettings, folder: Path) -> None:
    from paceline.core.config import dump
    from paceline.run.parts import load_policy, open_engine

    print(dump(settings), end="")
    with _policy_folder(settings) as path:
        print(f"# {open_engine(settings, load_policy(settings, path)).memory_plan()}")
    print(f"# the run would be written to {folder}")


def _print_progress(progress: WarmupProgress) -> None:
    """A line per check, and one now and then between them."""
    if progress.check is None and progress.step % 25 and progress.step != 1:
        return
    line = (
        f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s  {progress.seconds_left:,.0f} s left"
    )
    if progress.check is not None:
        line += "".join(f"  {name} {value:.3g}" for name, value in progress.check.items())
    print(line, flush=True)


def _show_task(settings: RootSettings) -> None:
    from paceline.tasks.checks import check
    from paceline.tasks.registry import find_entry, make_task

    task = make_task(settings.task)
    item = _call_task(settings, lambda: task.item(settings.task.seed, 0))
    answer = _call_task(settings, lambda: task.gold(item))
    print(f"item 0\n{item.prompt}\n\nan answer that scores 1\n{answer}\n")
    dials = find_entry(settings.task.name).dials
    for key, field in (dials.model_fields if dials else {}).items():
        print(f"--task.dials.{key}={field.default}  {field.description or ''}")
    report = _call_task(settings, lambda: check(task))
    print(f"checked {report.num_items} items: {'sound' if report.is_sound else 'NOT SOUND'}")
    for problem in report.problems:
        print(f"  {problem}")
    if not report.is_sound:
        raise typer.Exit(1)


def _call_task(settings: RootSettings, call: Callable[[], T]) -> T:
    """What a task returns; where it is the user's own code that raises, the error names it."""
    from paceline.core.plugins import call_own, names_file

    name, reward = settings.task.name, settings.task.reward
    if names_file(name):
        return cast("T", call_own(call, name, "task.name"))
    return call() if reward is None else cast("T", call_own(call, reward, "task.reward"))


def _settings(overrides: Mapping[str, str], config: Path | None, model: str | None) -> RootSettings:
    from paceline.core.config import SettingsError, load
    from paceline.run.settings import RootSettings

    if model is not None and overrides.get("model.path", model) != model:
        raise SettingsError("--model and --model.path name different models; keep one")
    return load(RootSettings, config, {**overrides, **({} if model is None else {"model.path": model})})


def _prompt_lines(texts: Sequence[str] | None, file: Path | None) -> list[PromptLine]:
    """Prompts from the command line or a file, checked before any work starts; none given is an empty list."""
    from paceline.rollout.files import PromptLine, read_prompts

    if texts and file is not None:
        raise ValueError("prompts come as arguments or by --prompts FILE, not both")
    return read_prompts(file) if file is not None else [PromptLine(text=text) for text in texts or ()]


def _demo_lines() -> list[PromptLine]:
    from paceline.rollout.files import PromptLine

    return [PromptLine(text=text) for text in DEMO_PROMPTS]


def _say_loading(settings: RootSettings, name: str | None = None) -> None:
    """What is about to take seconds, said before torch is imported; `name` where it is not the settings' model."""
    from paceline.kernels.cpu.jit import cache_folder

    line = f"loading {name or settings.model.path} ..."
    if settings.model.device == "cpu" and not any(cache_folder().iterdir()):
        line += " (kernels are compiled first, once on this machine: about a minute)"
    _warn(line)


@contextmanager
def _policy_folder(settings: RootSettings) -> Iterator[str]:
    """The policy as `resolve` takes it; `random:<size>` is made in a temporary folder and gone afterwards."""
    kind, _, size = settings.model.path.partition(":")
    if kind != "random":
        yield settings.model.path
        return
    from paceline.model.random_model import make_random_model

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        made = make_random_model(Path(folder), size=cast("RandomSize", size))
        print(f"paceline: made a {size} model with random weights on the spot; its text is noise", file=sys.stderr)
        yield str(made)


def _open_engine(settings: RootSettings, folder: str) -> Engine:
    from paceline.rollout.engine import Engine
    from paceline.run.recipes import drafter_of

    engine = Engine.from_pretrained(
        folder,
        device=settings.model.device,
        drafter=drafter_of(settings),
        exact=settings.engine.exact,
        settings=settings.engine,
        budget=settings.budget,
    )
    if settings.model.device != "cpu":
        print(f"paceline: {engine.memory_plan()}", file=sys.stderr)
    return engine


def _sibling(engine: Engine, settings: RootSettings, mode: Mode) -> Engine:
    """A new engine on the same weights, with nothing remembered."""
    from paceline.run.recipes import drafter_of

    drafter = None if mode == "off" else drafter_of(settings)
    budget = settings.budget.model_copy(update={"always": True}) if mode == "everything" else settings.budget
    return type(engine)(engine.decoder, engine.tokenizer, drafter, settings.engine, budget)


def _prepare(engine: Engine, settings: RootSettings, lines: Sequence[PromptLine]) -> list[str | list[int]]:
    """Prompts as the engine takes them: chats become text by the tokenizer's own template."""
    return [_prepare_one(engine, settings.model.chat, line) for line in lines]


def _prepare_one(engine: Engine, is_chat: bool, line: PromptLine) -> str | list[int]:
    if line.token_ids is not None:
        return line.token_ids
    if line.text is not None and not is_chat:
        return line.text
    if engine.tokenizer is None:
        raise ValueError("this model folder has no tokenizer: give prompts as lists of token ids")
    return engine.tokenizer.encode_chat(line.messages or [{"role": "user", "content": line.text}])


def _generate_to_stdout(engine: Engine, settings: RootSettings, lines: Sequence[PromptLine], is_jsonl: bool) -> None:
    from paceline.rollout.files import to_line

    given = _prepare(engine, settings, lines)
    rollouts = engine.generate(given, settings.sampling.build(), progress=True)
    for rollout in rollouts:
        if is_jsonl:
            print(to_line(rollout, lines[rollout.prompt_index]))
        else:
            print(f"--- prompt {rollout.prompt_index}, sample {rollout.sample_index} ({rollout.finish_reason})")
            print(rollout.text)


def _generate_to_file(engine: Engine, settings: RootSettings, lines: Sequence[PromptLine], out: Path) -> None:
    from paceline.rollout.files import RolloutFile

    given = _prepare(engine, settings, lines)
    file = RolloutFile(out, lines)
    try:
        with file:
            engine.generate(given, settings.sampling.build(), on_finish=file.write, progress=True)
    except BaseException:
        if file.num_written:
            print(f"paceline: stopped early; {file.num_written} rollouts are in {file.partial}", file=sys.stderr)
        raise
    print(f"paceline: wrote {file.num_written} rollouts to {out}", file=sys.stderr)


def _print_comparison(result: Comparison, drafter: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("speculation", "seconds", "tokens/s", "accept length")
    sides = (("off", result.seconds_off, 1.0), (drafter, result.seconds_on, result.accept_length))
    for name, runs, accept_length in sides:
        seconds = statistics.median(runs)
        table.add_row(name, f"{seconds:.3f}", f"{result.num_tokens / seconds:,.0f}", f"{accept_length:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    print(f"{result.ratio:.2f}x as fast with speculation on (median of {len(result.seconds_on)})")
    for name, counts in result.sources.items():
        far = ", ".join(f"{key[3:]}: {value:.0%}" for key, value in counts.items() if key.startswith("at_"))
        print(
            f"{name}: {counts['verified']:,.0f} of {counts['proposed']:,.0f} guesses verified in "
            f"{counts['milliseconds']:,.1f} ms, {counts['accepted']:,.0f} right, "
            f"{counts['accepted'] / result.num_tokens:.0%} of all tokens"
            + (f"; drafts right up to {far}" if far else "")
        )
    print(
        f"{result.num_identical} of {result.num_rollouts} sequences identical, token ids and log-probabilities, "
        f"also when every guess is verified ({result.num_verified:,} guesses, {result.num_accepted:,} right)"
    )
    if result.difference is not None:
        print(f"first difference: {result.difference}")


def _warn(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _print_findings(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    marks = {None: "      ", True: "ok    ", False: "FAILED"}
    for finding in findings:
        print(f"{marks[finding.ok]}  {finding.name:<{width}}  {finding.detail}")
