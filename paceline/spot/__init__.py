"""The spot trainer: trains the drafter in idle time. The only writer of a drafter's weights.

    learner's forward -> ring -> plan -> micro-step (batch, unroll, loss, optimizer) -> publish -> rollouts

    worker.py       Spot: the run loop's handle; observes the learner, trains for a while, publishes
    ring.py         texts with the policy's hidden states, bounded in bytes
    plan.py         which pieces of which texts the next micro-step takes
    batch.py        the layout of those pieces, and the targets of every guess
    loss.py         soft cross-entropy against the policy, chunk by chunk
    trainer.py      Trainer: weights, optimizer, average; micro-steps, versions, roll-back
    log.py          what was done, from which the same weights can be rebuilt
    checkpoints.py  a drafter and its optimizer on disk, written in the background
    guard.py        whether a version is so much worse than the last one that it must be rolled back

Timing decides how many micro-steps run. A drafter depends only on its log, and no token ever depends on the drafter.
"""
