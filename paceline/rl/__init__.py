"""Reinforcement learning: scored rollouts in, one step of the policy's weights out.

    settings.py     RlSettings, the `rl` section; `build()` resolves the algorithm with everything overridden
    algorithms.py   the table of algorithms, one row each, and the advantages a row gives
    advantage.py    how good a response is against its group or the batch
    filters.py      which groups are trained on, what overlong responses lose, which tokens count
    packing.py      samples in draw order -> packs without padding -> virtual workers
    loss.py         log-probabilities of a pack -> a loss that no packing changes, and sums for the metrics
    reduction.py    gradients of packs -> one gradient, added in a fixed tree
    optimizers.py   optimizers by name or import path, learning rates as functions of the step
    learner.py      samples -> one step of the policy's weights
    sharded.py      the same over several ranks that each hold a share, for policies that outgrow one GPU
    ranks.py        how those ranks meet, and what they say when one is lost

The order of a step: filters, advantages, packing, loss, reduction, optimizer. Only a learner writes policy weights.
What chooses settings or samples imports no torch; importing this package costs nothing.
"""
