"""Optional features, loaded only by `hf_zero.config.extras`; no other module imports them."""
