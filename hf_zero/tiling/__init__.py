"""Tiled compute: per-token functions run over a few tokens at a time, to limit the memory of activations."""
