"""Where keys and values live: the block pool and each sequence's table of blocks."""

from .block_pool import BlockPool, OutOfPagesError
from .sequence_blocks import SequenceBlocks, pages_for

__all__ = ["BlockPool", "OutOfPagesError", "SequenceBlocks", "pages_for"]
