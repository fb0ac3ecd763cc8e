"""The demo: the whole road on a small real target, on a CPU, in minutes. Sees every room."""
