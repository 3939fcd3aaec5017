"""Similarity of SAEs: across seeds, across configurations, and features that only one of two has."""

from sampled_sae.evals.similarity.evaluate import Comparison, compare_saes
from sampled_sae.evals.similarity.members import Member, SimilarityConfig, member_of, open_members, top_features

__all__ = ["Comparison", "Member", "SimilarityConfig", "compare_saes", "member_of", "open_members", "top_features"]
