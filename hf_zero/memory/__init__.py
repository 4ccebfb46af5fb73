"""Where memory lies and how it comes and goes."""
