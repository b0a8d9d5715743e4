"""Requests to the rollout server that are nearly right: a route, a body of its kind, and what a stranger made of it.

    case = make_request(seed, index)
    case.path, case.body

A case is a function of its two numbers. `fuzz_requests.py` sends them. `ROUTES` holds bodies that the server accepts;
the mutations are those of documents (`trees.py`, `disk.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fuzzing.disk import BYTES
from fuzzing.documents import Parsed
from fuzzing.trees import MUTATIONS

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TENSORS = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]], "packed": True}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
SAMPLED = {"n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "max_tokens": 2, "seed": 3}
JOIN = "/init_weight_transfer_engine"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
ROUTES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "abc", **SAMPLED, "stop": ["x"], "logprobs": 1, "return_token_ids": True, "cache_salt": "a"},
        {"prompt": [[40, 41], [7]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": ["ab", "c"], "max_tokens": 1, "stop_token_ids": [1, 2], "ignore_eos": True, "echo": False},
    ],
    "/v1/chat/completions": [
        {"messages": HI, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 0},
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2},
        {"messages": HI, "max_completion_tokens": 2, "stream": True, "chat_template_kwargs": {"loud": True}},
    ],
    "/inference/v1/generate": [
        {"token_ids": [40, 41, 42], "sampling_params": {**SAMPLED, "logprobs": 1}, "cache_salt": "b", "priority": 0},
        {"token_ids": [7], "sampling_params": {"max_tokens": 2}, "stream": True, "return_token_ids": True},
    ],
    "/tokenize": [
        {"prompt": "abc", "add_special_tokens": True, "return_token_strs": True},
        {"messages": HI, "tools": [TOOL]},
    ],
    "/detokenize": [{"tokens": [40, 41, 42]}],
    "/abort_requests": [{"request_ids": ["gen-1", "gen-2"]}],
    "/update_weights": [
        {"weight_dir": "same", "weight_version": 3},
        {"weight_dir": "deep/er"},
        {"update_info": TENSORS},
    ],
    "/start_weight_update": [{}],
    "/finish_weight_update": [{"weight_version": "12"}, {}],
    "/weight_checker": [{"action": "compare", "baseline": {"model.norm.weight": "00"}}],
    "/collective_rpc": [{"method": "update_weights_nccl", "kwargs": {"update_info": TENSORS}}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/tmp"}],
    "/reset_prefix_cache": [{"reset_running_requests": False}],
    JOIN: [{"init_info": GROUP}, {"init_info": {"nccl_unique_id_b64": "QUJD", "rank_offset": 1, "world_size": 2}}],
}
FOLDERS = (
    *("..", "../outside", "/", "/etc", "/proc/self", "link", "link/same", "loop", "pipe", "file", "cut", "other-model"),
    *(
        "same/../../outside",
        "same/.",
        "same/model.safetensors",
        "~",
        "$HOME",
        "a" * 300,
        "/".join(["a"] * 3000),
        "a\0b",
    ),
    *("not-there", ".", "pickled", "device", "\\..\\outside", "%2e%2e", "file:///etc", " same", "index-out"),
)
"""Names of weight folders: what they lead to is made by `fuzz_requests.py`."""


@dataclass(frozen=True)
class RequestCase:
    """One request."""

    seed: int
    index: int
    path: str
    body: bytes
    is_valid: bool


def make_request(seed: int, index: int, leave_out: Collection[str] = ()) -> RequestCase:
    """The case of these numbers."""
    chance = random.Random(f"{seed}/{index}")
    path = chance.choice([path for path in ROUTES if path not in leave_out])
    if chance.random() < 0.4:
        path = chance.choice(GENERATING)
    tree = json.loads(json.dumps(chance.choice(ROUTES[path])))
    kind = chance.random()
    if kind < 0.05:
        return RequestCase(seed, index, path, json.dumps(tree).encode(), is_valid=True)
    if path == "/update_weights" and kind < 0.5:
        tree["weight_dir"] = chance.choice(FOLDERS)
        tree.pop("update_info", None)
    parsed = Parsed(tree, "json")
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _mutation(chance)(chance, parsed, DONORS)
    try:
        body = parsed.render()
    except RecursionError:
        body = b"[" * 10_000
    if kind > 0.9:
        body = chance.choice(BYTES)(chance, body)
    return RequestCase(seed, index, path, body[: 2**22], is_valid=False)


def _mutation(chance: random.Random) -> Callable[..., None]:
    names = list(MUTATIONS)
    [name] = chance.choices(names, [MUTATIONS[one][1] for one in names])
    return MUTATIONS[name][0]


DONORS: tuple[Any, ...] = tuple(body for bodies in ROUTES.values() for body in bodies)
"""Bodies whose parts end up in other bodies."""
