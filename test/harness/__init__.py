"""What the end-to-end tests share: servers as real processes, requests, drafters, comparisons."""
