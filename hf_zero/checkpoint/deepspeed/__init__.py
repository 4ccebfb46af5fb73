"""DeepSpeed's files: their names, keys and dictionaries, and the readers of each kind."""
