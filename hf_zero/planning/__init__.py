"""What a training will need and how fast it will be, before it runs: from integers, a meta-device trace, a machine."""
