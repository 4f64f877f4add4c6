"""The parts of train.py."""
