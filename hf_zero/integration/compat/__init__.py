"""What DeepSpeed's own modules offer beside the engine: accelerator, groups, logging, command-line flags, utilities."""
