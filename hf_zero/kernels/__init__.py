"""One file per kernel: a plain-PyTorch reference, then the fast forms. Imports nothing else of ours."""
