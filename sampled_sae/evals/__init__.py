"""Evaluations, one folder each."""
