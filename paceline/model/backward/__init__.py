"""Training of the decoder: the log-probabilities of packed texts, by the engine's own operations, with gradients.

    policy.py      TrainablePolicy: master weights and `log_probs(texts)`, the one door to this folder
    packed.py      texts laid end to end as the rows of one forward
    layer.py       embedding and decoder layers: forward by the engine, backward by hand
    head.py        final norm, head and log-softmax in chunks of rows
    rowwise.py  what stands between products, taken back: by autograd, or on a GPU by kernels
    attention.py   the backward of causal attention, sequence by sequence
    formulas.py    the small formulas in plain torch: what a backward differentiates
    products.py    the matrix products of a backward
    states.py      hidden states on the way, for who trains a drafter
    plain.py       the same forward through torch's kernels and autograd, for `exact=False`
    sharded.py     ShardedPolicy: the same forward over weights that several ranks hold together

Called by `rl/learner.py` and `rl/sharded.py`. Nothing here writes a weight of its own accord, and no backward may add
in an order that is not fixed.
"""
