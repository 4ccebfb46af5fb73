"""Whole programs: an unmodified Trainer script with real launchers, compared with both oracles."""
