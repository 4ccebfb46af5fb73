"""Learning-rate schedules by the names that a config uses."""
