"""A driver in a process of its own whose Ray is struck, for `test_ray_faults.py`: two toys, then one fault.

    python ray_victim.py gcs_server SIGSTOP put

It says when it strikes and what ended it, and has to end by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_cluster import RayStore, open_cluster, own_processes
from paceline.fleet.transport.ray_watch import FleetError
from paceline.fleet.transport.ray_worker import Crew

SETTINGS = FleetSettings(workers=2, ray_timeout_s=15, answer_timeout_s=60, quiet_timeout_s=60, start_timeout_s=120)


def main(kind: str, fault: str, doing: str) -> None:
    try:
        with open_cluster(SETTINGS) as cluster:
            crew = Crew(cluster, "fleet_toys:make", {"load_s": 0.0}, SETTINGS)
            num_joined = 0
            for _ in range(SETTINGS.workers):
                crew.start()
            while num_joined < SETTINGS.workers:
                num_joined += len(crew.collect(1.0))
            print("session", cluster.ray.get_runtime_context().get_temp_dir(), flush=True)
            os.kill(own_processes()[kind].pid, signal.Signals[fault])
            begun = time.monotonic()
            try:
                while True:
                    if doing == "put":
                        RayStore(cluster.watch).put([np.zeros(1000, np.uint8)])
                    print(*crew.collect(1.0), flush=True)
            finally:
                print("noticed", round(time.monotonic() - begun), flush=True)
                crew.close()
    except FleetError as error:
        print("error", error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
