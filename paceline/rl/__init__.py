"""Reinforcement learning: scored rollouts in, one update of the policy's weights out.

    settings.py     RlSettings, the `rl` section; `build()` resolves the algorithm with all overrides
    algorithms.py   the table of algorithms, one row each, and the advantages a row gives
    advantage.py    how good a response is relative to its group or the batch
    filters.py      which groups are trained on, what overlong responses lose, which tokens count
    packing.py      samples in draw order -> packs without padding -> virtual workers
    loss.py         log-probabilities of a pack -> a loss independent of the packing, and sums for the metrics
    reduction.py    gradients of packs -> one gradient, summed in a fixed tree
    optimizers.py   optimizers by name or import path, learning rates as functions of the step
    learner.py      samples -> one update of the policy's weights
    sharded.py      the same over several ranks with one shard each, for policies too large for one GPU
    ranks.py        how those ranks connect, and their error when one is lost

A step runs filters, advantages, packing, loss, reduction and optimizer in this order. Only a learner writes policy
weights. Code that chooses settings or samples imports no torch; importing this package costs nothing.
"""
