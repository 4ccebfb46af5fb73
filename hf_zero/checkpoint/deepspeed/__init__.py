"""DeepSpeed's files: their keys and names, the dictionaries in them, and how each kind is read."""
