"""One file per kernel: formulas, a form in PyTorch's operations, a way to the GPU's. Imports nothing else of ours."""
