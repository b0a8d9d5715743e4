"""`paceline serve`: the rollout server."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.console import say
from paceline.cli.options import ConfigOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, open_engine, policy_folder, say_loading
from paceline.core.extras import how_to_install

if TYPE_CHECKING:
    from paceline.run.settings import RootSettings
    from paceline.serving.journal import Journal
    from paceline.serving.state import Model

SPARE_CONNECTIONS = 256
"""For those who ask other things than answers."""


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As --model of the other commands.")],
    config: ConfigOption = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="PACELINE_API_KEY", help="What clients must send."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; may be repeated."),
    ] = None,
    weight_root: Annotated[
        Path | None,
        typer.Option(
            "--weight-root", metavar="FOLDER", exists=True, file_okay=False, help="/update_weights loads from below it."
        ),
    ] = None,
    weight_transfer: Annotated[
        Literal["nccl", "gloo"] | None,
        typer.Option("--weight-transfer", help="Receive weights that a trainer broadcasts."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            metavar="FILE",
            dir_okay=False,
            help="Remember the weights in use; a restart goes on with them.",
        ),
    ] = None,
    max_open: Annotated[int, typer.Option("--max-open", min=1, help="Answers that may be open at once.")] = 1024,
    prefix_share: Annotated[
        float,
        typer.Option("--prefix-share", min=0.0, max=0.9, help="Share of the KV cache that keeps finished texts."),
    ] = 0.5,
    max_body: Annotated[
        int, typer.Option("--max-body", metavar="MIB", min=1, max=1024, help="MiB that a request may have.")
    ] = 16,
) -> None:
    """Serve a model over HTTP, with the routes of vLLM and OpenAI.

    With a seed, an answer does not depend on who else is served. Weights can be replaced while requests are open.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ValueError(f"the server needs starlette and uvicorn: {how_to_install('serve')}")
    from paceline.serving.journal import Journal
    from paceline.serving.process import LOOPBACK, check_address, listen, run_server
    from paceline.serving.state import Server, ServerLimits

    check_address(host, api_key)
    settings = find_policy(load_settings(ctx.obj, config, model))
    notes = None if journal is None else Journal(journal)
    hosts = (*LOOPBACK, "[::1]", "0.0.0.0") if api_key is None else ("*",)
    limits = ServerLimits(api_key, max_body * 2**20, weight_root, hosts)
    server = Server(names or [model], limits, settings.sampling.seed)
    listening = listen(host, port)
    say_loading(settings)
    with ExitStack() as stack:

        def open_model() -> Model:
            folder = stack.enter_context(policy_folder(settings))
            return _open_model(settings, folder, max_open, prefix_share, weight_root, weight_transfer, notes)

        run_server(server, open_model, listening, host, max_open + SPARE_CONNECTIONS, say)


def _open_model(
    settings: RootSettings,
    folder: str,
    max_open: int,
    prefix_share: float,
    weight_root: Path | None,
    backend: Literal["nccl", "gloo"] | None,
    journal: Journal | None,
) -> Model:
    from paceline.serving.engine_loop import EngineLoop
    from paceline.serving.loaded import checksums_of, most_characters, reader_of
    from paceline.serving.state import Model
    from paceline.serving.transfer import Transfer
    from paceline.serving.weight_folder import folder_below

    engine = open_engine(settings, folder)
    decoder = engine.decoder
    read = reader_of(decoder)
    version = num_restarts = 0
    if journal is not None:
        if journal.weight_dir is not None:
            read(folder_below(weight_root, journal.weight_dir))()
        version, num_restarts = journal.version, journal.num_restarts
        journal.begin()
    return Model(
        EngineLoop(engine, settings.sampling.seed, max_open, version, num_restarts, prefix_share),
        engine.tokenizer,
        decoder.config.max_context,
        str(decoder.ops.weight_dtype).removeprefix("torch."),
        most_characters(engine.tokenizer, decoder.config.max_context),
        read,
        checksums_of(decoder),
        None if backend is None else Transfer(backend, decoder),
        journal,
    )
