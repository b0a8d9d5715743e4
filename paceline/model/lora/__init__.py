"""Low-rank adapters: W' = round(W + scale * (B @ A)), computed once per change and then used like any weight.

    adapter.py   Adapter: which linear layers, rank and scale, as plain data without torch
    merge.py     one weight: base, A and B in, W' out, the same bits on every device
    merged.py    MergedPolicy: the frozen base, and the decoder that receives W'
    files.py     adapters on disk in PEFT's layout

Engine and learner know nothing of A and B in their forward: both run on W'. `backward/` gives gradients to A and B,
`rl/lora.py` steps them. Nothing here trains.
"""
