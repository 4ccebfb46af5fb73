"""Smaller models: fewer bits, fewer weights, fewer layers."""
