"""Prompts in, rollouts out. `engine.py` holds the loop; each other file is one of its parts and knows none of the rest.

A step reads: plan (`scheduler`), draft (`proposer`), forward (`runner`), verify (`verify`), commit (`scheduler`).
"""
