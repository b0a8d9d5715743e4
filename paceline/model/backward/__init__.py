"""Training of the decoder: log-probabilities of packed texts, computed by the engine's own operations, with gradients.

    policy.py      TrainablePolicy: master weights and `log_probs(texts)`, the entry point of this folder
    packed.py      texts concatenated into the rows of one forward
    layer.py       embedding and decoder layers: the engine's forward, our backward
    head.py        final norm, head and log-softmax in chunks of rows
    rowwise.py     backward of the row-wise operations between matrix products, by autograd
    rowwise_gpu.py the same by GPU kernels
    attention.py   backward of causal attention, text by text
    products.py    matrix products of a backward
    low_rank.py    gradients of an adapter's A and B, without the gradient of the merged weight
    states.py      hidden states tapped from a forward, for training a drafter
    plain.py       the same forward through torch's kernels and autograd, for `exact=False`
    sharded.py     ShardedPolicy: the same forward over weights sharded across ranks

Called by `rl/learner.py` and `rl/sharded.py`. Nothing here writes a weight unless told to, and every sum of a backward
must have a fixed order.
"""
