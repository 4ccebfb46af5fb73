"""`hf-zero launch`: starts ranks on this machine, or hands over to pdsh, MPI, Slurm or torchrun. Imports no torch."""
