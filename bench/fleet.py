"""Fleet overheads: starting processes, publishing weights to them, and noticing that one is gone; one JSON file.

    python bench/fleet.py                              all parts
    python bench/fleet.py --parts start,publish        with Ray: pip install -e '.[ray]'

A start is timed from opening Ray, in a process that has imported torch, until every worker has imported it too and has
answered. Weights are published from one process to others on this machine, checksums included, until each has copied
them over older ones. Before that, the store's memory is touched once, as a run does while models load; that time and
the first publication are reported separately. A worker inflicts a fault on itself; it is timed until the driver
receives the event, and until a replacement is ready.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import package_versions, result_path, write_result
from torch import Tensor

from paceline.fleet.commands import Generate, Publish
from paceline.fleet.reports import Joined, Lost
from paceline.fleet.settings import FleetSettings
from paceline.fleet.throughput import FIRST_SPEED
from paceline.fleet.transport.mailbox import Mailbox
from paceline.fleet.transport.ray_cluster import RayStore, open_cluster
from paceline.fleet.transport.ray_worker import Crew
from paceline.fleet.transport.weights import Holder, Package, Publisher, bytes_of, checksum, put_all
from paceline.fleet.transport.wire import Parcel, pack, unpack
from paceline.fleet.view import Speed

PACKAGES = ("paceline", "torch", "numpy", "ray")
PATIENCE_S = 60.0
FREED_S = 2.0
"""By then Ray's store has reclaimed unreferenced memory. A run spends longer than this on the rest of its start."""
FAULTS = ("kill", "exception", "hang")


# --- the worker -------------------------------------------------------------------------------------------------------


class BenchWorker:
    def __init__(self, mailbox: Mailbox, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._mailbox = mailbox
        self._store = RayStore()
        # Like a model, these fill memory before weights arrive.
        self._weights = make_weights(settings.get("bytes", 0))
        self._holder = Holder(self._store, self._load)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._weights[name].copy_(weight)

    @property
    def speed(self) -> Speed:
        return FIRST_SPEED

    def run(self) -> None:
        while True:
            order = self._mailbox.next()
            assert order is not None
            if isinstance(order.payload, Parcel):
                self._obey(unpack(order.payload, self._store))
            elif isinstance(order.command, Publish):
                self._take_or_give(order.command.version, order.payload)

    def _take_or_give(self, version: int, package: Package | None) -> None:
        start = time.perf_counter()
        if package is not None:
            self._holder.take(package)
            self._say(time.perf_counter() - start)
        else:
            self._mailbox.report(Parcel(b"", put_all(self._store, version, self._weights)))

    def _say(self, message: Any) -> None:
        self._mailbox.report(pack(message, self._store))

    def _obey(self, what: str) -> None:
        match what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exception":
                raise MemoryError
            case "hang":
                while True:
                    pass
        self._say("here")


def make_worker(mailbox: Mailbox, settings: Mapping[str, Any]) -> BenchWorker:
    return BenchWorker(mailbox, settings)


def make_weights(num_bytes: int) -> dict[str, Tensor]:
    """bfloat16, a quarter in one table and the rest in matrices of 8 MB, as in a model of half a billion parameters."""
    sizes = [num_bytes // 4, *[8_000_000] * (num_bytes * 3 // 4 // 8_000_000)]
    return {
        f"w{place}": torch.arange(size // 2, dtype=torch.int32).to(torch.bfloat16)
        for place, size in enumerate([*sizes, num_bytes - sum(sizes)])
        if size
    }


# --- the driver -------------------------------------------------------------------------------------------------------


@contextmanager
def open_crew(settings: FleetSettings, num_bytes: int) -> Iterator[Crew]:
    """Yields a crew whose workers have joined."""
    with open_cluster(settings, num_bytes) as cluster:
        crew = Crew(cluster, "fleet:make_worker", {"bytes": num_bytes}, settings)
        for _ in range(settings.workers):
            crew.start()
        wait_for(crew, Joined, settings.workers)
        yield crew
        crew.close()


def wait_for(crew: Crew, kind: type[Any], count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{count - len(found)} of {kind.__name__} did not come"
        found += [event for _, event in crew.collect(1.0) if isinstance(event, kind)]
    return found


def tell(crew: Crew, number: int, what: str) -> None:
    crew.send(number, Generate(number, 0, ()), pack(what, RayStore()))


def measure_start(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Uses a new process each time: Ray is imported once."""
    rows = []
    for _ in range(args.repeats):
        command = [sys.executable, __file__, "--start-once", "--workers", str(args.workers)]
        begin = time.perf_counter()
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        whole = time.perf_counter() - begin
        opened, joined, closed = map(float, said)
        row = {"ray_s": opened, "ready_s": joined, "close_s": closed, "process_s": whole}
        rows.append({"part": "start", "workers": args.workers} | {name: round(v, 3) for name, v in row.items()})
        print(f"start: Ray {opened:.2f} s, workers ready after {joined:.2f} s, closed in {closed:.2f} s", flush=True)
    return rows


def start_once(num_workers: int) -> None:
    settings = FleetSettings(workers=num_workers)
    begin = time.perf_counter()
    with open_cluster(settings) as cluster:
        opened = time.perf_counter() - begin
        crew = Crew(cluster, "fleet:make_worker", {}, settings)
        numbers = [crew.start() for _ in range(num_workers)]
        for number in numbers:
            tell(crew, number, "answer")
        wait_for(crew, Parcel, num_workers)
        joined = time.perf_counter() - begin
        crew.close()
        closing = time.perf_counter()
    print(opened, joined, time.perf_counter() - closing)


def measure_publish(args: argparse.Namespace) -> list[dict[str, Any]]:
    num_bytes = int(args.gigabytes * 1e9)
    weights = make_weights(num_bytes)
    checksum(bytes_of(weights["w1"]))  # the first call loads or compiles it
    begin = time.perf_counter()
    for weight in weights.values():
        checksum(bytes_of(weight))
    rate = num_bytes / 1e9 / (time.perf_counter() - begin)
    rows: list[dict[str, Any]] = [{"part": "checksum", "gb_per_s": round(rate, 2)}]
    for name, num_receivers in (("driver", 1), ("driver", args.workers), ("worker", 1)):
        with open_crew(FleetSettings(workers=args.workers), num_bytes) as crew:
            begin, publisher = time.perf_counter(), Publisher(RayStore())
            publisher.warm(num_bytes)
            publisher.publish(0, {})
            publisher.wait()
            warm_s = time.perf_counter() - begin
            time.sleep(FREED_S)
            times = [
                _publish(crew, version, publisher, weights, name, num_receivers)
                for version in range(1, args.repeats + 2)
            ]
            publisher.close()
        totals = [total for total, _, _ in times]
        first, median = totals[0], statistics.median(totals[1:])
        rows.append(
            {
                "part": "publish",
                "from": name,
                "to_workers": num_receivers,
                "gigabytes": args.gigabytes,
                "warm_s": round(warm_s, 3),
                "first_s": round(first, 3),
                "first_put_s": round(times[0][1], 3),
                "median_s": round(median, 3),
                "max_s": round(max(totals), 3),
                "put_s": round(statistics.median(put for _, put, _ in times[1:]), 3),
                "take_s": round(statistics.median(take for _, _, take in times[1:]), 3),
                "gb_per_s": round(args.gigabytes / median, 2),
            }
        )
        print(
            f"publish {args.gigabytes} GB, {name} to {num_receivers}: warm-up {warm_s:.2f} s, first {first:.2f} s, "
            f"median {median:.2f} s, slowest {max(totals):.2f} s, {args.gigabytes / median:.2f} GB/s",
            flush=True,
        )
    return rows


def _publish(
    crew: Crew, version: int, publisher: Publisher, weights: Mapping[str, Tensor], name: str, num_receivers: int
) -> tuple[float, float, float]:
    """Seconds in total, into the store, and out of it by the slowest worker."""
    giver = crew.numbers[0]
    receivers = crew.numbers[:num_receivers] if name == "driver" else crew.numbers[1 : 1 + num_receivers]
    begin = time.perf_counter()
    if name == "driver":
        publisher.publish(version, weights)
        package = publisher.wait()
    else:
        package = _give(crew, version, giver)
    put_s = time.perf_counter() - begin
    for number in receivers:
        crew.send(number, Publish(number, version), package)
    taken = wait_for(crew, Parcel, len(receivers))
    return time.perf_counter() - begin, put_s, max(unpack(parcel, RayStore()) for parcel in taken)


def _give(crew: Crew, version: int, giver: int) -> Package:
    """Have a worker publish its weights."""
    crew.send(giver, Publish(giver, version))
    (parcel,) = wait_for(crew, Parcel, 1)
    found: Package = parcel.package
    return found


def measure_faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    settings = FleetSettings(workers=args.workers, quiet_timeout_s=args.quiet, answer_timeout_s=args.quiet)
    rows = []
    with open_crew(settings, 0) as crew:
        for fault in FAULTS:
            for _ in range(args.repeats):
                number = crew.numbers[0]
                begin = time.perf_counter()
                tell(crew, number, fault)
                (lost,) = wait_for(crew, Lost, 1)
                noticed = time.perf_counter() - begin
                wait_for(crew, Joined, 1)
                row = {"noticed_s": round(noticed, 4), "replaced_s": round(time.perf_counter() - begin, 3)}
                rows.append({"part": "faults", "fault": fault, **row, "reason": lost.reason})
                print(f"{fault}: noticed after {noticed:.3f} s, replaced after {row['replaced_s']:.2f} s", flush=True)
    return rows


PARTS = {"start": measure_start, "publish": measure_publish, "faults": measure_faults}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights, in 10^9 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=1.0, help="seconds after which a hanging worker counts as lost")
    parser.add_argument("--start-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/fleet-<hardware>.json)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.start_once:
        start_once(args.workers)
        return
    rows = [row for part in args.parts.split(",") for row in PARTS[part](args)]
    if not args.dry:
        path, versions = args.out or result_path("fleet"), package_versions(PACKAGES)
        # A machine with other load is slow to start processes; read the results with this in mind.
        load = [round(value, 2) for value in os.getloadavg()]
        write_result(path, "fleet", rows, argv=[sys.argv[0], *argv], versions=versions, load_average=load)


if __name__ == "__main__":
    main(sys.argv[1:])
