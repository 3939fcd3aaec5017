"""Saved SAEs, one file per format."""
