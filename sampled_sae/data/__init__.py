"""Text, contexts, activation streams, caches, synthetic data."""
