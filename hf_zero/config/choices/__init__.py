"""The sections optimizer and scheduler: their types and the arguments of each type."""
