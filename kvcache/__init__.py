"""Where keys and values live: the block pool and each sequence's table of blocks."""
