"""One decoder for Llama, Qwen2, Qwen3 and Mistral, used for training and for rollouts alike.

`config` reads what a model is, `checkpoint` reads and writes its Hugging Face folder, `tokenizer` turns text into ids,
`decoder` computes logits. Import the modules, not this package: it stays empty so that torch is loaded only by need.
"""
