"""What few configs ask for; found by `hf_zero.config.extras`, and imported by no other module."""
