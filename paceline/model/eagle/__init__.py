"""The EAGLE-3 drafter as a model: its network, its files, one layer beside the policy, and its training forward."""
