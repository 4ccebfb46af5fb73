"""What an issue needs to know of a machine: `python -m hf_zero report`, by another name `ds_report`."""
