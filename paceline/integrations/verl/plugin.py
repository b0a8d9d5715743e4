"""The entry point `verl.plugins`: registers `paceline` as a name for `actor_rollout_ref.rollout.name`.

verl imports this with itself, in every process, and hides what fails here. So nothing is checked before a run asks for
rollouts under our name; the engine comes with the classes, then.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout import base, replica

from paceline.integrations import verl as ours

NAME = "paceline"
ADAPTER = "paceline.integrations.verl.PacelineAdapter"


def load_replica() -> type[Any]:
    """The class of a replica; called by verl when a run's rollouts have our name."""
    return ours.PacelineReplica


replica.RolloutReplicaRegistry.register(NAME, load_replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = ADAPTER
