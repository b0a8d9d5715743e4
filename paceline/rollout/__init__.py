"""The rollout engine: prompts in, rollouts out. `engine.py` holds the loop; every other file is one of its parts.

A step reads: plan (`scheduler`), draft (`proposer`), forward (`runner`), verify (`verify`), commit (`scheduler`).
"""
