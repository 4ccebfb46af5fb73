"""DeepSpeed's engine, optimizers and `initialize`: hf_zero's own with all of DeepSpeed's names."""
