"""Example plug-ins of sampled-sae."""
