"""Small checkpoints that the experiment runs on, each beside the script that made it."""
