"""What every folder shares: the nouns, settings machinery, keyed noise, spans, plugins, file writes."""
