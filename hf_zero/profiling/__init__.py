"""Profiling: wall-clock times, collectives, FLOPs, memory, monitors and traces (docs/profiling.md)."""
