"""Parameters: how they lie, sharded or not, and how they become whole around the modules that use them."""
