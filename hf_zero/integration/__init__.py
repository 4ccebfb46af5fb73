"""Provides the name `deepspeed`: the import hook, the alias package, and helpers that it re-exports."""
