"""The weights room: what leaves the house and comes back. Checkpoints in, published folders and drafters out; trains nothing."""
