"""A report on the machine for issues: `python -m hf_zero report`, also `ds_report`."""
