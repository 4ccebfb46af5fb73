"""DeepSpeed's modules besides the engine: accelerator, groups, logging, command-line flags, utilities."""
