"""A report on the machine for bug reports: `python -m hf_zero report`, also `ds_report`."""
