"""Tasks: each generates items from (seed, index) and scores responses strictly."""
