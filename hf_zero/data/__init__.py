"""What a training sees when: curricula, samplers, analysis of data sets, batches by tokens."""
