"""Inputs that checkpointed calls keep between forward and backward: where they lie, and when they are copied."""
