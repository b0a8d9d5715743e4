"""Rollouts: prompts in, responses out. `engine.py` holds the loop; the other files are parts that never reference it.

A step reads: plan (`scheduler`), choose (`governor`), draft (`draft_rows`), forward (`runner`), verify and commit
(`verify`), learn (`feedback`).
"""
