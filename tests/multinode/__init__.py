"""Several simulated nodes on one machine, and jobs across them."""
