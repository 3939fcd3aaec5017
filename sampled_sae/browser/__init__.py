"""The feature browser: every latent of an SAE on a page."""
