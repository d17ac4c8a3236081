"""The target side: an SGLang speculative worker that verifies chains and trusts no drafter."""
