"""The report of a run: an HTML page and a Perfetto trace; this folder only reads `runs/`."""
