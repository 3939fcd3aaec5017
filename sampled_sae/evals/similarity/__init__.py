"""Similarity of SAEs: across seeds, across configurations, and features that only one of two has."""
