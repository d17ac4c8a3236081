"""The CPU platform that SGLang loads for SGLANG_PLATFORM=ssd_cpu."""
