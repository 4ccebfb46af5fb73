"""What becomes of a compressed model after training: cut, counted, saved."""
