"""`python -m sampled_sae` is the same as `sampled-sae`."""

from sampled_sae.cli import main

main()
