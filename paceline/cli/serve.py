"""`paceline serve`: the rollout server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say
from paceline.cli.options import ConfigOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, open_engine, policy_folder, say_loading
from paceline.core.extras import how_to_install

if TYPE_CHECKING:
    from paceline.run.settings import RootSettings
    from paceline.serving.routes import Model


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
    weight_root: Annotated[
        Path | None,
        typer.Option(
            "--weight-root", metavar="FOLDER", exists=True, file_okay=False, help="/update_weights loads from below it."
        ),
    ] = None,
    max_open: Annotated[int, typer.Option("--max-open", min=1, help="Answers that may be open at once.")] = 1024,
) -> None:
    """Serve a model over HTTP, with the routes of vLLM and OpenAI.

    With a seed, an answer does not depend on who else is served. Weights can be replaced while requests are open.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ValueError(f"the server needs starlette and uvicorn: {how_to_install('serve')}")
    from paceline.serving.process import LOOPBACK, check_address, run_server
    from paceline.serving.routes import Server, ServerLimits

    check_address(host, api_key)
    settings = find_policy(load_settings(ctx.obj, config, model))
    hosts = (*LOOPBACK, "[::1]") if api_key is None else ("*",)
    server = Server(model, ServerLimits(api_key, weight_root=weight_root, hosts=hosts), settings.sampling.seed)
    say_loading(settings)
    with ExitStack() as stack:

        def open_model() -> Model:
            return _open_model(settings, stack.enter_context(policy_folder(settings)), max_open)

        run_server(server, open_model, host, port, say)


def _open_model(settings: RootSettings, folder: str, max_open: int) -> Model:
    from paceline.model.checkpoint import load_weights
    from paceline.model.folder import load_config
    from paceline.serving.engine_loop import EngineLoop
    from paceline.serving.routes import Model

    engine = open_engine(settings, folder)
    decoder = engine.decoder

    def read(folder: Path) -> Callable[[], object]:
        weights = load_weights(folder, load_config(folder))
        return lambda: decoder.load_weights(weights)

    loop = EngineLoop(engine, settings.sampling.seed, max_open)
    return Model(loop, engine.tokenizer, decoder.config.max_context, read)
