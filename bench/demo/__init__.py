"""The main job in one command: pack real clips, train, kill the trainer, resume, and prove that nothing changed."""
