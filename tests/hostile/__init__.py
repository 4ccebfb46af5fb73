"""Hostile programs: random trainings that must be correct or rejected, compared with one plain PyTorch process."""
