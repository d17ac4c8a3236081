"""sglang-ssd: speculative speculative decoding (SSD) as a plugin for stock SGLang."""

__version__ = "0.1.0"
