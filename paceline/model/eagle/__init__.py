"""The EAGLE-3 drafter as a model: its network, its files, its layer next to the policy, and its training forward."""
