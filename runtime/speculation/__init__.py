"""Speculative decoding that changes no token: what may come next is guessed, and checked in one step."""

from .draft_model import DraftModelProposer
from .ngram import NgramProposer
from .proposer import Answer, Proposer
from .speculator import Speculator

__all__ = ["Answer", "DraftModelProposer", "NgramProposer", "Proposer", "Speculator"]
