"""Tests of hf-zero launch."""
