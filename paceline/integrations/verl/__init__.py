"""verl's rollouts with Paceline's engine: `actor_rollout_ref.rollout.name=paceline`.

    agent loop -> PacelineServer.generate -> EngineHost -> EngineLoop -> tokens, log-probabilities, weight versions
    trainer -> PacelineAdapter.update_weights -> PacelineServer.load_weights -> EngineHost

    plugin.py    the entry point that verl loads: registers the two classes below by name
    release.py   which verl this is written for
    replica.py   PacelineReplica: starts the server of one replica
    adapter.py   PacelineAdapter: in the trainer's process, sends weights to the server
    server.py    PacelineServer: verl's names on the engine's host; the Ray actor
    host.py      the engine of one server: opened by weights, closed to free memory
    settings.py  verl's rollout settings as ours, and what is refused
    sampling.py  verl's sampling parameters as `Sampling`
    weights.py   weights as buckets that Ray carries

Only rollouts are replaced. verl is imported by plugin.py, replica.py, adapter.py and server.py alone, and nothing
else of Paceline imports them. docs/integrations.md says what runs; docs/verl-options.md lists every rollout option.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.integrations.verl.adapter import PacelineAdapter
    from paceline.integrations.verl.replica import PacelineReplica

__all__ = ["PacelineAdapter", "PacelineReplica"]

_HOME = {
    "PacelineAdapter": "paceline.integrations.verl.adapter",
    "PacelineReplica": "paceline.integrations.verl.replica",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from paceline.integrations.verl.release import require_verl

    require_verl()
    return getattr(import_module(_HOME[name]), name)
