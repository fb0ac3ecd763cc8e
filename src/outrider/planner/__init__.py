"""The planner room: a run file and a list of GPUs in, a ledger, a plan and a diagnosis out; loads no weights, needs no GPU."""
