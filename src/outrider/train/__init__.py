"""The train room: the only one that knows devices, processes and time. A RunConfig in, a drafter and its metrics out."""
