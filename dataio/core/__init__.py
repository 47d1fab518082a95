"""Floor 0: errors by remedy, limits, clock, redacting log, metric registry, crash points. Imports nothing of
Headrace."""
