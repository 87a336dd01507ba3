"""Where keys and values live: pools of pages, each sequence's table of them, and the tree of prefixes."""

from .block_pool import BlockPool, OutOfPagesError
from .cache import KvCache, PrefixStatistics
from .page_store import PageCopy
from .sequence_blocks import SequenceBlocks, block_table, pages_for
from .swap import SwapSpace
from .swap_store import FileStore, HostStore, SwapStore

__all__ = [
    "BlockPool",
    "FileStore",
    "HostStore",
    "KvCache",
    "OutOfPagesError",
    "PageCopy",
    "PrefixStatistics",
    "SequenceBlocks",
    "SwapSpace",
    "SwapStore",
    "block_table",
    "pages_for",
]
