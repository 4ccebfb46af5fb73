"""How hf_zero answers to the name `deepspeed`: the import hook, the alias package, and small helpers it re-exports."""
