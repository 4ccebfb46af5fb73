"""Files as bytes: formats, checksums, and writing that a crash leaves whole or absent."""
