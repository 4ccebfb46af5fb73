"""Random valid jobs, each compared with itself under what must not matter."""
