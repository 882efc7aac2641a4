"""Train a term's model: train.py TERM [options]."""

from _launch import launch

if __name__ == "__main__":
    launch("train")
