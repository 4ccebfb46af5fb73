"""`python -m hf_zero explain`: a config, resolved and told."""
