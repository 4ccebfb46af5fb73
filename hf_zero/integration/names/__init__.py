"""Which names `deepspeed` has, where each comes from, and the modules that the import hook makes of these tables."""
