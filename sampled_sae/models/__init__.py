"""Language models and sentence embedders."""
