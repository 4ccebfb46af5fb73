"""DeepSpeed's modules beside the engine: accelerator, groups, logging, command-line flags, utilities."""
