"""Looking into the bus of a run: what `spade bus top`, `tail`, `replay` and `dlq` are made of."""
