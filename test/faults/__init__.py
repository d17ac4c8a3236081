"""Faults on purpose: fuzzed frames, and schedules of blows against a server and its drafter."""
