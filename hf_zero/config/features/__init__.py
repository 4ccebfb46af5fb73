"""Training-time features in a config: their policies, and the rules of their sections."""
