"""What a run's folder says, as a page to look at and a trace to open: this folder only reads `runs/`."""
