"""Hostile programs: random trainings that ought to be right or refused, checked against one plain PyTorch process."""
