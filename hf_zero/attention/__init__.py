"""Sparse attention: which blocks of keys each block of queries sees, and attention that computes no other."""
