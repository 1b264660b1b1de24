"""Byte-level BPE and SentencePiece tokenizers, from Hugging Face folders and from GGUF files."""

from starscope.tokenizer.detokenizer import Detokenizer
from starscope.tokenizer.tokenizer import Tokenizer
from starscope.tokenizer.vocabulary import FimTokens, Token, TokenType, Vocabulary

__all__ = ["Detokenizer", "FimTokens", "Token", "TokenType", "Tokenizer", "Vocabulary"]
