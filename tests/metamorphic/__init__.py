"""Random valid jobs, each compared with variants that must give the same results."""
