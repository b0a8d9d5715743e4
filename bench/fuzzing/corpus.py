"""What the fuzzer starts from: valid documents of every kind, and which loaders read each.

The folder of a case is a copy of `tests/data/older_runs` (a model, data with a reward, and two runs with checkpoints
and a drafter) with a few files that it lacks. Everything here must load: `bench/fuzz.py` checks that before it begins.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from fuzzing.documents import Format, Parsed

SOURCE = Path(__file__).resolve().parents[2] / "tests" / "data" / "older_runs"
STEP = "step-000002"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

MODEL = ("model_config", "model_weights", "policy", "generate")
TOKENIZER = ("tokenizer", "generate")
RUN = ("report", "report_elsewhere", "compare_reports", "resume", "evaluate", "run_folder", "run_settings")
SHOWN = ("report", "report_elsewhere", "compare_reports", "run_folder", "resume")
EXPORTED = ("export_policy", "checkpoint", "resume")
DRAFTER = ("export_drafter", "drafter", "resume")


@dataclass(frozen=True)
class Document:
    """A file of the corpus: how it is parsed, who reads it, and whether a key that comes twice must be refused."""

    path: str
    form: Format
    targets: tuple[str, ...]
    weight: int = 4
    is_strict: bool = False


RUN_FILES = f"spot/checkpoints/{STEP}"
MANIFEST = f"{RUN_FILES}/manifest.json"
DRAFTER_FILES = f"spot/drafter/{STEP}"
DOCUMENTS = (
    Document("recipe.yaml", "yaml", ("recipe", "recipe", "plan"), 14, is_strict=True),
    Document("warmup.yaml", "yaml", ("warmup_recipe",), 3, is_strict=True),
    Document("sampling.yaml", "yaml", ("sample",), 6, is_strict=True),
    Document("arguments.json", "arguments", ("overrides",), 8),
    Document("model/config.json", "json", MODEL, 10, is_strict=True),
    Document("model/generation_config.json", "json", MODEL, 4, is_strict=True),
    Document("model/tokenizer.json", "json", TOKENIZER, 5),
    Document("model/tokenizer_config.json", "json", TOKENIZER, 6, is_strict=True),
    Document("model/model.safetensors", "safetensors", MODEL[1:], 5),
    Document("sharded/model.safetensors.index.json", "json", ("sharded",), 6, is_strict=True),
    Document(f"sharded/{SHARDS[1]}", "safetensors", ("sharded",), 2),
    Document("data.jsonl", "jsonl", ("data",), 6),
    Document("data.csv", "csv", ("data_csv",), 5),
    Document("data-chats.jsonl", "jsonl", ("chats",), 5),
    Document("data-verl/train.jsonl", "jsonl", ("verl",), 3),
    Document("prompts.jsonl", "jsonl", ("prompts", "prompts_as_chats"), 6),
    Document("prompts.txt", "text", ("prompts_text",), 2),
    Document("spot/config.yaml", "yaml", RUN, 8, is_strict=True),
    Document("spot/metrics.jsonl", "jsonl", SHOWN, 8),
    Document("spot/events.jsonl", "jsonl", SHOWN, 6),
    Document("spot/rollouts/step-000002.jsonl", "jsonl", SHOWN, 5),
    Document("spot/rollouts/step-000002.spans.jsonl", "jsonl", SHOWN, 4),
    Document(MANIFEST, "json", EXPORTED, 3),
    Document(f"{RUN_FILES}/state.json", "json", EXPORTED[1:], 6),
    Document(f"{RUN_FILES}/state.safetensors", "safetensors", EXPORTED[1:], 3),
    Document(f"{RUN_FILES}/policy/config.json", "json", (*EXPORTED, "report"), 4, is_strict=True),
    Document(f"{RUN_FILES}/policy/tokenizer.json", "json", ("report", "export_policy"), 2),
    Document(f"{RUN_FILES}/policy/tokenizer_config.json", "json", ("report", "export_policy"), 2),
    Document(f"{RUN_FILES}/policy/model.safetensors", "safetensors", EXPORTED, 2),
    Document("celo2.safetensors", "safetensors", ("learned_optimizer",), 2),
    Document("spot/drafter/log.jsonl", "jsonl", ("resume", "drafter_log"), 3),
    Document(f"{DRAFTER_FILES}/trainer.json", "json", DRAFTER, 3),
    Document(f"{DRAFTER_FILES}/trainer.safetensors", "safetensors", DRAFTER[1:], 2),
    Document(f"{DRAFTER_FILES}/eagle3/config.json", "json", DRAFTER, 5),
    Document(f"{DRAFTER_FILES}/eagle3/model.safetensors", "safetensors", DRAFTER, 3),
)

PROMPTS = (
    {"prompt": "Once upon a time"},
    {"prompt": [5, 6, 7]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello é"}]},
)
CSV_HEADER = b"question,answer,why\r\n"
CSV_ROW = b'"Count to %d, ""slowly"":\n",e,\r\n'
SAMPLING = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "stop": ["x"]}
ARGUMENTS = [
    "--rl.lr=1e-5",
    "--engine.drafter=none",
    "--sampling.stop",
    "###",
    "--eval.pass_at=[1]",
    "--sampling.top_k=5",
]
CHOSEN = {
    *(
        "path",
        "device",
        "name",
        "data",
        "reward",
        "grader_workers",
        "temperature",
        "max_new_tokens",
        "drafter",
        "steps",
    ),
    *(
        "max_sequences",
        "kv_tokens",
        "run_ahead",
        "prompts_per_step",
        "group_size",
        "lr",
        "pack_tokens",
        "betas",
        "items",
    ),
    *("pass_at", "enabled", "open_share", "seed", "workers", "dir", "checkpoint_every", "keep", "loggers"),
}
"""Settings of the runs that stay in their config.yaml."""
EVIL = """from pathlib import Path

Path(__file__).parents[1].joinpath("canary", "imported").touch()


def reward(prompts, completions, **columns):
    return [0.0 for _ in completions]
"""
"""Code that came with a run, and leaves a trace when it is imported."""


@cache
def corpus() -> dict[str, bytes]:
    """Every file of the folder that a case begins as."""
    found = {str(file.relative_to(SOURCE)): file.read_bytes() for file in sorted(SOURCE.rglob("*")) if file.is_file()}
    found |= _sharded(found) | {path: _shortened(found[path]) for path in ("spot/config.yaml", "plain/config.yaml")}
    asked = (
        {"prompt": [{"role": "user", "content": f"Count to {i}."}], "answer": str(i), "level": i} for i in range(30)
    )
    rule = {"style": "rule", "ground_truth": "1"}
    ruled = ({"prompt": [{"role": "user", "content": f"What is {i}?"}], "reward_model": rule} for i in range(30))
    rows = {"data-chats.jsonl": asked, "data-verl/train.jsonl": ruled, "prompts.jsonl": iter(PROMPTS)}
    found |= {name: "".join(json.dumps(row) + "\n" for row in each).encode() for name, each in rows.items()}
    warmup = SOURCE.parents[2] / "recipes" / "warmup-countdown.yaml"
    return found | {
        "data.csv": CSV_HEADER + b"".join(CSV_ROW % i for i in range(30)),
        "prompts.txt": b"Once upon a time\nThere was\n",
        "sampling.yaml": yaml.safe_dump({"sampling": SAMPLING}).encode(),
        "arguments.json": json.dumps(ARGUMENTS).encode(),
        "warmup.yaml": warmup.read_bytes(),
        "evil.py": EVIL.encode(),
        "celo2.safetensors": _learned_optimizer(),
    }


def _learned_optimizer() -> bytes:
    """Weights for CELO2, all of them 0."""
    shapes = {f"w0.{number}": (size, 8) for number, size in enumerate((1, 1, 1, 3, 1, 3, 1, 3, 1, 3, 3, 3, 3, 3))}
    shapes |= {"dense_w.0": (8, 8), "dense_w.1": (8, 3)}
    vectors: dict[str, tuple[int, ...]] = {"b0": (8,), "dense_b.0": (8,), "dense_b.1": (3,)}
    header, size = {}, 0
    for name, shape in {**shapes, **vectors}.items():
        end = size + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [size, end]}
        size = end
    return Parsed(header, "safetensors", bytes(size)).render()


def _shortened(config: bytes) -> bytes:
    """Settings without most of those that nobody chose: parsing YAML takes a large part of the time of a case."""
    tree = yaml.safe_load(config)
    kept = {name: {key: value for key, value in section.items() if key in CHOSEN} for name, section in tree.items()}
    return yaml.safe_dump(kept, sort_keys=False).encode()


def write_files(folder: Path, paths: tuple[str, ...]) -> None:
    """Write some files of the corpus."""
    for parent in sorted({(folder / path).parent for path in paths}):
        parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        (folder / path).write_bytes(corpus()[path])


def _sharded(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same model in two files and an index."""
    whole = Parsed.of(files["model/model.safetensors"], "safetensors")
    names = [name for name in whole.tree if name != "__metadata__"]
    halves = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    weight_map = {name: file for file, chosen in halves.items() for name in chosen}
    index = {"metadata": {"total_size": len(whole.tail)}, "weight_map": weight_map}
    others = {path.replace("model/", "sharded/", 1): data for path, data in files.items() if path.startswith("model/")}
    del others["sharded/model.safetensors"]
    shards = {f"sharded/{file}": shard_of(whole, chosen).render() for file, chosen in halves.items()}
    return others | shards | {"sharded/model.safetensors.index.json": json.dumps(index).encode()}


def shard_of(whole: Parsed, names: list[str]) -> Parsed:
    """A safetensors file with some of the tensors of another."""
    header, tail = {}, b""
    for name in names:
        low, high = whole.tree[name]["data_offsets"]
        header[name] = {**whole.tree[name], "data_offsets": [len(tail), len(tail) + high - low]}
        tail += whole.tail[low:high]
    return Parsed(header, "safetensors", tail)
