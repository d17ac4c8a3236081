"""sglang-ssd: speculative speculative decoding (SSD, arXiv 2603.03251) as a plugin for stock SGLang."""

__version__ = "0.1.0"
