"""What a run tells its user: live display, summary, loggers, and Ctrl-C."""
