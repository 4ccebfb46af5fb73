"""Files as bytes: formats, checksums, and atomic writing."""
