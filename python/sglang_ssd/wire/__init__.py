"""Messages between target and drafter and the transports that carry them."""
