"""One decoder for Llama, Qwen2, Qwen3 and Mistral, shared by training and rollouts.

`config` describes a model, `checkpoint` reads and writes its Hugging Face folder, `tokenizer` turns text into ids,
`decoder` computes logits. Import the modules, not this package: it stays empty so that torch is loaded only on demand.
"""
