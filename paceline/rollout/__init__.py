"""Rollouts: prompts in, responses out. `engine.py` holds the loop; the other files are parts that never reference it.

A step reads: plan (`scheduler`), draft (`proposer`), forward (`runner`), verify (`verify`), commit (`scheduler`).
"""
