"""Storage of the inputs of checkpointed calls between forward and backward, on the device or in host memory."""
