"""What a run shows its user: live display, summary, loggers, and Ctrl-C."""
