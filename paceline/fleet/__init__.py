"""Several workers that share the work of one run: the driver, the rules it asks, the workers, and how they talk."""
