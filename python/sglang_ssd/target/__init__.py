"""The target side: an SGLang speculative worker that verifies chains and never trusts the drafter."""
