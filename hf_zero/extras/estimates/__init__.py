"""DeepSpeed's estimates of memory, by its formulas and its tables; found by its names alone."""
