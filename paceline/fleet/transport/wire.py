"""How a fleet's messages travel between processes: as plain data and, where there are tensors, a package of them.

    driver: pack_ask, pack_samples -> desk -> worker: unpack_ask, unpack_samples
    worker: pack_report            -> desk -> driver: unpack_report

Numbers arrive bit for bit as they left: tokens as integers, log-probabilities as 64-bit floats, tensors by checksum.
Used by `ray_carrier.py` and `worker_process.py`. What comes out of a process is read by name and number only: nothing
here may make a class, or call anything, that a message names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.fleet.commands import RunAhead, SequenceKey, SpotTrain
from paceline.fleet.reports import (
    Ask,
    Ended,
    Grew,
    Growth,
    Holds,
    Rested,
    Spent,
    Stretch,
    Summed,
    Trained,
    WorkerReport,
    Wrote,
)
from paceline.fleet.transport.mailbox import Plain
from paceline.fleet.transport.weights import FETCH_S, Package, Store, assemble, put_all
from paceline.fleet.view import Speed
from paceline.model.eagle.files import config_from_hf, config_to_hf
from paceline.model.eagle.network import Eagle
from paceline.rl.learner import WorkerSum
from paceline.rl.packing import Sample
from paceline.rollout.run_ahead.store import RunAheadText
from paceline.rollout.stats import DrafterStats, Stats
from paceline.spot.trainer import TrainerState

DRAFT_IDS = "draft ids"
STAGE = "stage "
"""Before the names of what a drafter's optimizer remembers."""
GRADIENT, METRIC = "gradient ", "metric "
"""Before the names of a sum's tensors."""
COUNTS = ("steps", "rows", "tokens", "visits", "preemptions", "ahead_made", "ahead_offered", "ahead_survived")
DRAFT_COUNTS = ("proposed", "verified", "accepted", "firsts", "milliseconds")


# --- rollouts ---------------------------------------------------------------------------------------------------------


def pack_ask(ask: Ask) -> Plain:
    """Prompts once each: the samples of a draw share theirs."""
    places: dict[int, int] = {}
    prompts: list[Plain] = []
    rows = []
    for request in ask.requests:
        if id(request.prompt) not in places:
            places[id(request.prompt)] = len(prompts)
            prompts.append(np.asarray(request.prompt, np.int32))
        known = None if request.prefix is None else _pack_prefix(request.prefix)
        rows.append((places[id(request.prompt)], request.draw, request.sample_index, request.prompt_index, known))
    drafts = _pack_drafts(ask.drafts)
    return {"sampling": asdict(ask.sampling), "prompts": prompts, "requests": rows, "drafts": drafts}


def unpack_ask(data: Plain) -> Ask:
    sampling, prompts = Sampling(**data["sampling"]), data["prompts"]
    requests = [
        Request(prompts[place], draw, sample, None if known is None else _unpack_prefix(known, sampling), index)
        for place, draw, sample, index, known in data["requests"]
    ]
    return Ask(sampling, requests, _unpack_drafts(data["drafts"]))


def _pack_drafts(drafts: Mapping[SequenceKey, RunAheadText]) -> Plain:
    return [(key, draft.prompt_id, draft.tokens, draft.is_whole) for key, draft in drafts.items()]


def _unpack_drafts(data: Plain) -> dict[SequenceKey, RunAheadText]:
    return {SequenceKey(*key): RunAheadText(*text) for key, *text in data}


def _pack_prefix(known: Prefix) -> Plain:
    logprobs, truncated = known.logprobs, known.truncated_logprobs
    return (
        np.asarray(known.token_ids, np.int32),
        None if logprobs is None else np.asarray(logprobs, np.float64),
        None if truncated is None else np.asarray(truncated, np.float64),
        [tuple(span) for span in known.spans],
    )


def _unpack_prefix(data: Plain, sampling: Sampling) -> Prefix:
    tokens, logprobs, truncated, spans = data
    logprobs, truncated = (None if own is None else own.tolist() for own in (logprobs, truncated))
    return Prefix(sampling, tokens.tolist(), logprobs, truncated, spans)


def _pack_growths(growths: Sequence[Growth]) -> dict[str, Plain]:
    """As a few long rows: hundreds of small ones would take a driver longer to read than to use."""
    texts = [growth.more for growth in growths]
    truncated = [text.truncated_logprobs for text in texts if text.truncated_logprobs is not None]
    return {
        "sampling": asdict(texts[0].sampling),
        "places": [(growth.key, growth.start, len(growth.more.token_ids)) for growth in growths],
        "token_ids": _end_to_end([text.token_ids for text in texts], np.int32),
        "logprobs": _end_to_end([text.logprobs for text in texts], np.float64),
        "truncated": _end_to_end(truncated, np.float64) if len(truncated) == len(texts) else None,
    }


def _unpack_growths(data: Mapping[str, Plain]) -> list[Growth]:
    sampling, tokens, logprobs = Sampling(**data["sampling"]), data["token_ids"].tolist(), data["logprobs"].tolist()
    truncated = None if data["truncated"] is None else data["truncated"].tolist()
    found, first = [], 0
    for key, start, count in data["places"]:
        own = slice(first, first + count)
        more = Prefix(sampling, tokens[own], logprobs[own], None if truncated is None else truncated[own])
        found.append(Growth(SequenceKey(*key), start, more))
        first += count
    return found


def _pack_rollout(rollout: Rollout) -> Plain:
    truncated = rollout.truncated_logprobs
    return {
        "place": (rollout.prompt_index, rollout.sample_index, rollout.draw),
        "token_ids": np.asarray(rollout.token_ids, np.int32),
        "logprobs": np.asarray(rollout.logprobs, np.float64),
        "truncated": None if truncated is None else np.asarray(truncated, np.float64),
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "spans": [tuple(span) for span in rollout.spans],
    }


def _unpack_rollout(data: Plain) -> Rollout:
    truncated = data["truncated"]
    index, sample, draw = data["place"]
    return Rollout(
        index,
        sample,
        draw,
        data["token_ids"].tolist(),
        data["logprobs"].tolist(),
        data["text"],
        data["finish_reason"],
        None if truncated is None else truncated.tolist(),
        data["spans"],
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def pack_samples(samples: Sequence[Sample], store: Store, version: int) -> Package:
    """All samples of a batch as a few long rows, put into the store once for all workers."""
    places = [(s.draw, s.sample, len(s.prompt_ids), len(s.response_ids)) for s in samples]
    rows = {
        "places": np.array(places, np.int64).reshape(-1, 4),
        "prompt_ids": _end_to_end([s.prompt_ids for s in samples], np.int32),
        "response_ids": _end_to_end([s.response_ids for s in samples], np.int32),
        "logprobs": _end_to_end([s.logprobs for s in samples], np.float32),
        "advantages": _end_to_end([s.advantages for s in samples], np.float32),
        "mask": _end_to_end([s.mask for s in samples], np.uint8),
    }
    return put_all(store, version, {name: torch.from_numpy(row) for name, row in rows.items()})


def unpack_samples(package: Package, store: Store) -> list[Sample]:
    # Copies: the package goes when the batch is over, and a sample may be looked at later.
    rows = {name: tensor.numpy().copy() for name, tensor in _fetch(package, store).items()}
    places = rows["places"]
    prompts = np.split(rows["prompt_ids"], np.cumsum(places[:-1, 2]))
    ends = np.cumsum(places[:-1, 3])
    parts = [np.split(rows[name], ends) for name in ("response_ids", "logprobs", "advantages", "mask")]
    return [
        Sample(int(draw), int(sample), prompt, ids, logprobs, advantages, mask.astype(np.bool_))
        for (draw, sample, _, _), prompt, ids, logprobs, advantages, mask in zip(
            places, prompts if len(places) else [], *(part if len(places) else [] for part in parts), strict=True
        )
    ]


def _end_to_end(rows: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(rows).astype(dtype) if rows else np.zeros(0, dtype)


def _fetch(package: Package, store: Store) -> dict[str, Tensor]:
    return assemble(package.manifest, store.get(package.refs, FETCH_S))


# --- drafters ---------------------------------------------------------------------------------------------------------


def pack_eagle(eagle: Eagle, store: Store) -> tuple[Plain, Package]:
    return _describe_eagle(eagle), put_all(store, eagle.version, {**eagle.weights, DRAFT_IDS: eagle.draft_ids})


def unpack_eagle(data: Plain, package: Package, store: Store) -> Eagle:
    return _make_eagle(data, {name: tensor.clone() for name, tensor in _fetch(package, store).items()})


def pack_stage(stage: TrainerState, store: Store) -> tuple[Plain, Package]:
    eagle = stage.eagle
    tensors = {**eagle.weights, DRAFT_IDS: eagle.draft_ids}
    tensors |= {STAGE + name: tensor for name, tensor in stage.tensors.items()}
    return _describe_eagle(eagle) | {"counts": dict(stage.counts)}, put_all(store, eagle.version, tensors)


def unpack_stage(data: Plain, package: Package, store: Store) -> TrainerState:
    tensors = {name: tensor.clone() for name, tensor in _fetch(package, store).items()}
    own = {name.removeprefix(STAGE): tensors.pop(name) for name in list(tensors) if name.startswith(STAGE)}
    return TrainerState(_make_eagle(data, tensors), own, data["counts"])


def _describe_eagle(eagle: Eagle) -> dict[str, Plain]:
    return {"config": config_to_hf(eagle.config, torch.float32), "version": eagle.version}


def _make_eagle(data: Plain, weights: dict[str, Tensor]) -> Eagle:
    draft_ids = weights.pop(DRAFT_IDS)
    return Eagle(config_from_hf(data["config"]), weights, draft_ids, data["version"])


# --- reports ----------------------------------------------------------------------------------------------------------


def pack_report(report: WorkerReport, store: Store) -> tuple[Plain, Package | None]:
    """What a worker says, but for its coming and going, which its carrier sees."""
    match report:
        case Holds(version):
            return {"says": "holds", "version": version}, None
        case Grew(version, growths):
            return {"says": "grew", "version": version} | _pack_growths(growths), None
        case Ended(version, key, rollout):
            return {"says": "ended", "version": version, "key": key, "rollout": _pack_rollout(rollout)}, None
        case Summed(version, part, found):
            tensors = {GRADIENT + name: tensor for name, tensor in (found.gradients or {}).items()}
            tensors |= {METRIC + name: tensor for name, tensor in (found.sums or {}).items()}
            package = put_all(store, version, tensors) if tensors else None
            return {"says": "summed", "version": version, "part": part}, package
        case Spent():
            return {"says": "spent"} | _pack_spent(report), None
        case Wrote(texts):
            return {"says": "wrote", "drafts": _pack_drafts(texts)}, None
        case Trained(stage, has_version, entries, metrics):
            data, package = pack_stage(stage, store)
            said = {"says": "trained", "stage": data, "has_version": has_version, "entries": list(entries)}
            return said | {"metrics": dict(metrics)}, package
        case Rested(RunAhead(worker, turn, draws)):
            return {"says": "rested", "ahead": (worker, turn, draws)}, None
        case Rested(SpotTrain(worker, turn)):
            return {"says": "rested", "spot": (worker, turn)}, None
    raise ValueError(f"a worker cannot say {report!r}")


def unpack_report(data: Plain, package: Package | None, store: Store) -> WorkerReport:
    match data["says"]:
        case "holds":
            return Holds(data["version"])
        case "grew":
            return Grew(data["version"], _unpack_growths(data))
        case "ended":
            return Ended(data["version"], SequenceKey(*data["key"]), _unpack_rollout(data["rollout"]))
        case "summed":
            return Summed(data["version"], data["part"], _unpack_sum(package, store))
        case "spent":
            return _unpack_spent(data)
        case "wrote":
            return Wrote(_unpack_drafts(data["drafts"]))
        case "trained":
            assert package is not None, "a stage comes as a package"
            stage = unpack_stage(data["stage"], package, store)
            return Trained(stage, data["has_version"], data["entries"], data["metrics"])
        case "rested":
            return Rested(RunAhead(*data["ahead"]) if "ahead" in data else SpotTrain(*data["spot"]))
    raise ValueError(f"no worker says {data['says']!r}")


def _unpack_sum(package: Package | None, store: Store) -> WorkerSum:
    """In memory of its own: sums are added up in place, and the store has room for one of each worker."""
    if package is None:
        return WorkerSum(None, None)
    tensors = {name: tensor.clone() for name, tensor in _fetch(package, store).items()}
    found = [
        {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)} or None
        for kind in (GRADIENT, METRIC)
    ]
    return WorkerSum(*found)


def pack_speed(speed: Speed) -> Plain:
    return [getattr(speed, field.name) for field in fields(Speed)]


def unpack_speed(data: Plain) -> Speed:
    return Speed(*data)


def _pack_spent(spent: Spent) -> dict[str, Plain]:
    return {
        "now_s": spent.now_s,
        "stretches": [tuple(stretch) for stretch in spent.stretches],
        "speed": pack_speed(spent.speed),
        "stats": None if spent.stats is None else _pack_stats(spent.stats),
    }


def _unpack_spent(data: Mapping[str, Plain]) -> Spent:
    stats = data["stats"]
    return Spent(
        data["now_s"],
        [Stretch(*stretch) for stretch in data["stretches"]],
        unpack_speed(data["speed"]),
        None if stats is None else _unpack_stats(stats),
    )


def _pack_stats(stats: Stats) -> Plain:
    drafters = {
        name: {
            "counts": [getattr(drafter, count) for count in DRAFT_COUNTS],
            "pieces": [(*piece, count) for piece, count in drafter.pieces.items()],
        }
        for name, drafter in stats.drafters.items()
    }
    counts = [getattr(stats, count) for count in COUNTS]
    return {
        "counts": counts,
        "machine_s": stats.machine_seconds,
        "seconds": dict(stats.seconds),
        "drafters": drafters,
        "saved_ms": stats.saved_ms,
        "forwards": list(stats.forwards.items()),
        "arms": [(*choice, count) for choice, count in stats.arms.items()],
        "curve": list(stats.curve),
    }


def _unpack_stats(data: Plain) -> Stats:
    counts = dict(zip(COUNTS, data["counts"], strict=True))
    stats = Stats(**counts, machine_seconds=data["machine_s"], saved_ms=data["saved_ms"])
    stats.forwards.update(dict(data["forwards"]))
    stats.arms.update({(size, arm): count for size, arm, count in data["arms"]})
    stats.curve = tuple((rows, ms) for rows, ms in data["curve"])
    stats.seconds.update(data["seconds"])
    for name, drafter in data["drafters"].items():
        pieces = Counter({(verified, accepted): count for verified, accepted, count in drafter["pieces"]})
        stats.drafters[name] = DrafterStats(**dict(zip(DRAFT_COUNTS, drafter["counts"], strict=True)), pieces=pieces)
    return stats
