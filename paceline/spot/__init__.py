"""The spot trainer: idle time makes the drafter better. The only writer of a drafter's weights.

    learner's forward -> ring -> plan -> micro-step (batch, unroll, loss, optimizer) -> publish -> whoever drafts

    worker.py       Spot: what the run loop holds; observes the learner, works for a while, publishes
    ring.py         texts with the policy's hidden states, bounded in bytes
    plan.py         which pieces of which texts the next micro-step takes
    batch.py        those pieces laid out, and what every guess is held against
    loss.py         soft cross-entropy against the policy, chunk by chunk
    trainer.py      Trainer: weights, optimizer, average; micro-steps, versions, roll-back
    log.py          what was done, from which the same weights can be made again
    checkpoints.py  a drafter and its optimizer on disk, written beside the training
    guard.py        whether a version is so much worse than the one before that it must go

How many micro-steps run depends on time. What a drafter is depends only on its log, and no token ever on the drafter.
"""
