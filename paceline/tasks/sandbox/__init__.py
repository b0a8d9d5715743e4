"""A sandbox for code that nobody has checked: no network, a read-only disk, and nothing left running after it."""
