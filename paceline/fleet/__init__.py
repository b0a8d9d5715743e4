"""Several workers that share the work of one run: the driver, its scheduling rules, the workers and the transport."""
