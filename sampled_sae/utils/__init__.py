"""Helpers without SAE-specific code."""
