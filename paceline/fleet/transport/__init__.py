"""How commands, reports and weights travel between the driver and its workers."""
