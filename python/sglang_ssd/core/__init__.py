"""The algorithm as pure functions and small state: torch only, no process, no SGLang."""
