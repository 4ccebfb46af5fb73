"""Profiling: times, collectives, operations, memory, monitors, a trace (docs/profiling.md)."""
