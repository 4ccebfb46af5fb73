"""Vectors in files: read and written past the system's cache, in a folder that no run leaves behind."""
