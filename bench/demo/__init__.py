"""`headrace demo`: pack real clips, train, kill the trainer, resume, and prove that the training did not change."""
