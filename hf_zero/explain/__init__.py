"""`python -m hf_zero explain`: shows a resolved config, with the source and effect of each value."""
