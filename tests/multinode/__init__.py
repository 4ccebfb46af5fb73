"""Several nodes on one machine, and jobs that run across them."""
