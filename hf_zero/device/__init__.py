"""The machine: memory of host and device, and copies between them."""
