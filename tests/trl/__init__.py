"""TRL and PEFT with hf_zero, run as users run them."""
