"""Optimizers that average compressed momentum instead of gradients."""
