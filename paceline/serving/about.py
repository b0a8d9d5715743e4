"""Routes that say how the server is: health, models, metrics, configuration, tokens of a text.

They read numbers that the engine's thread keeps and must never wait for it.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import paceline
from paceline.serving import answers, incoming, protocol
from paceline.serving.state import Server

PROCESSED = "processed_logprobs"
"""Log-probabilities are those of the logits divided by the temperature, before truncation."""


async def health(server: Server, request: Request) -> Response:
    """200 once requests can be answered."""
    server.ready()
    return JSONResponse({"status": "ready"})


async def liveness(server: Server, request: Request) -> Response:
    """200 while the engine's thread lives; the model may still be loading."""
    if server.model is not None:
        server.ready()
    return JSONResponse({"status": "alive"})


async def version(server: Server, request: Request) -> Response:
    """The version of the package."""
    return JSONResponse({"version": paceline.__version__})


async def models(server: Server, request: Request) -> Response:
    """The one model, by each of its names."""
    most = server.ready().max_context
    cards = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "paceline",
            "root": server.name,
            "max_model_len": most,
        }
        for name in server.names
    ]
    return JSONResponse({"object": "list", "data": cards})


async def server_info(server: Server, request: Request) -> Response:
    """What TRL reads of vLLM's configuration; nothing else of it exists here."""
    model = server.ready()
    transfer = None if model.transfer is None else {"backend": model.transfer.backend}
    config = {
        "model_config": {
            "model": server.name,
            "served_model_name": list(server.names),
            "max_model_len": model.max_context,
            "dtype": f"torch.{model.dtype}",
            "logprobs_mode": PROCESSED,
            "seed": server.seed,
        },
        "parallel_config": {"world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1},
        "weight_transfer_config": transfer,
    }
    return JSONResponse({"vllm_config": config, "paceline_version": paceline.__version__})


async def world_size(server: Server, request: Request) -> Response:
    """One engine on one device."""
    server.ready()
    return JSONResponse({"world_size": 1})


async def metrics(server: Server, request: Request) -> Response:
    """In the text format of Prometheus; under vLLM's names as well where the meaning is the same."""
    loop = server.ready().loop
    values = {
        "paceline_open_answers": ("gauge", loop.num_open),
        "paceline_answers_total": ("counter", loop.num_answers),
        "paceline_aborted_answers_total": ("counter", loop.num_aborted),
        "paceline_tokens_total": ("counter", loop.num_tokens),
        "paceline_prefix_tokens_total": ("counter", loop.num_prefix_tokens),
        "paceline_weight_version": ("gauge", loop.version),
        "paceline_is_paused": ("gauge", int(loop.is_paused)),
        "vllm:num_requests_running": ("gauge", loop.num_open),
        "vllm:num_requests_waiting": ("gauge", loop.num_held),
        "vllm:prompt_tokens_total": ("counter", loop.num_prompt_tokens),
        "vllm:prefix_cache_hits_total": ("counter", loop.num_prefix_tokens),
        "vllm:generation_tokens_total": ("counter", loop.num_tokens),
    }
    lines = [f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items()]
    return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


async def tokenize(server: Server, request: Request) -> Response:
    """Token ids of a text or a chat."""
    asked = await incoming.parse_body(server, request, protocol.TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise ValueError("give either prompt or messages")
    model = server.ready()
    if asked.messages is not None:
        ids = await incoming.encode_chat(server, asked.plain_messages(), asked)
    else:
        ids = await incoming.encode(server, asked.prompt or "", asked.add_special_tokens is not False)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_context, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = answers.token_texts(model.tokenizer, ids, as_ids=False)
    return JSONResponse(found)


async def detokenize(server: Server, request: Request) -> Response:
    """The text of token ids."""
    asked = await incoming.parse_body(server, request, protocol.DetokenizeRequest)
    return JSONResponse({"prompt": await incoming.decode(server, asked.tokens)})
