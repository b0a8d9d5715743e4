"""`transformers` on a GPU, as fast as we can make it: the peer that `gpu.py` measures Paceline against.

`GeneratePeer` follows its documentation: `generate` with a static cache, which compiles its step. `StaticPeer` is the
same cache with our own loop around one compiled step (CUDA graphs, argmax inside); it is stronger, because the host
work of `generate` adds to every token. `generate_batch` is its continuous batching, run in a separate process
(`python bench/gpu_peers.py MODEL ...`), so that it can be given up after a while.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import model_config, random_weights, transformers_config
from torch import Tensor

ANSWER = "ANSWER "
"""Marks the result line in the output of `generate_batch`'s process."""


def make_model(name: str, weights: Mapping[str, Tensor], device: str) -> Any:
    """A bfloat16 `transformers` model with a copy of these weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(transformers_config(name), dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.eval()


def random_prompts(num_prompts: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """The same prompts for every contender."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length).tolist() for _ in range(num_prompts)]


class StaticPeer:
    """Greedy decoding with a static cache and a compiled step, prompts of one length."""

    name = "StaticCache, single-token forward with argmax under torch.compile(reduce-overhead, fullgraph)"

    def __init__(self, model: Any, max_tokens: int, mode: str = "reduce-overhead") -> None:
        from transformers import StaticCache

        self._model = model
        self._cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self._step = torch.compile(self._greedy, mode=mode, fullgraph=True)

    def _greedy(self, tokens: Tensor) -> Tensor:
        logits = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], float, float]:
        """Tokens, total seconds, and seconds of the steps after the first token."""
        device = self._model.device
        ids = torch.tensor(prompts, device=device)
        self._cache.reset()
        _synchronize()
        start = time.perf_counter()
        outputs = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        token = outputs.logits[:, -1].argmax(-1, keepdim=True)
        made = [token]
        _synchronize()
        decoding = time.perf_counter()
        for _ in range(num_tokens - 1):
            # A graph's next run overwrites its output.
            token = self._step(token).clone()
            made.append(token)
        tokens = torch.cat(made, 1).tolist()
        end = time.perf_counter()
        return tokens, end - start, end - decoding


class GeneratePeer:
    """Greedy `generate` with a static cache, prompts of one length."""

    name = "generate(cache_implementation='static'), which compiles its decoding step"

    def __init__(self, model: Any, max_tokens: int) -> None:
        self._model = model
        self._model.generation_config.eos_token_id = None

    def _run(self, ids: Tensor, num_tokens: int) -> tuple[Tensor, float]:
        _synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache_implementation="static",
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        _synchronize()
        return made[:, ids.shape[1] :], time.perf_counter() - start

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], float, float]:
        """Tokens, total seconds, and seconds of the steps after the first token."""
        ids = torch.tensor(prompts, device=self._model.device)
        first = self._run(ids, 1)[1]
        tokens, seconds = self._run(ids, num_tokens)
        return tokens.tolist(), seconds, seconds - first


def generate_batch_apart(name: str, num_requests: int, prompt_length: int, tokens: Sequence[int], limit: float) -> Any:
    """Run `generate_batch` in another process for each number of tokens; raises an error after `limit`."""
    arguments = [name, str(num_requests), str(prompt_length), *map(str, tokens)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments], capture_output=True, text=True, timeout=limit
    )
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise RuntimeError(f"generate_batch ended with {done.returncode}: {done.stderr[-800:]}")


def run_generate_batch(name: str, num_requests: int, prompt_length: int, tokens: Sequence[int]) -> dict[str, Any]:
    """Seconds for each number of tokens per request, in order; the first call also warms up."""
    from transformers import GenerationConfig

    config = model_config(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(name, random_weights(config, device), device)
    prompts = random_prompts(num_requests, prompt_length, config.vocab_size)
    found = []
    for count in tokens:
        # No end token: -1 is not an id.
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        _synchronize()
        start = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=settings, progress_bar=False)
        seconds = time.perf_counter() - start
        num_made = sum(len(output.generated_tokens) for output in outputs.values())
        found.append({"tokens": count, "made": num_made, "seconds": round(seconds, 3)})
    return {"runs": found, "attention": model.config._attn_implementation}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="`transformers` continuous batching on a model of random weights")
    parser.add_argument("model")
    parser.add_argument("requests", type=int)
    parser.add_argument("prompt_length", type=int)
    parser.add_argument("tokens", type=int, nargs="+", help="tokens per request, for each call")
    args = parser.parse_args(argv)
    answer = run_generate_batch(args.model, args.requests, args.prompt_length, args.tokens)
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
