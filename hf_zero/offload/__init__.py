"""Offload: vectors in host memory and on drives, and the placement of an engine's states."""
