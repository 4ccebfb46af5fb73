"""Whole programs: an unmodified Trainer script through real launchers, against both oracles."""
