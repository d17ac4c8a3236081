"""The drafter process: it drafts every likely outcome of the verify that is under way."""
