"""Checks that an inflated model writes the original's text in float32, greedy and sampled; one JSON file.

    python bench/inflate_equality.py --model PATH --shape 1.7b --device cuda                     64 texts of 256 tokens
    python bench/inflate_equality.py --model PATH --shape 0.3b --sequences 8 --tokens 64         on a CPU

In real arithmetic both models are one (`inflate.py`); in float32 they may differ by how sums and norms are rounded, and
by nothing else. Token ids must be equal, and the log-probabilities of all tokens within `--tolerance`, or the bench
fails. Log-probabilities are compared up to the first token that differs, as the texts are no longer the same there.
As a control, the first texts are written again without the factor of eps: that must be seen. Prompts are everyday
requests in the chat template; end tokens do not end a text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from first_calls import everyday_prompts
from inflate import Inflation, shape_config
from real_model import model_folder
from record import package_versions, result_path, write_result
from torch import Tensor

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
ROOM = 64
"""KV tokens of a sequence beside prompt and text: pages are not full."""
NUM_CONTROLS = 8
Row = dict[str, Any]


def make_engine(
    args: argparse.Namespace, config: ModelConfig, weights: Mapping[str, Tensor], prompts: Sequence[Sequence[int]]
) -> Engine:
    """Plain decoding of all prompts at once, in float32."""
    decoder = Decoder(config, weights, device=args.device, precision="float32")
    kv_tokens = len(prompts) * (max(map(len, prompts)) + args.tokens + ROOM)
    settings = EngineSettings(max_sequences=len(prompts), kv_tokens=kv_tokens, precision="float32")
    return Engine(decoder, drafter=None, settings=settings)


def write_texts(
    args: argparse.Namespace, config: ModelConfig, weights: Mapping[str, Tensor], prompts: Sequence[list[int]]
) -> dict[float, list[Rollout]]:
    """One model's texts at every temperature; the model is gone afterwards."""
    engine, made = make_engine(args, config, weights, prompts), {}
    for temperature in args.temperatures:
        start = time.perf_counter()
        sampling = Sampling(temperature=temperature, max_new_tokens=args.tokens, ignore_eos=True, seed=args.seed)
        made[temperature] = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        print(f"hidden size {config.hidden_size}, temperature {temperature:g}: {seconds:.1f} s", flush=True)
    return made


def compare_texts(original: Sequence[Rollout], inflated: Sequence[Rollout]) -> Row:
    """How far the inflated model's texts are from the original's."""
    pairs = list(zip(original, inflated, strict=True))
    shared = [shared_length(a, b) for a, b in pairs]
    sides = [
        np.concatenate([np.asarray(pair[side].logprobs[:length]) for pair, length in zip(pairs, shared, strict=True)])
        for side in (0, 1)
    ]
    differences = np.abs(sides[0] - sides[1])
    return {
        "texts": len(pairs),
        "tokens": sum(len(a.token_ids) for a in original),
        "equal_texts": sum(a.token_ids == b.token_ids for a, b in pairs),
        "compared_tokens": len(differences),
        "equal_bits": int((sides[0] == sides[1]).sum()),
        "largest_difference": float(differences.max(initial=0.0)),
        "mean_difference": float(differences.mean()) if len(differences) else 0.0,
        "splits": [split(a, b, length) for (a, b), length in zip(pairs, shared, strict=True) if is_split(a, b, length)],
    }


def shared_length(a: Rollout, b: Rollout) -> int:
    """Tokens before the first that differs."""
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    fewer = min(len(a.token_ids), len(b.token_ids))
    return next((position for position, (x, y) in enumerate(pairs) if x != y), fewer)


def is_split(a: Rollout, b: Rollout, position: int) -> bool:
    return position < max(len(a.token_ids), len(b.token_ids))


def split(a: Rollout, b: Rollout, position: int) -> Row:
    """Where two texts part: each side's token and log-probability."""
    tokens = [r.token_ids[position : position + 1] for r in (a, b)]
    logprobs = [r.logprobs[position : position + 1] for r in (a, b)]
    return {"prompt": a.prompt_index, "position": position, "tokens": tokens, "logprobs": logprobs}


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    config = load_config(folder)
    weights = {name: weight.to(args.device) for name, weight in load_weights(folder, config).items()}
    prompts = everyday_prompts(folder)(0, args.sequences)
    inflation = Inflation(config, shape_config(args.shape, config))
    original = write_texts(args, config, weights, prompts)
    large = inflation.inflate(weights)
    inflated = write_texts(args, inflation.large, large, prompts)
    faulty = replace(inflation.large, rms_norm_eps=config.rms_norm_eps)
    control = write_texts(args, faulty, large, prompts[:NUM_CONTROLS])
    sizes = {"parameters": config.num_parameters, "inflated_parameters": inflation.large.num_parameters}
    rows: list[Row] = []
    for temperature, texts in original.items():
        case = {"shape": args.shape, "temperature": temperature, **sizes}
        rows.append({"case": "inflated", **case, **compare_texts(texts, inflated[temperature])})
        found = compare_texts(texts[:NUM_CONTROLS], control[temperature])
        rows.append({"case": "control: eps unchanged", **case, **found})
    return rows


def failures(rows: Sequence[Row], tolerance: float) -> list[str]:
    """What misses the bar, and controls that would pass it."""
    found = []
    for row in rows:
        is_within = row["equal_texts"] == row["texts"] and row["largest_difference"] <= tolerance
        if is_within == (row["case"] != "inflated"):
            found.append(f"{describe(row)}{': the control was not seen' if is_within else ''}")
    return found


def describe(row: Row) -> str:
    return (
        f"{row['case']} to {row['shape']}, temperature {row['temperature']:g}: {row['equal_texts']} of {row['texts']} "
        f"texts equal, log-probabilities within {row['largest_difference']:.2g} (mean {row['mean_difference']:.2g}), "
        f"{row['equal_bits']} of {row['compared_tokens']} with equal bits"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub id of a Qwen3 or Llama, or a folder with a GGUF")
    parser.add_argument("--shape", default="1.7b", help="a shape of the model's family: see shapes.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of log-probabilities")
    parser.add_argument("--note", default="", help="a remark for the JSON, such as the source of the model")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/inflate-<shape>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    with model_folder(args.model) as folder:
        rows = measure(args, folder)
    path, versions = args.out or result_path(f"inflate-{args.shape}", gpu), package_versions(PACKAGES)
    more = {"gpu": gpu, "commit_hash": args.commit, "model": args.note}
    write_result(path, "inflate", rows, argv=[sys.argv[0], *argv], versions=versions, **more)
    for row in rows:
        print(describe(row))
    if missed := failures(rows, args.tolerance):
        raise SystemExit("\n".join(["missed:", *missed]))


if __name__ == "__main__":
    main(sys.argv[1:])
