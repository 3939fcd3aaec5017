"""Training: one step, one SAE, one run, many SAEs on one stream."""
