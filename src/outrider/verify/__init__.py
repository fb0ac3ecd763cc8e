"""The verify room: a target and a drafter in, text and how much of it was drafted out; knows nothing of training or files."""
