"""The command explain."""
