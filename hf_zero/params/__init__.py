"""Parameters: their storage, flat or sharded, and gathering them around the modules that use them."""
